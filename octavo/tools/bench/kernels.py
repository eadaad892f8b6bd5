"""`octavo bench --kernels`: quantisation at a model's shapes against the copy bandwidth measured in the same run.

    TB/s = (bytes of every input + bytes of every output) / time

Each byte is counted once, however often a kernel reads it: current scaling has to read a tensor twice, and pays for it.
Besides this figure, which is the caller's view, the table shows how well the kernels use the memory: the bytes that
their passes move, by the table in `passes`, against the copy of a GiB, and against a copy of as many bytes (small ones
are slower). Recording of amax, underflow and saturation is timed, too, as in a step; columns alone are those of a
tensor whose rows were quantised and recorded before, so a delayed scale is known. Besides plain quantisation there are
the fused forms of a gated MLP, with h = silu(gate) · up: h→FP8 in forward; in backward the gradients of gate and up,
and h.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.numerics import FP8TrainingConfig, Quantized
from octavo.numerics.config import RECIPES, OperandRecipe, Recipe
from octavo.numerics.operand import LAYOUTS
from octavo.numerics.quantize import granularity_of
from octavo.numerics.scaling import SCALE, new_states
from octavo.ops import gated as ops_gated
from octavo.support import has_fp8_tensor_cores
from octavo.tools.bench.result import FAILED, TIMED
from octavo.tools.bench.timing import time_each, try_device_time
from octavo.tools.shapes import Case

WORKING_SET = 2**28  # bytes of input that the calls on a GPU cycle through: several times its last-level cache
MOST_INPUTS = 16
COPY_BYTES = {"cuda": 2**30, "cpu": 2**24}
Shape = tuple[int, int]


@dataclass(frozen=True)
class Work:
    """A kernel to time: `run(row, *inputs)` for BF16 inputs of these shapes.

    `reads`: how often the inputs are read. `between`: BF16 elements that one pass writes and later ones read, in total.
    `before`: prepares the row as earlier steps would.
    """

    recipe: str
    operand: str
    layout: str
    shapes: tuple[Shape, ...]
    run: Callable[..., list[Quantized]]
    reads: int
    between: int = 0
    before: Callable[..., object] | None = None


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
            how: OperandRecipe = getattr(recipe, operand)
            for layout in LAYOUTS:
                run, reads = partial(_quantize, how, layout), passes(how, layout)
                before = partial(_quantize, how, "rows") if layout == "columns" else None
                yield Work(name, operand, layout, (shape,), run, reads, before=before)
        if "intermediate_size" in case.config:
            m, f = case.tokens, case.config["intermediate_size"]
            forward, backward = gated_passes(recipe, m * f, fused=_is_fused(recipe, f, case.device))
            yield Work(name, "swiglu", "rows", ((m, 2 * f),), partial(_gated, recipe), *forward)
            shapes = (m, f), (m, 2 * f)
            yield Work(name, "swiglu backward", "both", shapes, partial(_gated_backward, recipe), *backward)


def passes(recipe: OperandRecipe, layout: str) -> int:
    """Return how often quantisation reads its input from memory.

    tensor      once, if the scale is delayed (the search for an amax ends at once); else once more for the amax
    channel     rows once: a whole row is in registers. A column is not, so its amax takes a pass before: one of its
                own, or that of the rows, which leaves it. So columns and both read twice
    128×128     once: a program walks over a block twice, but the second time it comes from a cache
    1×128, mx   rows or columns once, scales being found in the tile; both are two passes with tiles of other shapes

    Scales and amaxes are small and not counted, nor are the rare passes that look again for NaN or saturation.
    """
    if recipe.granularity == "tensor":
        return 1 if recipe.delayed else 2
    if recipe.granularity == "channel":
        return 1 if layout == "rows" else 2
    if granularity_of(recipe.granularity, recipe.block).rows != 1:
        return 1
    return 2 if layout == "both" else 1


def gated_passes(recipe: Recipe, size: int, *, fused: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return how often the gated MLP reads its inputs in a direction, and the BF16 elements moved in between.

    `size` is that of h. `fused`, all is computed from gate, up and dh, in every pass anew, and nothing lies in between;
    backward needs two passes where the layouts have scales of their own. (With one scale per tensor, that of h is known
    in backward.) Else h, or the gradients of gate and up (twice its size) and h, are written in BF16 once, and
    quantised from there.
    """
    rows, both, columns = passes(recipe.x, "rows"), passes(recipe.g, "both"), passes(recipe.x, "columns")
    if fused:
        return (rows, 0), (both, 0)
    return (1, (1 + rows) * size), (1, (1 + both) * 2 * size + (1 + columns) * size)


def _is_fused(recipe: Recipe, features: int, device: str) -> bool:
    """Return True if kernels quantise h, and the gradients of gate and up, on the way from gate and up."""
    if not has_fp8_tensor_cores(torch.device(device)):
        return False
    from octavo.kernels import gated  # needs Triton
    from octavo.kernels.gated import blocks

    gate_up = torch.empty(1, 2 * features, dtype=torch.bfloat16, device="meta")
    by_block = blocks.can_quantize_backward(gate_up, recipe.g, recipe.x)
    return by_block or gated.can_quantize(gate_up, recipe.x, recipe.g)


def operand_shapes(case: Case) -> dict[str, Shape]:
    """Return one shape for each operand: the model's widest product, apart from the head."""
    widest = max((linear for linear in case.linears if linear.name != "head"), key=lambda linear: linear.n * linear.k)
    return {"x": (case.tokens, widest.k), "w": (widest.n, widest.k), "g": (case.tokens, widest.n)}


def _quantize(recipe: OperandRecipe, layout: str, row: Tensor, x: Tensor) -> list[Quantized]:
    columns = layout == "columns"
    scale = row[SCALE] if columns and recipe.delayed else None
    return ops.quantize_group([x], row, recipe, record=not columns, layout=layout, scale=scale)


def _gated(recipe: Recipe, row: Tensor, gate_up: Tensor) -> list[Quantized]:
    return [ops_gated.gated_quantize(gate_up, row, recipe.x, "silu", record=True)]


def _gated_backward(recipe: Recipe, row: Tensor, dh: Tensor, gate_up: Tensor) -> list[Quantized]:
    h_scale = torch.full((), 2.0**-6, device=dh.device)  # of |h| up to 7: only the time matters here
    return list(ops_gated.gated_quantize_backward(dh, gate_up, h_scale, row, recipe.g, recipe.x, "silu"))


def copy_bandwidth(device: str, moved: int | None = None) -> float:
    """Return TB/s of torch's copy within the device, for `moved` bytes in total: read once, written once.

    Several copies of different memory run in a row. Not in a CUDA graph, where a copy is slower.
    """
    moved = moved or 2 * COPY_BYTES[device]
    count = min(MOST_INPUTS, -(-4 * WORKING_SET // moved)) if device == "cuda" else 1
    sources = [torch.ones(moved // 4, dtype=torch.bfloat16, device=device) for _ in range(count)]
    targets = [torch.empty_like(source) for source in sources]

    def copy_all() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    seconds = statistics.median(time_each(copy_all, 10, device, lambda: None)) / count
    return 2 * sources[0].nbytes / seconds / 1e12


def _measure(work: Work, device: str, copy: float) -> dict[str, Any]:
    xs = [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in work.shapes]
    read = sum(x.nbytes for x in xs)
    copies = min(MOST_INPUTS - 1, WORKING_SET // read) if device == "cuda" else 0
    inputs = [xs, *([x.clone() for x in xs] for _ in range(copies))]
    rows = [new_states(device=device) for _ in inputs]
    if work.before is not None:
        for row, each in zip(rows, inputs, strict=True):
            work.before(row, *each)
    calls = [partial(work.run, row, *each) for row, each in zip(rows, inputs, strict=True)]
    seconds, reason = try_device_time(calls, device)
    if seconds is None:
        return {"status": FAILED, "reason": reason}
    written = sum(tensor.nbytes for quantized in calls[0]() for tensor in quantized)
    moved = work.reads * read + work.between * torch.bfloat16.itemsize + written
    rate = (read + written) / seconds / 1e12
    return {
        "status": TIMED,
        "seconds": seconds,
        "bytes": read + written,
        "tb_per_s": rate,
        "share_of_copy": rate / copy,
        "moved_bytes": moved,
        "moved_share_of_copy": moved / seconds / 1e12 / copy,
        "moved_share_of_equal_copy": moved / seconds / 1e12 / copy_bandwidth(device, moved),
    }
