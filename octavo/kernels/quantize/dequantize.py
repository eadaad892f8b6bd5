"""An FP8 matrix back in high precision: x as saved for the gradient of an adapter, or a frozen weight.

Eight elements for each thread, neither more nor less: then what is loaded and what is stored lie in the same threads,
and no FP8 bytes change hands (see `tiles.cast`). For FP32 results they do, before the one store there is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.launch import LaunchCache, Launches, kind
from octavo.kernels.tiles import round_to
from octavo.kernels.tuning import check_tile, tuning_for
from octavo.numerics.quantize import BLOCK, Quantized

_LAUNCHES = LaunchCache()


@triton.jit
def dequantize_kernel(
    data_ptr, scale_ptr, out_ptr, R, C, stride_scale, BLOCKS: tl.constexpr, HIGH: tl.constexpr, EVEN: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """`BLOCKS`: a scale per 128 columns; else `stride_scale` says whether per row, or one for all. `HIGH`: its rows."""
    across = tl.cdiv(C, TILE_C)
    i, j = tl.program_id(0) // across, tl.program_id(0) % across
    r, c = i * TILE_R + tl.arange(0, TILE_R), j * TILE_C + tl.arange(0, TILE_C)
    where = r[:, None].to(tl.int64) * C + c[None, :]
    inside = (r[:, None] < R) & (c[None, :] < C)
    scale = tl.load(scale_ptr + r // HIGH * stride_scale + (j if BLOCKS else 0), mask=r < R, other=0.0)
    if EVEN:
        data = tl.load(data_ptr + where)
    else:
        data = tl.load(data_ptr + where, mask=inside, other=0.0)
    x = round_to(data.to(tl.float32) * scale[:, None], out_ptr.dtype.element_ty)
    if EVEN:
        tl.store(out_ptr + where, x)
    else:
        tl.store(out_ptr + where, x, mask=inside)


def can_dequantize(x: Quantized, dtype: torch.dtype) -> bool:
    """Whether there is a kernel: one scale, one per row, or one per 128 columns of one row or of 128 rows."""
    data, scale = x
    if dtype not in (torch.bfloat16, torch.float16, torch.float32) or data.dim() != 2 or not data.numel():
        return False
    down, across = (-(-size // BLOCK) for size in data.shape)
    shapes = ((), (data.shape[0], 1), (data.shape[0], across), (down, across))
    return data.is_contiguous() and scale.dtype == torch.float32 and tuple(scale.shape) in shapes


def dequantize(x: Quantized, dtype: torch.dtype) -> Tensor:
    """`x.dequantize(dtype)`."""
    data, scale = x.data, x.scale.contiguous()
    key = (dtype, kind(data, scale))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build(data, scale, dtype))
    return launches.run(data, scale)[0]


def _build(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Launches:
    r, c = data.shape
    tile = tuning_for(data.device).quantize.dequantize
    tile_r, tile_c, warps, *_ = tile
    by_block = scale.dim() > 0 and scale.shape[1] > 1
    if by_block:
        check_tile(
            "quantize.dequantize", tile, tile_c == BLOCK, f"a tile has one scale per row, that of {BLOCK} columns"
        )
    launches = Launches(given=2)
    out = launches.make((r, c), dtype)
    constants = {
        "BLOCKS": by_block,
        "HIGH": BLOCK if scale.dim() > 0 and scale.shape[0] < r else 1,
        "EVEN": r % tile_r == 0 and c % tile_c == 0,
        "TILE_R": tile_r,
        "TILE_C": tile_c,
        "num_warps": warps,
    }
    stride = scale.shape[1] if scale.dim() else 0
    grid = (-(-r // tile_r) * -(-c // tile_c),)
    launches.launch(dequantize_kernel, grid, (0, 1, out), (r, c, stride), constants)
    launches.results = (out,)
    return launches
