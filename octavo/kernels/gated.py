"""SwiGLU (or GELU) straight to FP8, and back: the kernels behind `numerics.activation` with one scale per tensor.

Forward reads gate and up and writes h as FP8 rows. Backward reads gate, up and the gradient of h, and writes what the
three GEMMs after it want: the gradient of gate and up in both layouts, and h again, transposed, for the gradient of the
down projection. So h is never kept: recomputing it costs nothing but the write, which was due anyway.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import delayed
from octavo.kernels.gated_tensor import MEASURE, PLAIN, QUANTIZE, gated_backward_kernel, gated_kernel
from octavo.kernels.launch import Plan, Plans, kind, seed_of
from octavo.kernels.tiles import multiprocessors
from octavo.numerics.config import OperandRecipe
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.quantize import BLOCK, Quantized

Tile = tuple[int, int, int, int, int, int | None]

# Tokens and features of a tile, warps, loads in flight, programs per multiprocessor, and registers per thread.
_FORWARD: Tile = (16, 128, 4, 1, 8, 64)
_BACKWARD: Tile = (64, 64, 8, 1, 2, 128)
_PLANS = Plans()


def can_quantize(gate_up: Tensor, *recipes: OperandRecipe) -> bool:
    """Whether these kernels quantise on the way: one scale per tensor. Other granularities quantise after."""
    return can_gate(gate_up) and all(_has_kernel(recipe) for recipe in recipes)


@cache
def _has_kernel(recipe: OperandRecipe) -> bool:
    return recipe.granularity == "tensor" and recipe.percentile is None and recipe.format in (E4M3, E5M2)


def can_keep(gate_up: Tensor) -> bool:
    """Whether gate and up, or what was kept of them, consist of whole blocks."""
    return gate_up.shape[1] % (2 * BLOCK) == 0


def can_gate(gate_up: Tensor) -> bool:
    return gate_up.dtype in (torch.bfloat16, torch.float16, torch.float32) and gate_up.numel() > 0


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """As `numerics.activation.gated`, of `gate_up[M, 2F]`."""
    gate_up = gate_up.contiguous()
    key = ("gated", activation, kind(gate_up))
    plan = _PLANS.get(key)
    if plan is None:
        m, f = gate_up.shape[0], gate_up.shape[1] // 2
        plan = Plan(given=1)
        out, none = plan.make((m, f), gate_up.dtype), plan.make((1,), torch.float32)
        grid, constants = _arrange(gate_up, m, f, _FORWARD, None, activation, PLAIN, False)
        plan.launch(
            gated_kernel, grid, (0, none, none, out, none, none, none), (m, f, 0.0, 0), constants | {"KEEP": False}
        )
        plan.results = (out,)
        _PLANS[key] = plan
    return plan.run(gate_up)[0]


def gated_backward(dh: Tensor, gate_up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """As `numerics.activation.gated_backward`, and h again."""
    dh, gate_up = dh.contiguous(), gate_up.contiguous()
    key = ("gated_backward", activation, kind(dh, gate_up))
    plan = _PLANS.get(key)
    if plan is None:
        m, f = dh.shape
        plan = Plan(given=2)
        out, h = plan.make((m, 2 * f), gate_up.dtype), plan.make((m, f), dh.dtype)
        none = plan.make((1,), torch.float32)
        grid, constants = _arrange(gate_up, m, f, _FORWARD, None, activation, PLAIN, False)
        constants |= {"H_MAXIMUM": 1.0, "H_STOCHASTIC": False}
        tensors = (0, 1, none, none, none, none, out, out, none, none, h)
        plan.launch(gated_backward_kernel, grid, tensors, (m, f, 0.0, 0), constants)
        plan.results = (out, h)
        _PLANS[key] = plan
    out_h = plan.run(dh, gate_up)
    return out_h[0], out_h[1]


def gated_quantize(
    gate_up: Tensor, row: Tensor, recipe: OperandRecipe, activation: str, *, record: bool, into: Quantized | None = None
) -> Quantized:
    """`gated(gate_up[M, 2F])`, quantised. `into`: room for gate and up as `numerics.activation.keep` keeps them."""
    gate_up = gate_up.contiguous()
    if recipe.delayed:
        row, record = delayed.writable(row, record), True
    given = (gate_up, row, *((row, row) if into is None else into))
    key = ("gated_quantize", recipe, activation, record, into is None, kind(*given))
    plan = _PLANS.get(key)
    if plan is None:
        m, f = gate_up.shape[0], gate_up.shape[1] // 2
        plan = Plan(given=4)
        amax = 1 if recipe.delayed else plan.make((1,), torch.float32, zeros=True)  # a delayed scale needs none
        out, scale = plan.make((m, f), recipe.format.dtype), plan.make((), torch.float32)
        for task, scaling in _tasks(recipe):
            grid, constants = _arrange(gate_up, m, f, _FORWARD, recipe, activation, task, record, scaling)
            constants["KEEP"] = into is not None
            numbers = (m, f, 1.0 / (m * f), seed_of(recipe))
            plan.launch(gated_kernel, grid, (0, 1, amax, out, scale, 2, 3), numbers, constants)
        plan.results = (out, scale)
        _PLANS[key] = plan
    return Quantized(*plan.run(*given))


def gated_quantize_backward(
    dh: Tensor,
    gate_up: Tensor,
    h_scale: Tensor,
    row: Tensor,
    recipe: OperandRecipe,
    recipe_h: OperandRecipe,
    activation: str,
    *,
    kept_scale: Tensor | None = None,
) -> tuple[Quantized, Quantized, Quantized]:
    """The gradient of gate and up as rows and as columns, and h as columns.

    `kept_scale`: `gate_up` is in FP8, as it was kept, with these.
    """
    dh, gate_up = dh.contiguous(), gate_up.contiguous()
    given = (dh, gate_up, h_scale, row, row if kept_scale is None else kept_scale)
    key = ("gated_quantize_backward", recipe, recipe_h, activation, kind(*given))
    plan = _PLANS.get(key)
    if plan is None:
        m, f = dh.shape
        plan = Plan(given=5)
        amax = 3 if recipe.delayed else plan.make((1,), torch.float32, zeros=True)
        rows, columns = plan.make((m, 2 * f), recipe.format.dtype), plan.make((2 * f, m), recipe.format.dtype)
        scale, scale_t = plan.make((), torch.float32), plan.make((), torch.float32)
        h = plan.make((f, m), recipe_h.format.dtype)
        for task, scaling in _tasks(recipe):
            grid, constants = _arrange(gate_up, m, f, _BACKWARD, recipe, activation, task, True, scaling)
            constants |= {"H_MAXIMUM": recipe_h.format.max, "H_STOCHASTIC": recipe_h.rounding == "stochastic"}
            numbers = (m, f, 0.5 / (m * f), seed_of(recipe, recipe_h))
            tensors = (0, 1, 4, 3, amax, 2, rows, columns, scale, scale_t, h)
            plan.launch(gated_backward_kernel, grid, tensors, numbers, constants)
        plan.results = (rows, scale, columns, scale_t, h)
        _PLANS[key] = plan
    *found, turned = plan.run(*given)
    return Quantized(*found[:2]), Quantized(*found[2:]), Quantized(turned, h_scale.clone())


def _tasks(recipe: OperandRecipe) -> list[tuple[Any, Any]]:
    """The launches, and where each has its scale from."""
    if recipe.delayed:
        return [(QUANTIZE, scaling) for scaling in delayed.passes(True)]
    return [(MEASURE, delayed.CURRENT), (QUANTIZE, delayed.CURRENT)]


def _arrange(
    x: Tensor,
    m: int,
    f: int,
    tile: Tile,
    recipe: OperandRecipe | None,
    activation: str,
    task: Any,
    record: bool,
    scaling: Any = delayed.CURRENT,
) -> tuple[tuple[int], dict[str, Any]]:
    """The grid, and everything constant. Without a recipe: no FP8."""
    tile_m, tile_f, warps, stages, programs, registers = tile
    constants = {
        "TASK": task.value,
        "SCALING": scaling.value,
        "RECORD": record and task.value == QUANTIZE.value,
        "SILU": activation == "silu",
        "MAXIMUM": 448.0 if recipe is None else recipe.format.max,
        "MARGIN": 1.0 if recipe is None else recipe.margin,
        "STOCHASTIC": recipe is not None and recipe.rounding == "stochastic",
        "EVEN": m % tile_m == 0 and f % tile_f == 0,
        "TILE_M": tile_m,
        "TILE_F": tile_f,
        "STAGES": stages,
        "num_warps": warps,
    }
    if registers is not None:
        constants["maxnreg"] = registers
    count = -(-m // tile_m) * -(-f // tile_f)
    return (min(count, programs * multiprocessors(x.device)),), constants
