"""What does a whole training step take, with its optimiser? Peak memory of the device, milliseconds, the host's memory.

    python benchmarks/offload.py --preset 8b --how master --optimizer adamw4bit --out master.json

Full fine-tuning with random weights and tokens, decoder layers compiled, FP8 with delayed scales and FP8 activations.
`--how`: `plain`, all gradients and then a step; `released`, steps within backward; `optimizer`, the same with states in
host memory; `master`, with FP32 masters there, too, and FP8 weights on the device. `bf16` is the baseline: Hugging
Face's own code, compiled layers, a plain step. The first steps make states and compile: they do not count.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import octavo
from octavo.hf.build import build_causal_lm, decoder_layers
from octavo.optim import OPTIMIZERS, build_optimizer, offload_master, step_in_backward
from octavo.tools.bench.cases import DECODERS
from octavo.tools.bench.result import device_name, versions

HOW = ("bf16", "plain", "released", "optimizer", "master")
GIB = 2**30


def prepare(model: Any, how: str, name: str, recipe: str) -> torch.optim.Optimizer:
    if how != "bf16":
        octavo.convert_to_fp8(model, octavo.FP8TrainingConfig.from_recipe(recipe, activations="fp8"))
    optimizer = build_optimizer(name, model.parameters(), 1e-5, stochastic_rounding=how != "bf16" and name != "adamw")
    if how == "master":
        offload_master(model, optimizer)
    elif how in ("released", "optimizer"):
        step_in_backward(optimizer, offload=how == "optimizer")
    return optimizer


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = DECODERS[args.preset]
    layers = args.layers or shape["num_hidden_layers"]
    torch.manual_seed(0)
    model: Any = build_causal_lm(shape, layers=layers, positions=args.sequence, device=device)
    optimizer = prepare(model, args.how, args.optimizer, args.recipe)
    if not args.eager:
        for layer in decoder_layers(model):
            layer.compile()
    ids = torch.randint(shape["vocab_size"], (args.batch, args.sequence), device=device)
    losses, times = [], []
    for step in range(args.warm + args.steps):
        _synchronize(device)
        if step == args.warm and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _synchronize(device)
        times.append(1000 * (time.perf_counter() - start))
        losses.append(loss.item())
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {
        **{name: getattr(args, name) for name in ("preset", "how", "optimizer", "recipe", "batch", "sequence")},
        "layers": layers,
        "compiled": not args.eager,
        "ms": round(statistics.median(times[args.warm :]), 1),
        "all_ms": [round(value, 1) for value in times],
        "peak_gib": round(peak / GIB, 2),
        "between_steps_gib": round(torch.cuda.memory_allocated() / GIB, 2) if device == "cuda" else 0.0,
        "host_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 2),
        "losses": [round(value, 4) for value in losses],
        "device": device_name(device),
        "versions": versions(),
    }


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=tuple(DECODERS), default="8b")
    parser.add_argument("--layers", type=int, help="instead of the preset's")
    parser.add_argument("--how", choices=HOW, default="master")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw4bit")
    parser.add_argument("--recipe", choices=("delayed", "current", "block"), default="delayed")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="without compiling the layers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    found = json.dumps(measure(args), indent=2)
    print(found)
    if args.out is not None:
        args.out.write_text(found + "\n")


if __name__ == "__main__":
    main()
