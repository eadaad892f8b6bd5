"""An FP8 matrix transposed at memory speed.

Bytes that change hands between threads come out wrong on Hopper (see `tiles.cast`), so the matrix is read as pairs of
them. Tile `[n, k pairs]` is transposed in 16 bits; two neighbours along n then give their low bytes to one row of the
result and their high bytes to the next:

    in    [n, k]   (n, 2k) (n, 2k+1)           out   [k, n]   (2k, n) (2k, n+1)
                   (n+1, 2k) (n+1, 2k+1)                      (2k+1, n) (2k+1, n+1)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.launch import LaunchCache, Launches, kind
from octavo.kernels.tuning import tuning_for

_LAUNCHES = LaunchCache()


@triton.jit
def transpose_kernel(x_ptr, out_ptr, N, PAIRS, EVEN: tl.constexpr, TILE_N: tl.constexpr, TILE_PAIRS: tl.constexpr):
    """`x[N, PAIRS]` of 16 bits to `out[2 · PAIRS, N / 2]` of 16 bits."""
    across = tl.cdiv(PAIRS, TILE_PAIRS)
    i, j = tl.program_id(0) // across, tl.program_id(0) % across
    n = i * TILE_N + tl.arange(0, TILE_N)
    pair = j * TILE_PAIRS + tl.arange(0, TILE_PAIRS)
    where = n[:, None].to(tl.int64) * PAIRS + pair[None, :]
    if EVEN:
        x = tl.load(x_ptr + where)
    else:
        x = tl.load(x_ptr + where, mask=(n[:, None] < N) & (pair[None, :] < PAIRS), other=0)
    even, odd = tl.split(tl.reshape(tl.trans(x), [TILE_PAIRS, TILE_N // 2, 2]))
    low = (even & 0xFF) | (odd << 8)
    high = ((even >> 8) & 0xFF) | (odd & -0x100)
    half = i * (TILE_N // 2) + tl.arange(0, TILE_N // 2)
    target = out_ptr + pair[:, None].to(tl.int64) * N + half[None, :]
    if EVEN:
        tl.store(target, low.to(tl.int16))
        tl.store(target + N // 2, high.to(tl.int16))
    else:
        inside = (pair[:, None] < PAIRS) & (half[None, :] < N // 2)
        tl.store(target, low.to(tl.int16), mask=inside)
        tl.store(target + N // 2, high.to(tl.int16), mask=inside)


def can_transpose(data: Tensor) -> bool:
    return data.dim() == 2 and data.is_contiguous() and all(size > 0 and size % 2 == 0 for size in data.shape)


def transpose(data: Tensor) -> Tensor:
    """`data[N, K]` of one byte an element as `[K, N]`."""
    key = kind(data)
    launches = _LAUNCHES.get(key) or _LAUNCHES.add(key, _build(data))
    return launches.run(data.view(torch.int16))[0].view(data.dtype)


def _build(data: Tensor) -> Launches:
    n, pairs = data.shape[0], data.shape[1] // 2
    launches = Launches(given=1)
    out = launches.make((2 * pairs, n // 2), torch.int16)
    tile_n, tile_pairs, warps, *_ = tuning_for(data.device).quantize.transpose
    even = n % tile_n == 0 and pairs % tile_pairs == 0
    constants = {"EVEN": even, "TILE_N": tile_n, "TILE_PAIRS": tile_pairs, "num_warps": warps}
    grid = (-(-n // tile_n) * -(-pairs // tile_pairs),)
    launches.launch(transpose_kernel, grid, (0, out), (n, pairs), constants)
    launches.results = (out,)
    return launches
