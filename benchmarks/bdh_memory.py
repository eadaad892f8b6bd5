"""Memory of a training step of BDH on the GPU: FP32, BF16 and FP8 with low-bit states, measured and planned.

    python benchmarks/bdh_memory.py                    # BDH 100M, 4 × 2,048 tokens

Weights are FP32 everywhere, as in `octavo train`, and the code is not compiled; a step is forward, backward and the
optimiser's, and its peak is that of the third one, when all states are there.
"""

import argparse
import datetime
import gc
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from octavo import fp8_autocast
from octavo.models.bdh import BDH, PRESETS, BDHConfig, fuse
from octavo.optim import build_optimizer, measure_memory
from octavo.tools.bdh.plan import plan_bdh
from octavo.tools.bench.result import device_name, versions
from octavo.tools.plan.options import Option
from octavo.tools.shapes import make_case
from octavo.training.files import write_json

WAYS = (
    ("bdh-fp32", "adamw"),
    ("bdh-bf16", "adamw"),
    ("bdh-fp8", "adamw"),
    ("bdh-fp8", "adamw8bit"),
    ("bdh-fp8", "adamw4bit"),
    ("bdh-fused", "adamw4bit"),
)


def measure(code: str, optimizer_name: str, shape: BDHConfig, batch: int, seq: int) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = BDH(shape).cuda().train()
    tokens = torch.randint(shape.vocabulary, (batch, seq), device="cuda")
    contexts: list[Any] = [] if code == "bdh-fp32" else [torch.autocast("cuda", torch.bfloat16)]
    if code == "bdh-fp8":
        contexts.append(fp8_autocast(model=model))
    elif code == "bdh-fused":
        fuse(model)
    optimizer = build_optimizer(optimizer_name, model.parameters(), 1e-4)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            loss = model(tokens, tokens)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if not loss.isfinite():
        raise SystemExit(f"{code} {optimizer_name}: the loss is {loss.item()}")
    return measure_memory(model, optimizer).to_dict()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(PRESETS), default="100m")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA device here; `octavo plan bdh-100m` says what to expect")
    shape = BDHConfig(**PRESETS[options.size])
    case = make_case(
        preset=f"bdh-{options.size}", config=None, layers=None, tokens=options.batch * options.seq, seq=options.seq,
        seed=0, device="cuda", force=True,
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    for code, name in WAYS:
        measured = measure(code, name, shape, options.batch, options.seq)
        planned = plan_bdh(case, Option(code, optimizer=name, weight_bytes=4, compiled=False)).peak_gib
        row = {"code": code, "optimizer": name, "peak_gib": measured["peak"] / 2**30, "planned_gib": planned}
        row |= measured
        rows.append(row)
        share = row["peak_gib"] / rows[0]["peak_gib"]
        print(f"{code} {name}: {row['peak_gib']:.1f} GiB, {share:.3f}x; planned {planned:.1f}", flush=True)
    record = {"date": str(datetime.date.today()), "device": device_name("cuda"), "versions": versions()}
    given = sys.argv[1:] if arguments is None else list(arguments)
    record |= {"command": ["bdh_memory.py", *given], "rows": rows}
    out = options.out or Path(__file__).parent / f"results/{record['date']}-h200-bdh-{options.size}-memory.json"
    write_json(out, record)
    print(f"Result: {out}")


if __name__ == "__main__":
    main()
