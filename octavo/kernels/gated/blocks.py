"""SwiGLU (or GELU) straight to FP8 with a scale per block, and back: for the recipes `block` and `mx`.

Scales along a row are those of 1×128 or 1×32 elements, found in the tile. Along a column they are the same, or one per
channel, whose amax the pass over the rows finds. So backward is two passes, and both compute the gradients anew from
what memory holds: gate, up and the gradient of h. Neither the gradients nor h are ever there in high precision.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import finite, tiles
from octavo.kernels.gated import can_gate
from octavo.kernels.gated.activations import ACTIVATIONS
from octavo.kernels.gated.block_columns import whole_columns_kernel
from octavo.kernels.gated.tiles import gradients, load_gate_up
from octavo.kernels.launch import LaunchCache, Launches, kind, seed_of
from octavo.kernels.quantize import clips
from octavo.kernels.quantize.blocks import amax_of_columns, amax_of_rows, scale_rows
from octavo.kernels.quantize.modes import check_blocks, has_modes, make_scale, modes_of
from octavo.kernels.quantize.tensor import offsets, store_tile
from octavo.kernels.tiles import BLOCK_1X128, CHANNEL, MX, NONE, multiprocessors, programs_in_strips
from octavo.kernels.tuning import Tile, tuning_for
from octavo.numerics.config import OperandRecipe
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.quantize import BLOCK, Quantized


@triton.jit
def _record(state_ptr, top, trouble, lost, clipped, per_element):
    tiles.record(state_ptr, tl.max(top, axis=0), finite.is_trouble(trouble), lost, clipped, per_element)
    if tl.program_id(0) == 0:
        tiles.record_use(state_ptr)


@triton.jit(do_not_specialize=["seed"])
def _rows_kernel(
    gate_up_ptr,
    state_ptr,
    out_ptr,
    scale_ptr,
    M,
    F,
    per_element,
    seed,
    MODE: tl.constexpr,
    RECORD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CLIPS: tl.constexpr,
    FORMAT: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MX_UP: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_F: tl.constexpr,
):
    across = tl.cdiv(F, TILE_F)
    count = tl.cdiv(M, TILE_M) * across
    inner, inner_out = offsets(2 * F, TILE_M, TILE_F), offsets(F, TILE_M, TILE_F)
    top = tl.zeros([TILE_M], tl.float32)
    trouble = tl.zeros([TILE_M, TILE_F // 8], tl.float32)
    lost = tl.zeros([TILE_M, TILE_F // 8], tl.int32)
    clipped = tl.program_id(0) * 0
    step = tiles.sample_step(count)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        i, j = tile // across, tile % across
        gate, up = load_gate_up(gate_up_ptr, i * TILE_M, j * TILE_F, inner, M, F, TILE_M, TILE_F, EVEN)
        value, _ = ACTIVATION(gate.to(tl.float32))
        h = tiles.round_to(value * up.to(tl.float32), gate.dtype).to(tl.float32)
        v, spread, amax = scale_rows(
            h, amax_of_rows(h, MODE), i, j, 0, M, M, F, state_ptr, scale_ptr, MODE, FORMAT, MARGIN, MX_UP, TILE_M,
            TILE_F,
        )  # fmt: skip
        where = i.to(tl.int64) * TILE_M * F + j * TILE_F + inner_out if STOCHASTIC else 0
        v = tiles.saturate(v, seed, where, FORMAT, STOCHASTIC)
        q = tiles.cast(v, out_ptr.dtype.element_ty, tl.float32 if STOCHASTIC else gate.dtype)
        store_tile(out_ptr, q, i, j, inner_out, M, F, F, EVEN, TILE_M, TILE_F)
        if RECORD:
            top = tl.maximum(top, amax)
            trouble += finite.trouble_of_eight(h)
            if tiles.is_sampled(tile, step):
                lost += tiles.count_of_eight(tiles.is_lost(h, v, FORMAT))
            if CLIPS:
                clipped += tiles.count(tiles.is_clipped(h, spread, FORMAT))
    if RECORD:
        _record(state_ptr, top, trouble, tiles.from_sample(lost, count, step), clipped, per_element)


@triton.jit(do_not_specialize=["seed"])
def _backward_rows_kernel(
    dh_ptr,
    gate_up_ptr,
    state_ptr,
    rows_ptr,
    scale_ptr,
    column_amax_ptr,
    h_amax_ptr,
    M,
    F,
    per_element,
    seed,
    MODE: tl.constexpr,
    COLUMN_AMAX: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CLIPS: tl.constexpr,
    FORMAT: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MX_UP: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_F: tl.constexpr,
):
    """The gradients of gate and up as rows `[M, 2F]`, and on the way the amax of their columns and of those of h.

    For the amax there must be as many programs as columns of tiles, or a multiple: each keeps to its columns.
    """
    across = tl.cdiv(F, TILE_F)
    count = tl.cdiv(M, TILE_M) * across
    inner, inner_h = offsets(2 * F, TILE_M, TILE_F), offsets(F, TILE_M, TILE_F)
    top = tl.zeros([TILE_M], tl.float32)
    trouble = tl.zeros([TILE_M, TILE_F], dh_ptr.dtype.element_ty)
    lost = tl.zeros([TILE_M, TILE_F // 8], tl.int32)
    gate_top = tl.zeros([TILE_M, TILE_F], tl.float32)
    up_top, h_top = gate_top, gate_top
    clipped = tl.program_id(0) * 0
    step = tiles.sample_step(count)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        i, j = tile // across, tile % across
        dgate, dup, h = gradients(
            dh_ptr, gate_up_ptr, gate_up_ptr, i, j, inner, inner_h, M, F, ACTIVATION, EVEN, TILE_M, TILE_F
        )
        if COLUMN_AMAX:
            h_top = tl.maximum(h_top, finite.magnitude(h.to(tl.float32)))
        for half in tl.static_range(2):
            gradient = dgate if half == 0 else dup
            trouble = finite.add_trouble(trouble, gradient)
            d = finite.only(gradient).to(tl.float32)
            if COLUMN_AMAX:
                columns = finite.magnitude(d, True)
                if half == 0:
                    gate_top = tl.maximum(gate_top, columns)
                else:
                    up_top = tl.maximum(up_top, columns)
            v, spread, amax = scale_rows(
                d, amax_of_rows(d, MODE, True), i, j + half * across, 0, M, M, 2 * F, state_ptr, scale_ptr, MODE,
                FORMAT, MARGIN, MX_UP, TILE_M, TILE_F,
            )  # fmt: skip
            where = i.to(tl.int64) * TILE_M * 2 * F + j * TILE_F + half * F + inner if STOCHASTIC else 0
            v = tiles.saturate(v, seed, where, FORMAT, STOCHASTIC, tiles.INTERPRETED)
            q = tiles.cast(v, rows_ptr.dtype.element_ty, tl.float32 if STOCHASTIC else dgate.dtype)
            store_tile(rows_ptr + half * F, q, i, j, inner, M, F, 2 * F, EVEN, TILE_M, TILE_F)
            top = tl.maximum(top, amax)
            if tiles.is_sampled(tile, step):
                lost += tiles.count_of_eight(tiles.is_lost(d, v, FORMAT))
            if CLIPS:
                clipped += tiles.count(tiles.is_clipped(gradient.to(tl.float32), spread, FORMAT))
    if COLUMN_AMAX:
        f = tl.program_id(0) % across * TILE_F + tl.arange(0, TILE_F)
        tiles.raise_to(column_amax_ptr + f, tl.max(gate_top, axis=0), f < F)
        tiles.raise_to(column_amax_ptr + F + f, tl.max(up_top, axis=0), f < F)
        tiles.raise_to(h_amax_ptr + f, tl.max(h_top, axis=0), f < F)
    _record(state_ptr, top, trouble, tiles.from_sample(lost, count, step), clipped, per_element)


@triton.jit(do_not_specialize=["seed"])
def _backward_columns_kernel(
    dh_ptr,
    gate_up_ptr,
    column_amax_ptr,
    h_amax_ptr,
    columns_ptr,
    column_scale_ptr,
    h_ptr,
    h_scale_ptr,
    M,
    F,
    seed,
    MODE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MX_UP: tl.constexpr,
    H_FORMAT: tl.constexpr,
    H_MARGIN: tl.constexpr,
    H_STOCHASTIC: tl.constexpr,
    H_MX_UP: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_F: tl.constexpr,
):
    """The gradients of gate and up as `[2F, M]`, and h as `[F, M]`."""
    across = tl.cdiv(F, TILE_F)
    count = tl.cdiv(M, TILE_M) * across
    inner, inner_h = offsets(2 * F, TILE_M, TILE_F), offsets(F, TILE_M, TILE_F)
    inner_t = offsets(M, TILE_F, TILE_M)
    source: tl.constexpr = dh_ptr.dtype.element_ty
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        i, j = tiles.place(tile, tl.cdiv(M, TILE_M), across, 1, True)
        dgate, dup, h = gradients(
            dh_ptr, gate_up_ptr, gate_up_ptr, i, j, inner, inner_h, M, F, ACTIVATION, EVEN, TILE_M, TILE_F
        )
        where = j.to(tl.int64) * TILE_F * M + i * TILE_M + inner_t if STOCHASTIC or H_STOCHASTIC else 0
        for half in tl.static_range(2):
            d = dgate if half == 0 else dup
            amax = amax_of_columns(d.to(tl.float32), MODE)
            v, _, _ = scale_rows(
                tl.trans(d).to(tl.float32), amax, j + half * across, i, 0, 2 * F, 2 * F, M, column_amax_ptr,
                column_scale_ptr, MODE, FORMAT, MARGIN, MX_UP, TILE_F, TILE_M, True,
            )  # fmt: skip
            v = tiles.saturate(v, seed + 1 + half, where, FORMAT, STOCHASTIC)
            q = tiles.cast(v, columns_ptr.dtype.element_ty, tl.float32 if STOCHASTIC else source)
            half_t = columns_ptr + half * tl.cast(F, tl.int64) * M
            store_tile(half_t, q, j, i, inner_t, F, M, M, EVEN, TILE_F, TILE_M)
        amax = amax_of_columns(h.to(tl.float32), MODE)
        v, _, _ = scale_rows(
            tl.trans(h).to(tl.float32), amax, j, i, 0, F, F, M, h_amax_ptr, h_scale_ptr, MODE, H_FORMAT, H_MARGIN,
            H_MX_UP, TILE_F, TILE_M, True,
        )  # fmt: skip
        v = tiles.saturate(v, seed + 3, where, H_FORMAT, H_STOCHASTIC)
        q = tiles.cast(v, h_ptr.dtype.element_ty, tl.float32 if H_STOCHASTIC else source)
        store_tile(h_ptr, q, j, i, inner_t, F, M, M, EVEN, TILE_F, TILE_M)


_LAUNCHES = LaunchCache()


def can_quantize(gate_up: Tensor, recipe: OperandRecipe) -> bool:
    """Whether these kernels cover the rows: whole blocks along a row, formats that NVIDIA has."""
    return _rows_mode(recipe) is not None and gate_up.shape[1] % (2 * BLOCK) == 0 and can_gate(gate_up)


def can_quantize_backward(gate_up: Tensor, recipe: OperandRecipe, recipe_h: OperandRecipe) -> bool:
    """Whether these kernels cover both passes: the columns of both operands must be scaled alike, too."""
    return can_quantize(gate_up, recipe) and can_quantize(gate_up, recipe_h) and _mode_t(recipe) == _mode_t(recipe_h)


@cache
def _rows_mode(recipe: OperandRecipe) -> int | None:
    if not has_modes(recipe):
        return None
    mode = modes_of(recipe, "rows")[0]
    known = recipe.format in (E4M3, E5M2) and recipe.percentile is None
    return mode if known and mode in (BLOCK_1X128.value, MX.value) else None


@cache
def _mode_t(recipe: OperandRecipe) -> int | None:
    return modes_of(recipe, "columns")[1] if recipe.columns else _rows_mode(recipe)


def gated_quantize(
    gate_up: Tensor, state: Tensor, recipe: OperandRecipe, activation: str, *, record: bool
) -> Quantized:
    """`gated(gate_up[M, 2F])`, quantised as rows."""
    gate_up = gate_up.contiguous()
    key = ("rows", recipe, activation, record, kind(gate_up, state))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build_forward(gate_up, recipe, activation, record))
    return Quantized(*launches.run(gate_up, state))


def _build_forward(gate_up: Tensor, recipe: OperandRecipe, activation: str, record: bool) -> Launches:
    m, f = gate_up.shape[0], gate_up.shape[1] // 2
    mode = _rows_mode(recipe)
    assert mode is not None
    launches = Launches(given=2)
    out, scale = launches.make((m, f), recipe.format.dtype), make_scale(launches, mode, (m, f))
    tile = tuning_for(gate_up.device).gated.rows[recipe.granularity]
    check_blocks(f"gated.rows[{recipe.granularity!r}]", tile, mode, NONE.value)
    grid, constants = _arrange(gate_up, m, f, tile)
    constants |= {"MODE": mode, "RECORD": record, "ACTIVATION": ACTIVATIONS[activation], "CLIPS": clips(recipe)}
    numbers = (m, f, 1.0 / (m * f), seed_of(recipe))
    launches.launch(_rows_kernel, grid, (0, 1, out, scale), numbers, constants | _rounding(recipe))
    launches.results = (out, scale)
    return launches


def gated_quantize_backward(
    dh: Tensor, gate_up: Tensor, state: Tensor, recipe: OperandRecipe, recipe_h: OperandRecipe, activation: str
) -> tuple[Quantized, Quantized, Quantized]:
    """The gradient of gate and up as rows and as columns, and h as columns."""
    dh, gate_up = dh.contiguous(), gate_up.contiguous()
    key = ("backward", recipe, recipe_h, activation, kind(dh, gate_up, state))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build_backward(dh, gate_up, recipe, recipe_h, activation))
    results = launches.run(dh, gate_up, state)
    return Quantized(*results[:2]), Quantized(*results[2:4]), Quantized(*results[4:])


def _build_backward(
    dh: Tensor, gate_up: Tensor, recipe: OperandRecipe, recipe_h: OperandRecipe, activation: str
) -> Launches:
    m, f = dh.shape
    mode, mode_t = _rows_mode(recipe), _mode_t(recipe)
    assert mode is not None and mode_t is not None
    by_channel, act = mode_t == CHANNEL.value, ACTIVATIONS[activation]
    launches = Launches(given=3)
    rows, scale = launches.make((m, 2 * f), recipe.format.dtype), make_scale(launches, mode, (m, 2 * f))
    columns, scale_t = launches.make((2 * f, m), recipe.format.dtype), make_scale(launches, mode_t, (2 * f, m))
    h, h_scale = launches.make((f, m), recipe_h.format.dtype), make_scale(launches, mode_t, (f, m))
    column_amax = h_amax = 2
    if by_channel:
        column_amax, h_amax = (launches.make((n,), torch.float32, zeros=True) for n in (2 * f, f))

    tuning, along = tuning_for(gate_up.device).gated, recipe.columns or recipe.granularity
    field = "backward_rows_and_amax" if by_channel else "backward_rows"
    tile = getattr(tuning, field)
    check_blocks(f"gated.{field}", tile, mode, NONE.value)
    grid, constants = _arrange(gate_up, m, f, tile, strips=by_channel)
    constants |= {"MODE": mode, "COLUMN_AMAX": by_channel, "ACTIVATION": act, "CLIPS": clips(recipe)}
    tensors = (0, 1, 2, rows, scale, column_amax, h_amax)
    numbers = (m, f, 0.5 / (m * f), seed_of(recipe))
    launches.launch(_backward_rows_kernel, grid, tensors, numbers, constants | _rounding(recipe))

    word: int | None = 32
    field, tile = "whole_columns", tuning.whole_columns[along]
    grid, constants = _arrange(gate_up, m, f, tile)
    kernel: Any = whole_columns_kernel
    constants["BAND"] = tuning.band
    if not constants.pop("EVEN") or dh.dtype != gate_up.dtype or (dh.data_ptr() | gate_up.data_ptr()) % 4:
        kernel = _backward_columns_kernel
        field, tile, word = "backward_columns", tuning.backward_columns[along], None
        grid, constants = _arrange(gate_up, m, f, tile)
    check_blocks(f"gated.{field}[{along!r}]", tile, NONE.value, mode_t, word)
    constants |= {"MODE": mode_t, "ACTIVATION": act}
    constants |= _rounding(recipe) | {f"H_{name}": value for name, value in _rounding(recipe_h).items()}
    outs = (columns, scale_t, h, h_scale)
    numbers_t = (m, f, seed_of(recipe, recipe_h))
    launches.launch(kernel, grid, (0, 1, column_amax, h_amax, *outs), numbers_t, constants)
    launches.results = (rows, scale, columns, scale_t, h, h_scale)
    return launches


def _rounding(recipe: OperandRecipe) -> dict[str, Any]:
    return {
        "FORMAT": recipe.format,
        "MARGIN": recipe.margin,
        "STOCHASTIC": recipe.rounding == "stochastic",
        "MX_UP": recipe.mx_rule == "up",
    }


def _arrange(x: Tensor, m: int, f: int, tile: Tile, *, strips: bool = False) -> tuple[tuple[int], dict[str, Any]]:
    across = -(-f // tile.columns)
    count = -(-m // tile.rows) * across
    programs = tile.programs * multiprocessors(x.device)
    constants = {
        "EVEN": m % tile.rows == 0 and f % tile.columns == 0,
        "TILE_M": tile.rows,
        "TILE_F": tile.columns,
        "num_warps": tile.warps,
    }
    if tile.registers is not None:
        constants["maxnreg"] = tile.registers
    return (programs_in_strips(across, count, programs) if strips else min(count, programs),), constants
