"""Rows of a larger matrix, quantised by scales that are known: the shard of a weight (`octavo/dist/shards.py`).

`x[R, C]` are the rows from `first` on of a matrix whose scales belong to groups of `height × width` elements, so that a
group may begin in another shard. Tiles are those of `dequantize.py`, for the same reason: eight elements a thread.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import tiles
from octavo.kernels.launch import LaunchCache, Launches, kind
from octavo.kernels.tuning import tuning_for
from octavo.numerics.formats import E4M3, E5M2, E8M0_DTYPE, Format

_LAUNCHES = LaunchCache()


@triton.jit
def by_scales_kernel(
    x_ptr, scale_ptr, out_ptr, first, R, C, stride_r, scales_across, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    E8M0: tl.constexpr, FORMAT: tl.constexpr, EVEN: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """`HEIGHT`, `WIDTH`: of a group; 0 for all there is. `E8M0`: scales are exponents in bytes."""
    across = tl.cdiv(C, TILE_C)
    i, j = tl.program_id(0) // across, tl.program_id(0) % across
    r, c = i * TILE_R + tl.arange(0, TILE_R), j * TILE_C + tl.arange(0, TILE_C)
    inside = (r[:, None] < R) & (c[None, :] < C)
    where = r[:, None].to(tl.int64) * stride_r + c[None, :]
    group_r = (first + r) // HEIGHT if HEIGHT else r * 0
    group_c = c // WIDTH if WIDTH else c * 0
    groups = group_r[:, None].to(tl.int64) * scales_across + group_c[None, :]
    if EVEN:
        loaded, scale = tl.load(x_ptr + where), tl.load(scale_ptr + groups)
    else:
        loaded = tl.load(x_ptr + where, mask=inside, other=0.0)
        scale = tl.load(scale_ptr + groups, mask=inside, other=1)
    if E8M0:
        scale = tiles.mx_factor(scale.to(tl.int32))
    v = tiles.scaled(loaded.to(tl.float32), tiles.reciprocal(scale))
    # As FP32, whatever x is: scales lie in other threads than x, so the result changes hands (see `tiles.cast`).
    q = tiles.cast(tiles.saturate(v, 0, 0, FORMAT, False, False), out_ptr.dtype.element_ty, tl.float32)
    out = out_ptr + r[:, None].to(tl.int64) * C + c[None, :]
    if EVEN:
        tl.store(out, q)
    else:
        tl.store(out, q, mask=inside)


def can_quantize(x: Tensor, format: Format, rounding: str) -> bool:
    """Whether the kernel covers this: rounding to nearest, to the formats that NVIDIA has."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    return x.dim() == 2 and x.numel() > 0 and x.dtype in dtypes and format in (E4M3, E5M2) and rounding == "nearest"


def quantize_by_groups(
    x: Tensor, scale: Tensor, format: Format, *, first: int, height: int | None, width: int | None
) -> Tensor:
    """The kernel of `numerics.quantize.quantize_by_groups`."""
    x, scale = x if x.stride(-1) == 1 else x.contiguous(), scale.contiguous()
    scale = scale.view(torch.uint8) if scale.dtype == E8M0_DTYPE else scale
    key = (format, first, height, width, kind(x, scale))
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build(x, scale, format, first, height, width))
    return launches.run(x, scale)[0]


def _build(x: Tensor, scale: Tensor, format: Format, first: int, height: int | None, width: int | None) -> Launches:
    r, c = x.shape
    tile_r, tile_c, warps, *_ = tuning_for(x.device).quantize.dequantize
    launches = Launches(given=2)
    out = launches.make((r, c), format.dtype)
    constants = {
        "HEIGHT": height or 0,
        "WIDTH": width or 0,
        "E8M0": scale.dtype == torch.uint8,
        "FORMAT": format,
        "EVEN": r % tile_r == 0 and c % tile_c == 0,
        "TILE_R": tile_r,
        "TILE_C": tile_c,
        "num_warps": warps,
    }
    across = scale.shape[1] if scale.dim() > 1 else 1
    grid = (-(-r // tile_r) * -(-c // tile_c),)
    launches.launch(by_scales_kernel, grid, (0, 1, out), (first, r, c, x.stride(0), across), constants)
    launches.results = (out,)
    return launches
