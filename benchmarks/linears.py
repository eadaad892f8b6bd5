"""Where does FP8 pay for a single linear? Forward and backward of many shapes, FP8 against BF16, on this GPU.

    python benchmarks/linears.py --out linears.json

Times are the GPU's own (replayed from CUDA graphs), so they show what a step gains that keeps the GPU busy. Beside them
stands what `octavo.nn.cost_model` expects.
"""

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo import FP8TrainingConfig, convert_to_fp8
from octavo.kernels.tuning import tuning_for
from octavo.nn import cost_model

TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
SHAPES = ((256, 256), (512, 512), (512, 2048), (1024, 1024), (1024, 4096), (2048, 2048), (2048, 8192), (4096, 4096),
          (4096, 14336), (14336, 4096), (8192, 8192))  # fmt: skip
COPIES = 2  # of the linear, run one after the other


def milliseconds(linears: list[nn.Linear], tokens: int) -> float:
    """Return the milliseconds of forward and backward of one linear."""
    inputs, outputs = linears[0].in_features, linears[0].out_features
    like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    xs = [torch.randn(tokens, inputs, **like, requires_grad=True) for _ in linears]
    gs = [torch.randn(tokens, outputs, **like) for _ in linears]

    def run() -> None:
        for linear, x, g in zip(linears, xs, gs, strict=True):
            linear(x).backward(g)
            x.grad = linear.weight.grad = None

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(15):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2] / len(linears)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="delayed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device here")
    rates = tuning_for(torch.device("cuda")).rates
    rows = []
    for inputs, outputs in SHAPES:
        for tokens in TOKENS:
            made = [nn.Linear(inputs, outputs, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(COPIES)]
            bf16 = milliseconds(made, tokens)
            convert_to_fp8(nn.Sequential(*made), FP8TrainingConfig.from_recipe(options.recipe, skip=()))
            fp8 = milliseconds(made, tokens)
            expected = cost_model.estimate(tokens, inputs, outputs, rates)
            rows.append({"tokens": tokens, "inputs": inputs, "outputs": outputs, "bf16_ms": bf16, "fp8_ms": fp8})
            rows[-1] |= {"expected_bf16_ms": expected.bf16 * 1e3, "expected_fp8_ms": expected.fp8 * 1e3}
            right = (fp8 < bf16) == expected.pays
            print(
                f"{tokens:6d} × {inputs:5d} → {outputs:5d}   BF16 {bf16:7.3f} ms   FP8 {fp8:7.3f}   {bf16 / fp8:5.2f}x"
                f"   expected {expected.bf16 / expected.fp8:5.2f}x{'' if right else '   WRONG'}",
                flush=True,
            )
    if options.out:
        result = {
            "date": str(datetime.date.today()),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "recipe": options.recipe,
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
