"""`octavo bench --kernels`: quantising at a model's shapes, against the copy bandwidth measured in the same run.

    TB/s = (bytes of every input + bytes of every output) / time

Each byte is counted once, however often a kernel reads it: current scaling has to look at a tensor twice, and pays.
Live recording of amax, underflow and saturation is part of what is timed, as in a step: columns alone are those of a
tensor whose rows came first, and were recorded. Beside plain quantising stand the fused forms of a gated MLP, with
h = silu(gate) · up: h→FP8 in forward; in backward the gradients of gate and up, and h again.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo import ops, ops_linear
from octavo.numerics import FP8TrainingConfig, Quantized
from octavo.numerics.config import RECIPES, OperandRecipe, Recipe
from octavo.numerics.operand import LAYOUTS
from octavo.numerics.scaling import new_rows
from octavo.tools.bench.cases import Case
from octavo.tools.bench.result import FAILED, TIMED
from octavo.tools.bench.timing import time_each, try_device_time

WORKING_SET = 2**28  # bytes of input that the calls on a GPU go through: several times its last cache
MOST_INPUTS = 16
COPY_BYTES = {"cuda": 2**30, "cpu": 2**24}
Shape = tuple[int, int]


@dataclass(frozen=True)
class Work:
    """One thing to time: `run(row, *inputs)` for BF16 inputs of these shapes."""

    recipe: str
    operand: str
    layout: str
    shapes: tuple[Shape, ...]
    run: Callable[..., list[Quantized]]


def bench_kernels(case: Case) -> dict[str, Any]:
    copy = copy_bandwidth(case.device)
    rows = []
    for work in works(case):
        name = f"{work.recipe} {work.operand} {work.layout}"
        what = {"recipe": work.recipe, "operand": work.operand, "layout": work.layout, "shape": list(work.shapes[-1])}
        rows.append({"name": name, **what, **_measure(work, case.device, copy)})
    return {"kind": "kernels", "copy_tb_per_s": copy, "rows": rows}


def works(case: Case) -> Iterator[Work]:
    for name in RECIPES:
        recipe = FP8TrainingConfig.from_recipe(name).recipe
        for operand, shape in operand_shapes(case).items():
            for layout in LAYOUTS:
                yield Work(name, operand, layout, (shape,), partial(_quantize, getattr(recipe, operand), layout))
        if not case.is_bdh:
            h, gate_up = ((case.tokens, n * case.config["intermediate_size"]) for n in (1, 2))
            yield Work(name, "swiglu", "rows", (gate_up,), partial(_gated, recipe))
            yield Work(name, "swiglu backward", "both", (h, gate_up), partial(_gated_backward, recipe))


def operand_shapes(case: Case) -> dict[str, Shape]:
    """One shape for each operand: the model's widest product, apart from the head."""
    widest = max((linear for linear in case.linears if linear.name != "head"), key=lambda linear: linear.n * linear.k)
    return {"x": (case.tokens, widest.k), "w": (widest.n, widest.k), "g": (case.tokens, widest.n)}


def _quantize(recipe: OperandRecipe, layout: str, row: Tensor, x: Tensor) -> list[Quantized]:
    return ops.quantize(x, row, recipe, record=layout != "columns", layout=layout)


def _gated(recipe: Recipe, row: Tensor, gate_up: Tensor) -> list[Quantized]:
    return [ops_linear.gated_quantize(gate_up, row, recipe.x, "silu", record=True)]


def _gated_backward(recipe: Recipe, row: Tensor, dh: Tensor, gate_up: Tensor) -> list[Quantized]:
    h_scale = torch.full((), 2.0**-6, device=dh.device)  # of |h| up to 7: only the time matters here
    return list(ops_linear.gated_quantize_backward(dh, gate_up, h_scale, row, recipe.g, recipe.x, "silu"))


def copy_bandwidth(device: str) -> float:
    """TB/s of torch's copy within the device: read once, written once. Not in a CUDA graph, where it is slower."""
    source = torch.ones(COPY_BYTES[device] // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    seconds = statistics.median(time_each(lambda: target.copy_(source), 10, device, lambda: None))
    return 2 * source.nbytes / seconds / 1e12


def _measure(work: Work, device: str, copy: float) -> dict[str, Any]:
    first = [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in work.shapes]
    read = sum(x.nbytes for x in first)
    copies = min(MOST_INPUTS - 1, WORKING_SET // read) if device == "cuda" else 0
    inputs = [first, *([x.clone() for x in first] for _ in range(copies))]
    calls = [partial(work.run, new_rows(device=device), *each) for each in inputs]
    seconds, reason = try_device_time(calls, device)
    if seconds is None:
        return {"status": FAILED, "reason": reason}
    size = read + sum(part.nbytes for quantized in calls[0]() for part in quantized)
    rate = size / seconds / 1e12
    return {"status": TIMED, "seconds": seconds, "bytes": size, "tb_per_s": rate, "share_of_copy": rate / copy}
