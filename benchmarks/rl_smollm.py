"""GRPO of SmolLM2-135M on small sums: the gap between rollout and trainer, and what is learned, by precision.

    python benchmarks/rl_smollm.py --model FOLDER --out rl-smollm                    # on a GPU, 200 seconds
    python benchmarks/rl_smollm.py --model FOLDER --task OTHER.jsonl --budget 600 --out rl-smollm
    python benchmarks/rl_smollm.py --model TINY --device cpu --ways bf16 --seeds 1 --steps 3 --out rl-smollm

| part | |
| --- | --- |
| gap | mean |Δ log p| of sampled tokens, trainer against rollout, FP32 logits on both sides, adapters with values; the
|     | share of tokens that numerics alone would move past a clipping bound. FP8 products also with a rollout in FP8 |
| reward | `octavo grpo`, each way with each seed, all of them side by side on one device until the time is over |

Ways are named and forced: `bf16`; `weights-only`, activations as they are times FP8 weights; `fp8-dgrad`, the same in
forward, and FP8 products in backward; `fp8`, FP8 products in forward and backward. The engine is the native one,
whose rollouts take weights-only products. Runs of one seed begin with equal adapters and see equal prompts. The last
fifth of the steps that all runs have reached is compared.

The model is SmolLM2-135M-Instruct (`python benchmarks/smollm.py --prepare FOLDER`), the task `chain_sum.jsonl`, which
`chain_sum.py` has made of `reasoning-gym`. Every part is a process of its own; `result.json` is written anew as results
come, and what has not ended `GRACE` seconds after the budget is killed. The exit status is 1 where a bound is missed or
a part has failed.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from octavo.tools.bench.result import device_name, versions, without_folders
from octavo.training.files import write_json

WAYS = {
    "bf16": {"precision": "bf16"},
    "weights-only": {"precision": "fp8", "products": "weights-only"},
    "fp8-dgrad": {"precision": "fp8", "products": "fp8-dgrad"},
    "fp8": {"precision": "fp8", "products": "fp8"},
}
HERE = Path(__file__).parent
GAP_BOUND, CLIP_BOUND = 1.25, 0.01  # of the gap in BF16; share of tokens
GRACE = 20.0  # seconds that a run has to finish its step
LOOK = 5.0  # seconds between two looks at the runs
SPREAD = 0.02  # of the adapters' B, which would be 0: about as far as a short training moves them


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder in Hugging Face's layout")
    parser.add_argument("--task", type=Path, default=HERE / "chain_sum.jsonl", help="prompts with answers")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, and of result.json")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds until runs are stopped, start included")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", default="gap,reward")
    parser.add_argument("--steps", type=int, default=2000, help="of a run, at most")
    parser.add_argument("--prompts", type=int, default=16, help="of a step")
    parser.add_argument("--completions", type=int, default=8, help="of each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--alpha", type=float, default=32)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--recipe", default="channel", help="scales of FP8 weights: channel or block")
    parser.add_argument("--gap-prompts", type=int, default=128, help="at most; each is completed --completions times")
    parser.add_argument("--gap-tokens", type=int, default=64, help="of a completion, at most")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--one", choices=("gap",), help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args(arguments)
    options.ways, options.parts = options.ways.split(","), options.parts.split(",")
    for name, allowed in (("ways", tuple(WAYS)), ("parts", ("gap", "reward"))):
        for each in getattr(options, name):
            if each not in allowed:
                parser.error(f"--{name}: {each!r} is none of {', '.join(allowed)}")
    for name in ("model", "task"):
        if not getattr(options, name).exists():
            parser.error(f"--{name} {getattr(options, name)}: not there")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu shows whether it runs")
    return options


def settings_of(options: argparse.Namespace, way: str) -> dict[str, Any]:
    """Return the options of `octavo grpo` that all runs of a way have."""
    names = ["steps", "prompts", "completions", "max_new_tokens", "rank", "alpha", "lr", "device"]
    names += [] if way == "bf16" else ["recipe"]
    own = {name: getattr(options, name) for name in names}
    return {**own, "slots": options.prompts * options.completions, "engine": "native", **WAYS[way]}


# The gap, in a process of its own.


def measure_gaps(options: argparse.Namespace) -> None:
    """Write a row for each way to `gap.jsonl`."""
    for way in options.ways:
        for rollout in ("weights", "fp8") if way == "fp8" else ("weights",):
            row = measure_gap(options, way, rollout)
            with (options.out / "gap.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")


def measure_gap(options: argparse.Namespace, way: str, rollout: str) -> dict[str, Any]:
    """Return how far rollout and trainer are apart. `rollout`: the engine's products, "weights" or "fp8"."""
    from octavo.grpo.model import load, stops
    from octavo.grpo.settings import settings_from_options
    from octavo.rl.batches import Sample, pack
    from octavo.rl.engine import NativeEngine
    from octavo.rl.learner import Learner
    from octavo.rl.loss import gap_statistics
    from octavo.rl.prompts import Prompts
    from octavo.rl.tasks import read_task

    given = {**settings_of(options, way), "max_new_tokens": options.gap_tokens}
    settings = settings_from_options({**given, "model": str(options.model), "task": str(options.task)})
    model, tokenizer = load(str(options.model), settings)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            values = SPREAD * torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(values.bfloat16())  # PEFT rounds adapters of a BF16 base to BF16, and no others
        elif "lora_A" in name:
            parameter.data.copy_(parameter.data.bfloat16())
    learner = Learner(model)
    prompts = Prompts(read_task(str(options.task), HERE / "chain_sum.py"), tokenizer, learner, settings).all
    ids = [prompt.ids for prompt in prompts[: options.gap_prompts]]
    room = max(map(len, ids)) + settings.max_new_tokens
    engine = NativeEngine(model, slots=settings.slots, max_length=room, products=rollout, exact_logprobs=True)
    done = engine.generate(ids, settings.completions, settings.sampling(0, *stops(model, tokenizer, settings)))
    engine.standby()
    samples = [Sample(ids[each.prompt], each.tokens, each.logprobs, 0.0) for each in done]
    batches = pack(samples, settings.micro_batch_tokens, learner.device)
    model.train()
    trained = torch.cat([learner.logprobs(batch, settings.temperature).detach() for batch in batches])
    drawn = torch.cat([batch.rollout for batch in batches])
    size = (trained - drawn).abs().double()
    figures = {**gap_statistics(trained, drawn, settings), "gap_error": float(size.std() / len(size) ** 0.5)}
    return {"way": way, "rollout": rollout, "linears": linears_of(model), "tokens": len(drawn), **figures}


def linears_of(model: Any) -> dict[str, int]:
    """Count the linears that are frozen in FP8 by their products: the way is what was asked for."""
    from octavo.nn.frozen import FP8FrozenLinear

    counts = {"fp8 products": 0, "weights only": 0, "fp8 in backward": 0}
    for module in model.modules():
        if isinstance(module, FP8FrozenLinear):
            kind = "weights only" if not module.fp8_products else "fp8 products"
            counts[kind if module.fp8_forward else "fp8 in backward"] += 1
    return counts


# All parts.


def commands_of(options: argparse.Namespace, given: list[str]) -> dict[str, list[str]]:
    """Return the commands of all parts, by name."""
    commands: dict[str, list[str]] = {}
    if "gap" in options.parts:
        commands["gap"] = [sys.executable, __file__, *given, "--one", "gap"]
    for seed in range(options.seeds if "reward" in options.parts else 0):
        for way in options.ways:
            flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings_of(options, way).items()]
            flags += [f"--seed={seed}", f"--rewards={HERE / 'chain_sum.py'}", f"--out={options.out / f'{way}-{seed}'}"]
            flags += ["--log-interval=10", f"--save-interval={options.steps}", "--overwrite"]
            grpo = [sys.executable, "-m", "octavo.cli", "grpo", str(options.model), str(options.task)]
            commands[f"{way}-{seed}"] = [*grpo, *flags]
    return commands


def start(commands: dict[str, list[str]], out: Path) -> dict[str, subprocess.Popen[bytes]]:
    """Start the processes; each writes what it prints to `NAME.log`."""
    threads = str(max((os.cpu_count() or 1) // len(commands), 1))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    children = {}
    for name, command in commands.items():
        with (out / f"{name}.log").open("wb") as log:
            children[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    return children


def wait(children: dict[str, subprocess.Popen[bytes]], record: dict[str, Any], options: argparse.Namespace) -> None:
    """Wait for the processes until the budget is over, then stop them; write results as they come."""
    began = time.monotonic()
    try:
        while any(child.poll() is None for child in children.values()):
            left = options.budget - (time.monotonic() - began)
            if left <= 0:
                break
            time.sleep(min(LOOK, left))
            collect(record, children, options)
            say(record, time.monotonic() - began)
        record["stopped"] = [name for name, child in children.items() if child.poll() is None]
        for name in record["stopped"]:
            children[name].terminate()
        until = time.monotonic() + GRACE
        for name in record["stopped"]:
            try:
                children[name].wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                children[name].kill()
                children[name].wait()
    finally:
        for child in children.values():
            child.kill()
    collect(record, children, options)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines; one that is being written is left out."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def collect(record: dict[str, Any], children: dict[str, subprocess.Popen[bytes]], options: argparse.Namespace) -> None:
    """Read what there is so far into the record, judge it, and write it."""
    record["gap"] = rows_of(options.out / "gap.jsonl")
    record["runs"] = []
    for name in children:
        if name == "gap":
            continue
        way, _, seed = name.rpartition("-")
        rows = rows_of(options.out / name / "metrics.jsonl")
        kept = ("reward", "length", "equal_groups", "gap_mean", "gap_clip", "kl", "corrected", "rollout_s", "train_s")
        figures = {key: [row[key] for row in rows] for key in kept}
        record["runs"].append({"way": way, "seed": int(seed), "steps": len(rows), **figures})
    failed = [name for name, child in children.items() if child.poll() and name not in record["stopped"]]
    record["failed"] = {name: last_words(options.out / f"{name}.log") for name in failed}
    record["verdicts"] = {**judge_gap(record["gap"]), **judge_rewards(record)}
    write_json(options.out / "result.json", record)


def last_words(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return without_folders(lines[-1][-300:]) if lines else "no words"


def judge_gap(rows: list[dict[str, Any]]) -> dict[str, Any]:
    by = {(row["way"], row["rollout"]): row for row in rows}
    base, verdicts = by.get(("bf16", "weights")), {}
    for (way, rollout), row in by.items():
        name = f"{way}, rollout {rollout}" if rollout == "fp8" else way
        row["ratio"] = row["gap_mean"] / base["gap_mean"] if base and base["gap_mean"] else None
        if way in ("weights-only", "fp8-dgrad") and row["ratio"] is not None:
            verdicts[f"gap of {name} at most {GAP_BOUND} of BF16's"] = row["ratio"] <= GAP_BOUND
        if way != "fp8":
            verdicts[f"clipped by numerics alone, {name}, at most {CLIP_BOUND:.0%}"] = row["gap_clip"] <= CLIP_BOUND
    return verdicts


def judge_rewards(record: dict[str, Any]) -> dict[str, Any]:
    """Compare means over the last fifth of the steps that all runs have; a way's mean is to be among BF16's seeds."""
    runs = [run for run in record["runs"] if f"{run['way']}-{run['seed']}" not in record["failed"]]
    common = min((run["steps"] for run in runs), default=0)
    record["compared_steps"] = common
    if not common:
        return {}
    last = max(common // 5, 1)
    finals: dict[str, list[float]] = {}
    for run in runs:
        run["first"] = statistics.fmean(run["reward"][:last])
        run["final"] = statistics.fmean(run["reward"][common - last : common])
        finals.setdefault(run["way"], []).append(run["final"])
    record["final"] = {way: statistics.fmean(values) for way, values in finals.items()}
    if "bf16" not in finals:
        return {}
    low, high = min(finals["bf16"]), max(finals["bf16"])
    record["bf16_range"] = [low, high]
    return {
        f"final reward of {way} within BF16's seeds": low <= mean <= high
        for way, mean in record["final"].items()
        if way != "bf16"
    }


def say(record: dict[str, Any], seconds: float) -> None:
    runs = [
        f"{run['way']}-{run['seed']} {run['steps']}: {statistics.fmean(run['reward'][-10:]):.2f}"
        for run in record["runs"]
        if run["steps"]
    ]
    print(f"[{seconds:.0f} s] gap {len(record['gap'])} rows; {'; '.join(runs)}", flush=True)


def show(record: dict[str, Any]) -> None:
    for row in record["gap"]:
        ratio = "" if row["ratio"] is None else f", {row['ratio']:.2f}x BF16's"
        print(
            f"gap, {row['way']}, rollout {row['rollout']}: {row['gap_mean']:.4f} ± {row['gap_error']:.4f}{ratio}; "
            f"p99 {row['gap_p99']:.3f}, k3 {row['gap_k3']:.1e}, exp {row['gap_exp']:.3f}, "
            f"clipped {row['gap_clip']:.2%}; {row['tokens']:,} tokens; {row['linears']}"
        )
    for run in record["runs"]:
        if "final" in run:
            seconds = [statistics.median(run[name]) for name in ("rollout_s", "train_s")]
            print(
                f"reward, {run['way']}, seed {run['seed']}: {run['first']:.3f} at first, {run['final']:.3f} at last of "
                f"{record['compared_steps']} steps ({run['steps']} in all; {seconds[0]:.2f} s rollout, "
                f"{seconds[1]:.2f} s training; gap {statistics.fmean(run['gap_mean']):.4f}, clipped by numerics alone "
                f"{statistics.fmean(run['gap_clip']):.2%})"
            )
    print(f"final means: {record.get('final')}, BF16's seeds: {record.get('bf16_range')}")
    print(f"stopped when the time was over: {', '.join(record['stopped']) or 'none'}")
    for name, words in record["failed"].items():
        print(f"FAILED {name}: {words}")
    for name, passed in record["verdicts"].items():
        print(f"{'pass' if passed else 'MISS'}  {name}")


def main(arguments: list[str] | None = None) -> int:
    options = read_options(arguments)
    if options.one:
        measure_gaps(options)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gap.jsonl").unlink(missing_ok=True)
    names = ("ways", "seeds", "budget", "prompts", "completions", "max_new_tokens", "rank", "alpha", "lr", "recipe")
    record: dict[str, Any] = {
        "kind": "rl-smollm",
        "date": str(datetime.date.today()),
        "device": device_name(options.device),
        "versions": versions(),
        "model": options.model.name,
        "task": options.task.name,
        "settings": {name: getattr(options, name) for name in (*names, "gap_prompts", "gap_tokens")},
        "stopped": [],
    }
    children = start(commands_of(options, sys.argv[1:] if arguments is None else arguments), options.out)
    wait(children, record, options)
    show(record)
    print(f"Result: {options.out / 'result.json'}")
    return int(bool(record["failed"]) or not all(record["verdicts"].values()))


if __name__ == "__main__":
    sys.exit(main())
