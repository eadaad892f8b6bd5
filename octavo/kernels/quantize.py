"""Quantising an operand in one pass over it: the kernel behind `numerics.operand.quantize_operand`.

A program holds one 128×128 tile of `x[R, C]` and writes it as `rows[R, C]`, as `columns[C, R]`, or as both; so the
high-precision tensor is read once. Where the scale comes from, for each of the two layouts:

    tensor         one scale: delayed, from the row; else from an amax pass (which ends at once where a scale is known)
    channel        one per row, or per column, from an amax pass
    1×128          of this tile's own rows (128 elements along the contracted dimension), or columns
    128×128        of this very tile
    1×32 (mx)      of this tile's own rows or columns, a power of two

Statistics go into the scaling row with a few atomics per tile. Rows and columns of a group of matrices that lie side
by side (q, k and v, say) are written into slices of one buffer, by one launch each.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import tiles
from octavo.kernels.tiles import BLOCK_1X128, BLOCK_128X128, CHANNEL, MX, NONE, TENSOR, multiprocessors
from octavo.numerics.config import OperandRecipe
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.quantize import BLOCK, MX_BLOCK, Quantized
from octavo.numerics.scaling import AMAX

# Rows and columns of a tile, warps, loads in flight, and programs per multiprocessor, each of which walks over many
# tiles. Blocks need all of their 128×128.
_TILE = (64, 64, 4, 3, 4)
_BLOCK_TILE = (128, 128, 16, 2, 1)
_AMAX_PROGRAMS = 8
_MX_BLOCK = tl.constexpr(MX_BLOCK)


@triton.jit
def _load(x_ptr, r, c, r0, end, C, stride_r, EVEN: tl.constexpr):
    offset = (r[:, None] - r0).to(tl.int64) * stride_r + c[None, :]
    if EVEN:
        return tl.load(x_ptr + offset)
    return tl.load(x_ptr + offset, mask=(r[:, None] < end) & (c[None, :] < C), other=0.0)


@triton.jit
def _amax_kernel(
    x_ptr,
    row_ptr,
    amax_ptr,
    row_amax_ptr,
    column_amax_ptr,
    r0,
    end,
    R,
    C,
    stride_b,
    stride_r,
    DELAYED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """The largest finite magnitude of everything, of each row, of each column: atomics into zeros."""
    if DELAYED:
        if tl.load(row_ptr + tiles.SCALE) > 0:
            return
    batch = tl.program_id(1).to(tl.int64)
    x_ptr += batch * stride_b
    across = tl.cdiv(C, TILE_C)
    top = 0.0
    for tile in range(tl.program_id(0), tl.cdiv(end - r0, TILE_R) * across, tl.num_programs(0)):
        r = r0 + tile // across * TILE_R + tl.arange(0, TILE_R)
        c = tile % across * TILE_C + tl.arange(0, TILE_C)
        magnitude = tiles.finite_magnitude(_load(x_ptr, r, c, r0, end, C, stride_r, EVEN).to(tl.float32))
        if ROWS:
            tl.atomic_max(row_amax_ptr + batch * R + r, tl.max(magnitude, axis=1), mask=r < end, sem="relaxed")
        if COLUMNS:
            tl.atomic_max(column_amax_ptr + batch * C + c, tl.max(magnitude, axis=0), mask=c < C, sem="relaxed")
        if WHOLE:
            top = tl.maximum(top, tl.max(tl.max(magnitude, axis=1), axis=0))
    if WHOLE:
        if top > 0:
            tl.atomic_max(amax_ptr, top, sem="relaxed")


@triton.jit(do_not_specialize=["seed"])
def _quantize_kernel(
    x_ptr,
    row_ptr,
    amax_ptr,
    row_amax_ptr,
    column_amax_ptr,
    rows_ptr,
    row_scale_ptr,
    columns_ptr,
    column_scale_ptr,
    r0,
    end,
    R,
    C,
    batches,
    stride_b,
    stride_r,
    per_element,
    seed,
    MODE_R: tl.constexpr,
    MODE_C: tl.constexpr,
    DELAYED: tl.constexpr,
    RECORD: tl.constexpr,
    FIRST: tl.constexpr,
    MAXIMUM: tl.constexpr,
    MARGIN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MX_UP: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles of `x`, which is rows r0 to end of R. See the module's docstring for the modes."""
    across, down = tl.cdiv(C, TILE_C), tl.cdiv(R, TILE_R)
    per_matrix = tl.cdiv(end - r0, TILE_R) * across
    # Tensor and 128×128 scales serve both layouts, so their values are rounded once.
    ONE: tl.constexpr = MODE_R == TENSOR or (MODE_R == NONE and MODE_C == TENSOR)
    SHARED: tl.constexpr = ONE or MODE_R == BLOCK_128X128 or (MODE_R == NONE and MODE_C == BLOCK_128X128)
    if ONE:
        scale = tiles.tensor_scale(row_ptr, amax_ptr, DELAYED, MAXIMUM, MARGIN)
        inverse = tiles.reciprocal(scale)

    top, lost, clipped = 0.0, 0.0, 0.0
    non_finite = top > 1.0
    for tile in tl.range(tl.program_id(0), batches * per_matrix, tl.num_programs(0), num_stages=STAGES):
        batch = (tile // per_matrix).to(tl.int64)
        i, j = r0 // TILE_R + tile % per_matrix // across, tile % across
        r, c = i * TILE_R + tl.arange(0, TILE_R), j * TILE_C + tl.arange(0, TILE_C)
        narrow = _load(x_ptr + batch * stride_b, r, c, r0, end, C, stride_r, EVEN)
        x = narrow.to(tl.float32)
        tile_top, tile_bad = tiles.top_of(x)
        top, non_finite = tl.maximum(top, tile_top), non_finite | tile_bad

        if SHARED:
            if not ONE:
                scale = tiles.scale_from_amax(tile_top, MAXIMUM, MARGIN)
                inverse = tiles.reciprocal(scale)
                if MODE_R == BLOCK_128X128:
                    tl.store(row_scale_ptr + (batch * down + i) * across + j, scale)
                if MODE_C == BLOCK_128X128:
                    tl.store(column_scale_ptr + (batch * across + j) * down + i, scale)
            unusual = tile_bad | (tile_top * inverse > 1e38)  # a finite x times the reciprocal may overflow
            v = tiles.saturate(x * inverse, unusual, seed, _offset(batch, r, c, R, C), MAXIMUM, STOCHASTIC)
            if RECORD:
                lost += tiles.count_lost(x, v, MAXIMUM)
                if tile_top > scale * MAXIMUM:
                    clipped += tiles.count_clipped(x, scale, MAXIMUM)
        elif MODE_R != NONE:
            v, spread = _scale_rows(
                x, r, j, batch, end, R, C, row_amax_ptr, row_scale_ptr, MODE_R, MAXIMUM, MARGIN, MX_UP, TILE_R, TILE_C
            )
            v = tiles.saturate(v, True, seed, _offset(batch, r, c, R, C), MAXIMUM, STOCHASTIC)
            if RECORD:
                lost += tiles.count_lost(x, v, MAXIMUM)
                clipped += tiles.count_clipped(x, spread, MAXIMUM)

        if MODE_R != NONE:
            q = tiles.cast(v, rows_ptr.dtype.element_ty)
            out = rows_ptr + _offset(batch, r, c, R, C)
            if EVEN:
                tl.store(out, q)
            else:
                tl.store(out, q, mask=(r[:, None] < end) & (c[None, :] < C))

        if MODE_C != NONE:
            # Transposed before the cast: in BF16 through shared memory, not in FP32, and not in FP8 (see docs/LOG.md).
            x_t = tl.trans(narrow).to(tl.float32)
            if MODE_C == TENSOR or MODE_C == BLOCK_128X128:
                if STOCHASTIC:
                    v_t = tl.trans(v)  # the very same values
                else:
                    v_t = tiles.saturate(x_t * inverse, unusual, seed, 0, MAXIMUM, STOCHASTIC)
            else:
                # The transposed tile is a tile of the transposed matrix: the same code, rows and columns exchanged.
                v_t, spread_t = _scale_rows(
                    x_t, c, i, batch, C, C, R, column_amax_ptr, column_scale_ptr, MODE_C, MAXIMUM, MARGIN, MX_UP, TILE_C,
                    TILE_R,
                )  # fmt: skip
                v_t = tiles.saturate(v_t, True, seed + 1, _offset(batch, c, r, C, R), MAXIMUM, STOCHASTIC)
                if RECORD and MODE_R == NONE:
                    lost += tiles.count_lost(x_t, v_t, MAXIMUM)
                    clipped += tiles.count_clipped(x_t, spread_t, MAXIMUM)
            q_t = tiles.cast(v_t, columns_ptr.dtype.element_ty)
            out_t = columns_ptr + _offset(batch, c, r, C, R)
            if EVEN:
                tl.store(out_t, q_t)
            else:
                tl.store(out_t, q_t, mask=(c[:, None] < C) & (r[None, :] < end))

    if RECORD:
        tiles.record(row_ptr, top, non_finite, lost, clipped, per_element)
    if FIRST:
        if tl.program_id(0) == 0:
            if ONE:
                tl.store(row_scale_ptr, scale)
                tl.store(column_scale_ptr, scale)
            if RECORD:
                tiles.record_use(row_ptr)
                if ONE:
                    tiles.record_scale(row_ptr, scale, tl.load(amax_ptr))


@triton.jit
def _offset(batch, r, c, R, C):
    return (batch * R + r[:, None].to(tl.int64)) * C + c[None, :]


@triton.jit
def _scale_rows(
    x,
    r,
    j,
    batch,
    end,
    R,
    C,
    amax_ptr,
    scale_ptr,
    MODE: tl.constexpr,
    MAXIMUM: tl.constexpr,
    MARGIN: tl.constexpr,
    MX_UP: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """A tile divided by scales along its rows, and these scales; stores them, too."""
    if MODE == MX:
        GROUPS: tl.constexpr = TILE_C // _MX_BLOCK
        blocks = tl.reshape(tiles.finite_magnitude(x), [TILE_R, GROUPS, _MX_BLOCK])
        exponent = tiles.mx_exponent(tl.max(blocks, axis=2), MAXIMUM, MARGIN, MX_UP)
        g = j * GROUPS + tl.arange(0, GROUPS)
        per_row = tl.cdiv(C, _MX_BLOCK)
        where = scale_ptr + (batch * R + r[:, None]) * per_row + g[None, :]
        tl.store(where, exponent.to(tl.uint8), mask=(r[:, None] < end) & (g[None, :] < per_row))
        spread = _spread(tiles.mx_factor(exponent), TILE_R, GROUPS)
        factor = _spread(tiles.mx_factor(254 - exponent), TILE_R, GROUPS)
    else:
        if MODE == CHANNEL:
            amax = tl.load(amax_ptr + batch * R + r, mask=r < end, other=0.0)
            where = scale_ptr + batch * R + r
            wanted = (r < end) & (j == 0)
        else:
            amax = tl.max(tiles.finite_magnitude(x), axis=1)
            where = scale_ptr + (batch * R + r) * tl.cdiv(C, TILE_C) + j
            wanted = r < end
        scale = tiles.scale_from_amax(amax, MAXIMUM, MARGIN)
        tl.store(where, scale, mask=wanted)
        spread = scale[:, None]
        factor = tiles.reciprocal(scale)[:, None]
    return x * factor, spread


@triton.jit
def _spread(per_group, TILE_R: tl.constexpr, GROUPS: tl.constexpr):
    """`[rows, groups]` to `[rows, 32 × groups]`."""
    spread = tl.broadcast_to(per_group[:, :, None], [TILE_R, GROUPS, _MX_BLOCK])
    return tl.reshape(spread, [TILE_R, GROUPS * _MX_BLOCK])


def can_quantize(xs: Sequence[Tensor], recipe: OperandRecipe) -> bool:
    """Whether the kernel covers this: formats that NVIDIA has, no percentile, groups that no block straddles."""
    wide = all(x.dtype in (torch.bfloat16, torch.float16, torch.float32) and x.dim() >= 2 and x.numel() for x in xs)
    whole = len(xs) == 1 or all(x.dim() == 2 and x.shape[0] % BLOCK == 0 for x in xs)
    return wide and whole and recipe.format in (E4M3, E5M2) and recipe.percentile is None


def quantize_operand(
    x: Tensor, row: Tensor, recipe: OperandRecipe, *, record: bool = True, layout: str = "rows"
) -> list[Quantized]:
    """As `numerics.operand.quantize_operand`."""
    return quantize_group([x], row, recipe, record=record, layout=layout)


def quantize_group(
    xs: Sequence[Tensor], row: Tensor, recipe: OperandRecipe, *, record: bool = True, layout: str = "rows"
) -> list[Quantized]:
    """As quantising `torch.cat(xs)`, without making it."""
    mode_r, mode_c = _modes(recipe, layout)
    batch = xs[0].shape[:-2]
    if mode_c == NONE.value and mode_r != BLOCK_128X128.value:
        xs = [x.reshape(1, -1, x.shape[-1]) for x in xs]  # without a transposed copy, a batch is just more rows
    else:
        xs = [x.reshape(-1, *x.shape[-2:]) for x in xs]
    xs = [x if x.stride(-1) == 1 else x.contiguous() for x in xs]
    b, c = xs[0].shape[0], xs[0].shape[2]
    r = sum(x.shape[1] for x in xs)
    rows = _new_output(xs[0], mode_r, recipe, b, r, c)
    columns = _new_output(xs[0], mode_c, recipe, b, c, r)
    row = row if record or not recipe.delayed else row.clone()  # a first use looks for its scale, and forgets it
    amax, row_amax, column_amax = _measure(xs, row, recipe, mode_r, mode_c, b, r, c)

    free = {mode_r, mode_c} <= {NONE.value, TENSOR.value, CHANNEL.value}
    tile_r, tile_c, warps, stages, per_multiprocessor = _TILE if free else _BLOCK_TILE
    programs = per_multiprocessor * multiprocessors(xs[0].device)
    stochastic = recipe.rounding == "stochastic"
    r0 = 0
    for x in xs:
        end = r0 + x.shape[1]
        _quantize_kernel[(min(b * triton.cdiv(x.shape[1], tile_r) * triton.cdiv(c, tile_c), programs),)](
            x,
            row,
            amax,
            row_amax,
            column_amax,
            rows.data if mode_r else columns.data,
            rows.scale if mode_r else columns.scale,
            columns.data if mode_c else rows.data,
            columns.scale if mode_c else rows.scale,
            r0,
            end,
            r,
            c,
            b,
            x.stride(0),
            x.stride(1),
            1.0 / (b * r * c),
            int(torch.randint(2**31 - 1, ())) if stochastic else 0,
            MODE_R=mode_r,
            MODE_C=mode_c,
            DELAYED=recipe.delayed,
            RECORD=record,
            FIRST=r0 == 0,
            MAXIMUM=recipe.format.max,
            MARGIN=recipe.margin,
            STOCHASTIC=stochastic,
            MX_UP=recipe.mx_rule == "up",
            EVEN=x.shape[1] % tile_r == 0 and c % tile_c == 0,
            TILE_R=tile_r,
            TILE_C=tile_c,
            STAGES=stages,
            num_warps=warps,
        )
        r0 = end
    return [_shaped(q, batch) for q, mode in ((rows, mode_r), (columns, mode_c)) if mode]


def _modes(recipe: OperandRecipe, layout: str) -> tuple[int, int]:
    def mode(granularity: str) -> int:
        if granularity == "block":
            return (BLOCK_128X128 if recipe.block[0] == BLOCK else BLOCK_1X128).value
        return {"tensor": TENSOR, "channel": CHANNEL, "mx": MX}[granularity].value

    rows = mode(recipe.granularity) if layout != "columns" else NONE.value
    columns = mode(recipe.columns or recipe.granularity) if layout != "rows" else NONE.value
    return rows, columns


def _new_output(x: Tensor, mode: int, recipe: OperandRecipe, b: int, r: int, c: int) -> Quantized:
    if mode == NONE.value:
        return Quantized(x, x)
    shape = {
        TENSOR.value: (),
        CHANNEL.value: (b, r, 1),
        BLOCK_1X128.value: (b, r, triton.cdiv(c, BLOCK)),
        BLOCK_128X128.value: (b, triton.cdiv(r, BLOCK), triton.cdiv(c, BLOCK)),
        MX.value: (b, r, triton.cdiv(c, MX_BLOCK)),
    }[mode]
    dtype = torch.uint8 if mode == MX.value else torch.float32
    return Quantized(x.new_empty(b, r, c, dtype=recipe.format.dtype), x.new_empty(shape, dtype=dtype))


def _measure(
    xs: Sequence[Tensor], row: Tensor, recipe: OperandRecipe, mode_r: int, mode_c: int, b: int, r: int, c: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What must be known before quantising: the amax of everything, of each row, of each column, where needed."""
    whole = TENSOR.value in (mode_r, mode_c)
    by_row, by_column = mode_r == CHANNEL.value, mode_c == CHANNEL.value
    amax = row[AMAX:] if recipe.delayed else row.new_zeros(1) if whole else row
    row_amax = row.new_zeros(b * r) if by_row else row
    column_amax = row.new_zeros(b * c) if by_column else row
    if whole or by_row or by_column:
        tile_r, tile_c, warps = _TILE[:3]
        r0 = 0
        for x in xs:
            tiles_in_x = triton.cdiv(x.shape[1], tile_r) * triton.cdiv(c, tile_c)
            _amax_kernel[(min(tiles_in_x, _AMAX_PROGRAMS * multiprocessors(x.device)), b)](
                x,
                row,
                amax,
                row_amax,
                column_amax,
                r0,
                r0 + x.shape[1],
                r,
                c,
                x.stride(0),
                x.stride(1),
                DELAYED=recipe.delayed,
                ROWS=by_row,
                COLUMNS=by_column,
                WHOLE=whole,
                EVEN=x.shape[1] % tile_r == 0 and c % tile_c == 0,
                TILE_R=tile_r,
                TILE_C=tile_c,
                num_warps=warps,
            )
            r0 += x.shape[1]
    return amax, row_amax, column_amax


def _shaped(q: Quantized, batch: torch.Size) -> Quantized:
    """With the batch dimensions of the input again."""
    scale = q.scale if q.scale.dim() == 0 else q.scale.view(*batch, -1, q.scale.shape[-1])
    return Quantized(q.data.view(*batch, -1, q.data.shape[-1]), scale)
