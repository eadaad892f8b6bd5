"""Products of a base frozen in FP8, computed in FP8 or in BF16 with dequantised weights: which is faster, and where.

    python benchmarks/frozen_products.py     # on a GPU; `nn/cost_model.py` draws its line from this

A few layers of each size with adapters of rank 16, from CUDA graphs, forward and backward. Ratios below 1: FP8 is the
faster of the two.
"""

import argparse
import datetime
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton

import octavo
from octavo.tools.bench.random_model import build_causal_lm
from octavo.tools.shapes import DECODERS
from octavo.training.files import write_json

SEQ, VOCABULARY, RANK = 2048, 4096, 16
LAYERS = {"135m": 8, "360m": 8, "qwen3-0.6b": 8, "1b": 8, "8b": 4}


def time_steps(model: Any, rows: int) -> tuple[float, float]:
    """Return the median milliseconds of a step, and GiB at its peak."""
    tokens = torch.randint(VOCABULARY, (rows, SEQ), device="cuda")

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    taken = []
    for _ in range(12):
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken), torch.cuda.max_memory_allocated() / 2**30


def measure(name: str, granularity: str, rows: list[int]) -> list[dict[str, Any]]:
    measured: dict[tuple[bool, int], tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        shape = {**DECODERS[name], "vocab_size": VOCABULARY}
        build_causal_lm(shape, layers=LAYERS[name], positions=SEQ, device="cuda").save_pretrained(folder)
        for fp8_products in (True, False):
            base, _ = octavo.FastLanguageModel.from_pretrained(
                folder, load_in_fp8=granularity, fp8_products=fp8_products, tokenizer=False
            )
            model = octavo.FastLanguageModel.get_peft_model(base, r=RANK, use_gradient_checkpointing=False).train()
            octavo.use_cuda_graphs(model)
            for count in rows:
                measured[fp8_products, count] = time_steps(model, count)
            del base, model
            torch.cuda.empty_cache()
    results = []
    for count in rows:
        (fp8, fp8_gib), (bf16, bf16_gib) = measured[True, count], measured[False, count]
        results.append({"model": name, "granularity": granularity, "tokens": count * SEQ, "fp8_ms": fp8,
                        "bf16_ms": bf16, "ratio": fp8 / bf16, "fp8_gib": fp8_gib, "bf16_gib": bf16_gib})  # fmt: skip
        print(f"{name} {granularity} {count * SEQ} tokens: {fp8:.2f} ms in FP8, {bf16:.2f} in BF16: {fp8 / bf16:.2f}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(LAYERS), help=f"of {', '.join(LAYERS)}")
    parser.add_argument("--rows", default="1,4", help=f"sequences of {SEQ} tokens")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<date>-frozen-products.json")
    options = parser.parse_args()
    rows = [int(count) for count in options.rows.split(",")]
    record: dict[str, Any] = {
        "date": str(datetime.date.today()),
        "device": torch.cuda.get_device_name(),
        "versions": {module.__name__: module.__version__ for module in (torch, triton)},
        "command": f"frozen_products.py --models {options.models} --rows {options.rows}",
        "layers": LAYERS,
        "results": [],
    }
    out = options.out or Path(__file__).parent / f"results/{datetime.date.today()}-frozen-products.json"
    for name in options.models.split(","):
        for granularity in ("channel", "block"):
            record["results"] += measure(name, granularity, rows)
            write_json(out, record)


if __name__ == "__main__":
    main()
