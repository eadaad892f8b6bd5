"""Longest sequence of a LoRA step within a given GPU memory: BF16 against FP8, and against the plan.

    python benchmarks/longest.py --preset 8b --gib 24 --ways bf16,channel,block

Each way runs in a process of its own, which torch lets have `--gib` GiB and no more (CUDA's own context comes on top).
A step is one sequence: forward, backward, AdamW on adapters of rank 32 on all linears. Lengths are multiples of 128;
the search begins where the plan expects the end. Layers are not compiled: every length would be compiled anew.
"""

import argparse
import datetime
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from octavo.optim import build_optimizer
from octavo.tools.bench.contenders import FROZEN, Contender
from octavo.tools.bench.prepared_model import PreparedModel
from octavo.tools.bench.result import device_name, versions
from octavo.tools.plan.fits import STRIDE, longest_sequence
from octavo.tools.plan.gpus import CONTEXT_GIB, Gpu
from octavo.tools.plan.options import Option
from octavo.tools.shapes import LLAMAS, Case, make_case
from octavo.training.files import write_json

RANK = 32
POSITIONS = 2**17
GIB = 2**30
WAYS = ("bf16", "octavo-bf16", *FROZEN)


def longest(fits: Callable[[int], bool], first: int, stride: int = STRIDE) -> int:
    """Return the largest multiple of the stride that fits, if all smaller ones do; 0 if none. Starts at `first`."""
    low, high = 0, max(first // stride, 1)
    while fits(high * stride):
        low, high = high, high + max(high // 8, 1)
    if low == 0:
        step = max(high // 8, 1)
        while high - step > 0 and not fits((high - step) * stride):
            high -= step
        low = max(high - step, 0)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * stride) else (low, middle)
    return low * stride


def contender_of(way: str) -> Contender:
    if way in ("bf16", "octavo-bf16"):
        return Contender(way, way, compile=False)
    return Contender(f"octavo {way}", "octavo", compile=False, recipe=way)


def planned(case: Case, way: str, gib: float) -> int:
    """Return the planned length. torch's limit excludes CUDA's context, and includes fragmentation."""
    code = {"bf16": "hf", "octavo-bf16": "own"}.get(way, "fp8")
    recipe = way if code == "fp8" else None
    option = Option(code, recipe, optimizer="adamw", compiled=False, adapter_bytes=2)
    return longest_sequence(case, option, Gpu("budget", gib + CONTEXT_GIB, (9, 0)))


def measure(way: str, preset: str, layers: int | None, gib: float) -> dict[str, Any]:
    case = make_case(
        preset=preset, config=None, layers=layers, tokens=POSITIONS, seq=POSITIONS, seed=0, device="cuda", force=True,
        mode="lora", rank=RANK,
    )  # fmt: skip
    torch.cuda.set_per_process_memory_fraction(gib * GIB / torch.cuda.get_device_properties(0).total_memory)
    prepared = PreparedModel(case, contender_of(way))
    optimizer = build_optimizer("adamw", [p for p in prepared.model.parameters() if p.requires_grad], lr=1e-5)
    tried: dict[int, float | None] = {}

    def fits(length: int) -> bool:
        tokens = torch.randint(case.vocabulary, (1, length), device="cuda")
        prepared.inputs = {"input_ids": tokens, "labels": tokens}
        torch.cuda.reset_peak_memory_stats()
        try:
            for _ in range(2):  # the states are there from the second on
                prepared.step()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            tried[length] = torch.cuda.max_memory_allocated() / GIB
        except torch.OutOfMemoryError:
            tried[length] = None
            prepared.forget_gradients()
        gc.collect()
        torch.cuda.empty_cache()
        return tried[length] is not None

    expected = planned(case, way, gib)
    length = longest(fits, expected)
    return {"way": way, "longest": length, "planned": expected, "peak_gib": tried.get(length), "tried": tried}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=tuple(LLAMAS), default="8b")
    parser.add_argument("--layers", type=int, help="instead of the preset's")
    parser.add_argument("--gib", type=float, default=24.0)
    parser.add_argument("--ways", default="bf16,channel", help=f"comma-separated, of {', '.join(WAYS)}")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args(arguments)
    ways = options.ways.split(",")
    for way in ways:
        if way not in WAYS:
            parser.error(f"--ways: {way!r} is none of {', '.join(WAYS)}")
    if options.one:
        print(json.dumps(measure(options.one, options.preset, options.layers, options.gib)))
        return
    if not torch.cuda.is_available():
        parser.error("no CUDA device here; `octavo plan 8b --mode lora --gpu 24` says what to expect")
    given = sys.argv[1:] if arguments is None else list(arguments)
    rows = []
    for way in ways:
        run = subprocess.run([sys.executable, __file__, *given, "--one", way], capture_output=True, text=True)
        if run.returncode:
            sys.exit(f"{way}: {run.stderr.strip().splitlines()[-1]}")
        rows.append(json.loads(run.stdout.splitlines()[-1]))
        row = rows[-1]
        print(f"{way}: {row['longest']:,} tokens, {row['longest'] / max(rows[0]['longest'], 1):.2f}x; planned "
              f"{row['planned']:,}", flush=True)  # fmt: skip
    record = {"date": str(datetime.date.today()), "device": device_name("cuda"), "versions": versions()}
    record |= {"command": ["longest.py", *given], "gib": options.gib, "rows": rows}
    out = options.out or Path(__file__).parent / f"results/{record['date']}-h200-{options.preset}-longest.json"
    write_json(out, record)
    print(f"Result: {out}")


if __name__ == "__main__":
    main()
