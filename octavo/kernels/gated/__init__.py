"""SwiGLU (or GELU) straight to FP8, and back: the kernels behind `numerics.activation` with one scale per tensor.

Forward reads gate and up and writes h as FP8 rows. Backward reads gate, up and the gradient of h, and writes what the
three GEMMs after it want: the gradient of gate and up in both layouts, and h again, transposed, for the gradient of the
down projection. So h is never saved: recomputing it costs nothing but the write, which was due anyway.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import delayed
from octavo.kernels.gated.activations import ACTIVATIONS
from octavo.kernels.gated.tensor import MEASURE, PLAIN, QUANTIZE, gated_backward_kernel, gated_kernel
from octavo.kernels.launch import LaunchCache, Launches, kind, seed_of
from octavo.kernels.tiles import multiprocessors
from octavo.kernels.tuning import Tile, check_tile, tuning_for
from octavo.numerics.config import OperandRecipe
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.quantize import BLOCK, Quantized

_LAUNCHES = LaunchCache()


def can_quantize(gate_up: Tensor, *recipes: OperandRecipe) -> bool:
    """Whether these kernels quantise on the way: one scale per tensor. Other granularities quantise after."""
    return can_gate(gate_up) and all(_has_kernel(recipe) for recipe in recipes)


@cache
def _has_kernel(recipe: OperandRecipe) -> bool:
    return recipe.granularity == "tensor" and recipe.percentile is None and recipe.format in (E4M3, E5M2)


def can_save(gate_up: Tensor) -> bool:
    """Whether gate and up, or their saved copies, consist of whole blocks."""
    return gate_up.shape[1] % (2 * BLOCK) == 0


def can_gate(gate_up: Tensor) -> bool:
    return gate_up.dtype in (torch.bfloat16, torch.float16, torch.float32) and gate_up.numel() > 0


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """`act(gate) · up` of `gate_up[M, 2F]`; see `numerics.activation.gated`."""
    gate_up = gate_up.contiguous()
    key = ("gated", activation, kind(gate_up))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build_forward(gate_up, activation))
    return launches.run(gate_up)[0]


def _build_forward(gate_up: Tensor, activation: str) -> Launches:
    m, f = gate_up.shape[0], gate_up.shape[1] // 2
    launches = Launches(given=1)
    out, none = launches.make((m, f), gate_up.dtype), launches.make((1,), torch.float32)
    tile = tuning_for(gate_up.device).gated.forward
    grid, constants = _arrange(gate_up, m, f, tile, None, activation, PLAIN, False)
    tensors = (0, none, none, out, none, none, none)
    launches.launch(gated_kernel, grid, tensors, (m, f, 0.0, 0), constants | {"SAVE": False})
    launches.results = (out,)
    return launches


def gated_backward(dh: Tensor, gate_up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gradient of `gate_up`, and h recomputed; see `numerics.activation.gated_backward`."""
    dh, gate_up = dh.contiguous(), gate_up.contiguous()
    key = ("gated_backward", activation, kind(dh, gate_up))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build_backward(dh, gate_up, activation))
    out, h = launches.run(dh, gate_up)
    return out, h


def _build_backward(dh: Tensor, gate_up: Tensor, activation: str) -> Launches:
    m, f = dh.shape
    launches = Launches(given=2)
    out, h = launches.make((m, 2 * f), gate_up.dtype), launches.make((m, f), dh.dtype)
    none = launches.make((1,), torch.float32)
    tile = tuning_for(gate_up.device).gated.forward
    grid, constants = _arrange(gate_up, m, f, tile, None, activation, PLAIN, False)
    constants |= {"H_FORMAT": None, "H_STOCHASTIC": False}
    tensors = (0, 1, none, none, none, none, out, out, none, none, h)
    launches.launch(gated_backward_kernel, grid, tensors, (m, f, 0.0, 0), constants)
    launches.results = (out, h)
    return launches


def gated_quantize(
    gate_up: Tensor,
    state: Tensor,
    recipe: OperandRecipe,
    activation: str,
    *,
    record: bool,
    into: Quantized | None = None,
) -> Quantized:
    """`gated(gate_up[M, 2F])`, quantised. `into`: buffers for gate and up, as `numerics.activation.save_gate_up`."""
    gate_up = gate_up.contiguous()
    if recipe.delayed:
        state, record = delayed.writable(state, record), True
    given = (gate_up, state, *((state, state) if into is None else into))
    key = ("gated_quantize", recipe, activation, record, into is None, kind(*given))
    save = into is not None
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build_quantize(gate_up, recipe, activation, record, save))
    return Quantized(*launches.run(*given))


def _build_quantize(gate_up: Tensor, recipe: OperandRecipe, activation: str, record: bool, save: bool) -> Launches:
    m, f = gate_up.shape[0], gate_up.shape[1] // 2
    launches = Launches(given=4)
    amax = 1 if recipe.delayed else launches.make((1,), torch.float32, zeros=True)  # a delayed scale needs none
    out, scale = launches.make((m, f), recipe.format.dtype), launches.make((), torch.float32)
    tile = tuning_for(gate_up.device).gated.forward
    if save:
        check_tile("gated.forward", tile, tile.columns == BLOCK, f"gate and up are saved in blocks of 1×{BLOCK}")
    for task, scaling in _tasks(recipe):
        grid, constants = _arrange(gate_up, m, f, tile, recipe, activation, task, record, scaling)
        numbers = (m, f, 1.0 / (m * f), seed_of(recipe))
        launches.launch(gated_kernel, grid, (0, 1, amax, out, scale, 2, 3), numbers, constants | {"SAVE": save})
    launches.results = (out, scale)
    return launches


def gated_quantize_backward(
    dh: Tensor,
    gate_up: Tensor,
    h_scale: Tensor,
    state: Tensor,
    recipe: OperandRecipe,
    recipe_h: OperandRecipe,
    activation: str,
    *,
    saved_scale: Tensor | None = None,
) -> tuple[Quantized, Quantized, Quantized]:
    """The gradient of gate and up as rows and as columns, and h as columns.

    `saved_scale`: `gate_up` is in FP8, as `gated_quantize` saved it, with these scales.
    """
    dh, gate_up = dh.contiguous(), gate_up.contiguous()
    given = (dh, gate_up, h_scale, state, state if saved_scale is None else saved_scale)
    key = ("gated_quantize_backward", recipe, recipe_h, activation, kind(*given))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(
        key, _build_quantize_backward(dh, gate_up, recipe, recipe_h, activation)
    )
    rows, scale, columns, scale_t, h = launches.run(*given)
    return Quantized(rows, scale), Quantized(columns, scale_t), Quantized(h, h_scale.clone())


def _build_quantize_backward(
    dh: Tensor, gate_up: Tensor, recipe: OperandRecipe, recipe_h: OperandRecipe, activation: str
) -> Launches:
    m, f = dh.shape
    launches = Launches(given=5)
    amax = 3 if recipe.delayed else launches.make((1,), torch.float32, zeros=True)
    rows, columns = launches.make((m, 2 * f), recipe.format.dtype), launches.make((2 * f, m), recipe.format.dtype)
    scale, scale_t = launches.make((), torch.float32), launches.make((), torch.float32)
    h = launches.make((f, m), recipe_h.format.dtype)
    tile = tuning_for(gate_up.device).gated.backward
    if gate_up.element_size() == 1:
        check_tile("gated.backward", tile, BLOCK % tile.columns == 0, f"gate and up were saved in blocks of 1×{BLOCK}")
    for task, scaling in _tasks(recipe):
        grid, constants = _arrange(gate_up, m, f, tile, recipe, activation, task, True, scaling)
        constants |= {"H_FORMAT": recipe_h.format, "H_STOCHASTIC": recipe_h.rounding == "stochastic"}
        numbers = (m, f, 0.5 / (m * f), seed_of(recipe, recipe_h))
        tensors = (0, 1, 4, 3, amax, 2, rows, columns, scale, scale_t, h)
        launches.launch(gated_backward_kernel, grid, tensors, numbers, constants)
    launches.results = (rows, scale, columns, scale_t, h)
    return launches


def _tasks(recipe: OperandRecipe) -> list[tuple[Any, Any]]:
    """The task of each launch, and where its scale comes from."""
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
    constants = {
        "TASK": task.value,
        "SCALING": scaling.value,
        "RECORD": record and task.value == QUANTIZE.value,
        "ACTIVATION": ACTIVATIONS[activation],
        "FORMAT": None if recipe is None else recipe.format,
        "MARGIN": 1.0 if recipe is None else recipe.margin,
        "STOCHASTIC": recipe is not None and recipe.rounding == "stochastic",
        "EVEN": m % tile.rows == 0 and f % tile.columns == 0,
        "TILE_M": tile.rows,
        "TILE_F": tile.columns,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }
    if tile.registers is not None:
        constants["maxnreg"] = tile.registers
    count = -(-m // tile.rows) * -(-f // tile.columns)
    return (min(count, tile.programs * multiprocessors(x.device)),), constants
