"""`octavo bench --mode rollout` and `--mode grpo`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from octavo.cli.options import names, refuse
from octavo.training.errors import UserError

ROLLOUT_MODES = ("rollout", "grpo")
_GRPO_ONLY = ("mini-batches", "micro-batch-tokens", "standby")
_COUNTS = ("prompt", "new-tokens", "group", "peer-tokens", "mini-batches", "micro-batch-tokens")
_TINY: dict[str, Any] = {"slots": "4", "prompt": 16, "new-tokens": 16, "group": 2}
_USUAL: dict[str, Any] = {"slots": "64", "prompt": 128, "new-tokens": 512, "group": 8}


def bench_rollouts(
    mode: str,
    model: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    recipe: str | None,
    against: str | None,
    rounds: int | None,
    out: Path | None,
) -> None:
    """Run the bench with the options of the command, None for those that were not given."""
    from octavo.numerics.checks import check_positive_int
    from octavo.tools.bench.request import run_request
    from octavo.tools.bench.rollout.runner import RolloutBench
    from octavo.tools.bench.rollout.ways import AGAINST, DEFAULT_RECIPES, OWN, make_ways
    from octavo.tools.families import family_of
    from octavo.tools.rollouts import Size, check_positions
    from octavo.tools.shapes import POSITIONS, SHAPES, make_case

    if mode == "rollout":
        refuse({name: options[name] for name in _GRPO_ONLY}, "is of --mode grpo; leave it out")
    else:
        refuse({"peer-tokens": options["peer-tokens"]}, "is of --mode rollout; leave it out")
    if family_of(SHAPES.get(str(model["preset"]), {}).get("model_type")).predicts != "token":
        raise UserError(f"--preset {model['preset']}: --mode {mode} is of Hugging Face decoders")
    usual = _TINY if str(model["preset"]).endswith("tiny") else _USUAL
    given = {name: options[name] if options[name] is not None else usual[name] for name in usual}
    try:
        for name, value in {**{name: options[name] for name in _COUNTS}, "rounds": rounds}.items():
            if value is not None:
                check_positive_int(f"--{name}", value)
        counts = [_count(text) for text in names(str(given["slots"]))]
        sizes = [Size(count, given["prompt"], given["new-tokens"], min(given["group"], count)) for count in counts]
        if mode == "grpo" and len(sizes) > 1:
            raise UserError(f"--slots {given['slots']}: a step of GRPO has one size; give one number")
        length = sizes[0].length
        case = make_case(**{**model, "rank": model["rank"]}, tokens=length, seq=length, mode="lora")
        positions = case.config.get("max_position_embeddings") if model["config"] else POSITIONS[case.name]
        check_positions(case.name, sizes[0], positions)
        if not case.rank:
            raise UserError("--rank 0: rollouts are of a model with adapters; give a rank")
        peers = names(against) if against not in (None, "none") else [] if against else _default(mode, AGAINST, OWN)
        recipes = [] if recipe == "none" else names(recipe or DEFAULT_RECIPES[mode])
        training = {
            "mini_batches": 2 if options["mini-batches"] is None else options["mini-batches"],
            "micro_batch_tokens": 8192 if options["micro-batch-tokens"] is None else options["micro-batch-tokens"],
            "standby": options["standby"] is not False,
        }
        bench = RolloutBench(
            mode,
            case,
            make_ways(mode, recipes, peers),
            sizes,
            runs=2 if rounds is None else rounds,
            peer_tokens=options["peer-tokens"],
            training=training if mode == "grpo" else {},
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    run_request(bench, out=out, command=["octavo", *sys.argv[1:]], console=Console())


def _default(mode: str, all_of_them: tuple[str, ...], own: str) -> list[str]:
    return list(all_of_them) if mode == "rollout" else [own]


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise UserError(f"--slots {text}: numbers of completions, by commas, such as 64 or 1,64,256")
    return int(text)
