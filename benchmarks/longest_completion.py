"""Longest completion of GRPO within a given GPU memory: BF16 against FP8 weights, and an FP8 cache; and the plan.

    python benchmarks/longest_completion.py --preset 8b --gib 24 --slots 8 --out longest-completion.json
    python benchmarks/longest_completion.py --preset tiny --device cpu --gib 24 --longest 256 --out longest.json

Each way runs in a process of its own, which torch lets have `--gib` GiB and no more (CUDA's own context comes on top).
A length fits if three things do, one after the other, as in a step of GRPO: the cache of all completions, with the
prompts in it and a decode step recorded; standby; and an update on one sequence of that length with AdamW, twice.
Tokens are not generated one by one: any token ends a completion here, and the cache is as large as if none did. Lengths
are multiples of 64; the search begins where the plan expects the end.
"""

import argparse
import datetime
import gc
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from longest import longest

from octavo.optim import build_optimizer
from octavo.rl.batches import Sample, pack
from octavo.rl.completions import Sampling
from octavo.rl.engine import NativeEngine
from octavo.rl.learner import Learner
from octavo.tools.bench.result import device_name, versions, without_folders
from octavo.tools.bench.rollout.measure import make_prompts
from octavo.tools.bench.rollout.models import causal_of, prepare
from octavo.tools.bench.rollout.ways import Way, make_ways
from octavo.tools.plan.gpus import CONTEXT_GIB, Gpu
from octavo.tools.plan.grpo import STRIDE, GRPOOption, longest_completion
from octavo.tools.plan.options import Option
from octavo.tools.rollouts import Size
from octavo.tools.shapes import LLAMAS, POSITIONS, Case, make_case
from octavo.training.files import write_json

RANK = 32
GIB = 2**30
WAYS = "bf16,channel,channel+fp8-kv"


def way_of(name: str) -> Way:
    own = name == "bf16"
    return make_ways("rollout", [] if own else [name], [name] if own else [])[0]


def planned(case: Case, way: Way, size: Size, gib: float, checkpointing: str) -> int:
    """Return the planned length. torch's limit excludes CUDA's context; adapters are in BF16 here."""
    code = "own" if way.recipe is None else "fp8"
    option = Option(code, way.recipe, compiled=False, checkpointing=checkpointing)
    return longest_completion(case, GRPOOption(option, way.fp8_kv), size, Gpu("budget", gib + CONTEXT_GIB, (9, 0)))


class Run:
    """A model with an engine and an optimiser, which tries completions of some length."""

    def __init__(self, case: Case, way: Way, size: Size, *, checkpointing: bool) -> None:
        self.case, self.way, self.size = case, way, size
        self.model = prepare(case, way).model
        if checkpointing:
            causal_of(self.model).gradient_checkpointing_enable({"use_reentrant": False})
        self.learner = Learner(self.model)
        self.optimizer = build_optimizer("adamw", self.learner.parameters, lr=1e-5)
        self.tried: dict[int, float | None] = {}
        self.failed_in: dict[int, str] = {}

    def fits(self, new_tokens: int) -> bool:
        on_gpu = self.case.device == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        part = "rollout"
        try:
            self._roll_out(new_tokens)
            part = "training"
            for _ in range(2):  # the optimiser's states are there from the second on
                self._train(new_tokens)
            peak = torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0
            self.tried[new_tokens] = peak
        except (torch.OutOfMemoryError, ValueError) as error:
            if isinstance(error, ValueError) and "a cache of" not in str(error):
                raise
            self.tried[new_tokens] = None
            self.failed_in[new_tokens] = part
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        return self.tried[new_tokens] is not None

    def _roll_out(self, new_tokens: int) -> None:
        kv_dtype = "fp8" if self.way.fp8_kv else "auto"
        engine = NativeEngine(self.model, slots=self.size.slots, kv_dtype=kv_dtype, memory_share=1.0)
        every = tuple(range(self.case.vocabulary))
        sampling = Sampling(new_tokens, stop_ids=every, seed=0)
        try:
            engine.generate(make_prompts(self.case, self.size), self.size.group, sampling)
        finally:
            engine.standby()

    def _train(self, new_tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        prompt, tokens = (
            torch.randint(self.case.vocabulary, (count,), generator=generator).tolist()
            for count in (self.size.prompt, new_tokens)
        )
        (batch,) = pack([Sample(prompt, tokens, [0.0] * new_tokens, 1.0)], 1, self.learner.device)
        self.model.train()
        loss = -self.learner.logprobs(batch, 1.0).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def measure(options: argparse.Namespace, name: str) -> dict[str, Any]:
    way = way_of(name)
    size = Size(options.slots, options.prompt, STRIDE, min(options.group, options.slots))
    positions = POSITIONS[options.preset]
    case = make_case(
        preset=options.preset, config=None, layers=options.layers, tokens=positions, seq=positions, seed=0,
        device=options.device, force=True, mode="lora", rank=RANK,
    )  # fmt: skip
    case = replace(case, config={**case.config, "max_position_embeddings": positions})
    if options.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(options.gib * GIB / torch.cuda.get_device_properties(0).total_memory)
    kind = "layers" if options.checkpointing else "none"
    expected = planned(case, way, size, options.gib, kind)
    run = Run(case, way, size, checkpointing=options.checkpointing)
    most = (positions - size.prompt) // STRIDE * STRIDE
    most = min(most, options.longest) if options.longest else most
    found = longest(lambda n: n <= most and run.fits(n), min(expected, most), STRIDE)
    return {
        "way": name, "longest": found, "planned": expected, "peak_gib": run.tried.get(found), "tried": run.tried,
        "failed_in": run.failed_in,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=tuple(LLAMAS), default="8b")
    parser.add_argument("--layers", type=int, help="instead of the preset's")
    parser.add_argument("--gib", type=float, default=24.0)
    parser.add_argument("--slots", type=int, default=8, help="completions at once")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--ways", default=WAYS, help="comma-separated, as `octavo bench --mode rollout` names them")
    parser.add_argument("--checkpointing", action="store_true", help="keep the inputs of layers alone")
    parser.add_argument("--longest", type=int, help="try no longer completions than this")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; `octavo plan 8b --mode grpo --gpu 24` says what to expect")
    if options.one:
        print(json.dumps(measure(options, options.one)))
        return
    given = sys.argv[1:] if arguments is None else list(arguments)
    rows: list[dict[str, Any]] = []
    for way in options.ways.split(","):
        run = subprocess.run([sys.executable, __file__, *given, "--one", way], capture_output=True, text=True)
        if run.returncode:
            sys.exit(f"{way}: {run.stderr.strip().splitlines()[-1]}")
        rows.append(json.loads(run.stdout.splitlines()[-1]))
        row = rows[-1]
        print(f"{way}: {row['longest']:,} new tokens, {row['longest'] / max(rows[0]['longest'], 1):.2f}x; planned "
              f"{row['planned']:,}; peak {row['peak_gib']} GiB; failed in {row['failed_in']}", flush=True)  # fmt: skip
    record: dict[str, Any] = {
        "date": str(datetime.date.today()),
        "device": device_name(options.device),
        "versions": versions(),
    }
    record |= {
        "command": ["longest_completion.py", *map(without_folders, given)],
        "gib": options.gib,
        "slots": options.slots,
    }
    record |= {"prompt": options.prompt, "checkpointing": options.checkpointing, "rows": rows}
    write_json(options.out, record)
    print(f"Result: {options.out}")


if __name__ == "__main__":
    main()
