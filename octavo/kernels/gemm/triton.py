"""`gemm_nt` as a Triton kernel, for what cuBLASLt refuses or is weak at.

    y_zmn = Σ_s Σ_k a_z,s,m,k · b_z,s,n,k        z: batches of the result, s: batches summed over

Every kind of scale, both formats on either side, any M and N. A batch dimension costs nothing but an index: the kernel
finds the matrices of step (z, s) by strides, 0 where an operand broadcasts, and walks over s in the same loop as over
k. So a gradient summed over the batch copies neither operand (folding 1 GB of BDH's g into K would take as long as
its GEMM).

Operands are read through TMA as `[matrices × rows, K]`. Past K it fills in zeros; past a matrix's last row it reads
the next matrix, whose products land in rows of y that are not stored. No load needs a mask.

Two ways to add up:
- scales that hold for the whole sum multiply the result. `fast` leaves the sum in the tensor cores (about 14 bits);
  else each step's 128 products are added to an FP32 sum outside.
- scales that change within the sum (blocks, rows summed over batches) multiply each step's products, which then go to
  the FP32 sum: there is no fast form, and none is needed.
"""

# Triton gives the parameters of a kernel their types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.gemm import batch_strides
from octavo.kernels.launch import launch_once
from octavo.kernels.tuning import GemmTile, GemmTiles, tuning_for
from octavo.numerics.quantize import BLOCK, GROUP_HEIGHTS, GROUPS, Quantized


class Batches(NamedTuple):
    """Two dimensions kept, two summed: `(size, stride in a, stride in b)`, in matrices."""

    kept: list[tuple[int, int, int]]
    summed: list[tuple[int, int, int]]


def gemm_nt(
    a: Quantized, b: Quantized, *, bias: Tensor | None, out_dtype: torch.dtype, batch: Sequence[int], fast: bool
) -> Tensor:
    """`a · bᵀ + bias` for K in multiples of 16 and nothing empty; see `numerics.gemm.padded_gemm_nt`."""
    (m, k), n = a.data.shape[-2:], b.data.shape[-2]
    out = torch.empty(*batch, m, n, dtype=out_dtype, device=a.data.device)
    a_scale, b_scale = _with_batch(a), _with_batch(b)
    batches = plan_batches(a.data.shape[:-2], b.data.shape[:-2], batch)
    if batches is None:
        a_data, a_scale, b_data, b_scale = _materialize(a, a_scale, b, b_scale, batch)
        batches = plan_batches(a_data.shape[:-2], b_data.shape[:-2], (*a_data.shape[:-3], 1))
        assert batches is not None
    else:
        a_data, b_data = a.data, b.data
    groups = _group(a_scale, k), _group(b_scale, k)
    sums = math.prod(size for size, _, _ in batches.summed)
    rescale = any(groups) or (sums > 1 and a_scale.dim() + b_scale.dim() > 0)
    a_rows, b_rows = _rows_per_scale(a_scale, m), _rows_per_scale(b_scale, n)
    if rescale:
        sum_in = "FP32, scaled by row" if (a_rows, b_rows) == (1, BLOCK) else "FP32, scaled"
    else:
        sum_in = "tensor core" if fast else "FP32"
    tuning = tuning_for(out.device).gemm
    tile = choose_tile(m, n, sum_in, tuning)
    tile = tile._replace(k=min(tile.k, *(group for group in groups if group)) if any(groups) else tile.k)
    (_, *z1), (z2_size, *z2) = batches.kept
    (_, *s1), (s2_size, *s2) = batches.summed
    tiles = math.prod(size for size, _, _ in batches.kept) * -(-m // tile.m) * -(-n // tile.n)
    launch_once(
        _gemm_nt_kernel,
        (tiles,),
        _descriptor(a_data, tile.m // tile.split, tile.k),
        _descriptor(b_data, tile.n, tile.k),
        out,
        a_scale,
        b_scale,
        bias,
        m,
        n,
        k,
        z2_size,
        s2_size,
        sums,
        *z1,
        *z2,
        *s1,
        *s2,
        *_scale_strides(a_scale),
        *_scale_strides(b_scale),
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        SPLIT=tile.split,
        GROUP_M=tuning.group,
        A_ROWS=a_rows,
        B_ROWS=b_rows,
        A_GROUP=groups[0] or BLOCK,
        B_GROUP=groups[1] or BLOCK,
        RESCALE=rescale,
        FAST=fast and not rescale,
        SUMMED=sums > 1,
        EVEN=m % tile.m == 0 and n % tile.n == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def plan_batches(a_batch: Sequence[int], b_batch: Sequence[int], batch: Sequence[int]) -> Batches | None:
    """How to walk over the batches of two contiguous operands; None if two dimensions of each kind are not enough."""
    full = torch.broadcast_shapes(a_batch, b_batch)
    target = (1,) * (len(full) - len(batch)) + tuple(batch)
    dims = list(zip(full, batch_strides(a_batch, len(full)), batch_strides(b_batch, len(full)), strict=True))
    kept = _merge([d for d, t in zip(dims, target, strict=True) if t == d[0]])
    summed = _merge([d for d, t in zip(dims, target, strict=True) if t != d[0]])
    if len(kept) > 2 or len(summed) > 2:
        return None
    one = (1, 0, 0)
    return Batches([one] * (2 - len(kept)) + kept, [one] * (2 - len(summed)) + summed)


def _merge(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merge neighbouring dimensions that both operands step through evenly."""
    merged: list[tuple[int, int, int]] = []
    for size, a, b in dims:
        if size == 1:
            continue
        if merged and merged[-1][1:] == (a * size, b * size):
            size, merged = size * merged[-1][0], merged[:-1]
        merged.append((size, a, b))
    return merged


def _materialize(
    a: Quantized, a_scale: Tensor, b: Quantized, b_scale: Tensor, batch: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Copies laid out as `[kept, summed, rows, ...]`, for batches that no strides of ours describe."""
    full = torch.broadcast_shapes(a.data.shape[:-2], b.data.shape[:-2])
    target = (1,) * (len(full) - len(batch)) + tuple(batch)
    order = sorted(range(len(full)), key=lambda i: target[i] != full[i])
    kept = math.prod(full[i] for i in order if target[i] == full[i])

    def lay_out(x: Tensor) -> Tensor:
        x = x.expand(*full, *x.shape[-2:]).permute(*order, -2, -1)
        return x.reshape(kept, -1, *x.shape[-2:]).contiguous()

    a_data, b_data = (lay_out(q.data.view(torch.uint8)).view(q.data.dtype) for q in (a, b))
    scales = (s if s.dim() == 0 else lay_out(s) for s in (a_scale, b_scale))
    return a_data, next(scales), b_data, next(scales)


def _with_batch(q: Quantized) -> Tensor:
    """The scale in FP32, with the batch dimensions of its data."""
    scale = q.scale.float()
    if scale.dim() == 0 or q.data.dim() == 2:
        return scale
    return scale.expand(*q.data.shape[:-2], *scale.shape[-2:]).contiguous()


def _group(scale: Tensor, k: int) -> int:
    """How many elements along K share a scale; 0 for all."""
    if scale.dim() == 0 or scale.shape[-1] == 1:
        return 0
    return next(group for group in GROUPS if scale.shape[-1] == -(-k // group))


def _scale_strides(scale: Tensor) -> tuple[int, int, int]:
    """Strides between matrices, rows and groups of a scale; 0 where there is one for all."""
    if scale.dim() == 0:
        return 0, 0, 0
    rows, groups = scale.shape[-2:]
    return rows * groups, scale.stride(-2) if rows > 1 else 0, scale.stride(-1) if groups > 1 else 0


def _rows_per_scale(scale: Tensor, rows: int) -> int:
    if scale.dim() == 0 or scale.shape[-2] == rows:
        return 1
    return next(height for height in GROUP_HEIGHTS if scale.shape[-2] == -(-rows // height))


def _descriptor(data: Tensor, rows: int, columns: int) -> Any:
    matrix = data.view(-1, data.shape[-1])
    # TMA addresses 16 bytes; only a view into the middle of a buffer starts elsewhere.
    return TensorDescriptor.from_tensor(matrix if matrix.data_ptr() % 16 == 0 else matrix.clone(), [rows, columns])


def choose_tile(m: int, n: int, sum_in: str, tuning: GemmTiles) -> GemmTile:
    """The tile for a product of m rows and n columns, by where it is added up."""
    if m <= 64 or n <= 64:
        return tuning.small
    if sum_in == "tensor core" and n > 128:
        return tuning.fast
    if sum_in in ("FP32", "FP32, scaled by row") and m > 128:
        return tuning.tall
    return tuning.other


@triton.jit(
    do_not_specialize=[
        *("m", "k", "z2_size", "s2_size", "sums", "a_z1", "b_z1", "a_z2", "b_z2", "a_s1", "b_s1", "a_s2", "b_s2"),
        *("a_scale_matrix", "a_scale_row", "a_scale_k", "b_scale_matrix", "b_scale_row", "b_scale_k"),
    ]
)
def _gemm_nt_kernel(
    a_desc,
    b_desc,
    out_ptr,
    a_scale_ptr,
    b_scale_ptr,
    bias_ptr,
    m,
    n,
    k,
    z2_size,
    s2_size,
    sums,
    a_z1,
    b_z1,
    a_z2,
    b_z2,
    a_s1,
    b_s1,
    a_s2,
    b_s2,
    a_scale_matrix,
    a_scale_row,
    a_scale_k,
    b_scale_matrix,
    b_scale_row,
    b_scale_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP_M: tl.constexpr,
    A_ROWS: tl.constexpr,
    B_ROWS: tl.constexpr,
    A_GROUP: tl.constexpr,
    B_GROUP: tl.constexpr,
    RESCALE: tl.constexpr,
    FAST: tl.constexpr,
    SUMMED: tl.constexpr,
    EVEN: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    pid = tl.program_id(0)
    z = pid // (tiles_m * tiles_n)
    pid = pid % (tiles_m * tiles_n)
    # Down GROUP_M tiles, then to the right.
    group = pid // (GROUP_M * tiles_n)
    height = min(tiles_m - group * GROUP_M, GROUP_M)
    tile_m = group * GROUP_M + pid % (GROUP_M * tiles_n) % height
    tile_n = pid % (GROUP_M * tiles_n) // height

    # A tile of y is SPLIT tiles, one above the other: registers hold their sums, and one step's products at a time.
    ROWS: tl.constexpr = BLOCK_M // SPLIT
    first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
    a_scale_ptrs = a_scale_ptr + _scale_rows(first_m, m, ROWS, A_ROWS) * a_scale_row
    lower_scale_ptrs = a_scale_ptr + _scale_rows(first_m + ROWS, m, ROWS, A_ROWS) * a_scale_row
    b_scale_ptrs = b_scale_ptr + _scale_rows(first_n, n, BLOCK_N, B_ROWS) * b_scale_row

    z1, z2 = z // z2_size, z % z2_size
    a_first, b_first = z1 * a_z1 + z2 * a_z2, z1 * b_z1 + z2 * b_z2
    a_matrix, b_matrix = a_first, b_first
    steps = tl.cdiv(k, BLOCK_K)
    acc = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    lower = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for i in range(steps * sums):
        step = i
        if SUMMED:
            s = i // steps
            step = i - s * steps
            s1 = s // s2_size
            s2 = s - s1 * s2_size
            a_matrix = a_first + s1 * a_s1 + s2 * a_s2
            b_matrix = b_first + s1 * b_s1 + s2 * b_s2
        first_k = step * BLOCK_K
        a_row = a_matrix * m + first_m
        a = a_desc.load([a_row, first_k])
        b = b_desc.load([b_matrix * n + first_n, first_k])
        if RESCALE:
            a_scale_at = a_matrix * a_scale_matrix + first_k // A_GROUP * a_scale_k
            a_scale = tl.load(a_scale_ptrs + a_scale_at)
            b_scale = tl.load(b_scale_ptrs + (b_matrix * b_scale_matrix + first_k // B_GROUP * b_scale_k))
            # One scale after the other: the product of two small ones may not be a number FP32 has.
            acc += tl.dot(a, b.T) * a_scale[:, None] * b_scale[None, :]
            if SPLIT == 2:
                a = a_desc.load([a_row + ROWS, first_k])
                a_scale = tl.load(lower_scale_ptrs + a_scale_at)
                lower += tl.dot(a, b.T) * a_scale[:, None] * b_scale[None, :]
        elif FAST:
            acc = tl.dot(a, b.T, acc)
        else:
            # Not `max_num_imprecise_acc`: Triton 3.6 then reads the tensor cores' sum without waiting for it.
            acc += tl.dot(a, b.T)
            if SPLIT == 2:
                a = a_desc.load([a_row + ROWS, first_k])
                lower += tl.dot(a, b.T)

    if not RESCALE:
        b_scale = tl.load(b_scale_ptrs + b_matrix * b_scale_matrix)
        acc = acc * tl.load(a_scale_ptrs + a_matrix * a_scale_matrix)[:, None] * b_scale[None, :]
        if SPLIT == 2:
            lower = lower * tl.load(lower_scale_ptrs + a_matrix * a_scale_matrix)[:, None] * b_scale[None, :]
    _store(acc, out_ptr, bias_ptr, z, first_m, first_n, m, n, EVEN)
    if SPLIT == 2:
        _store(lower, out_ptr, bias_ptr, z, first_m + ROWS, first_n, m, n, EVEN)


@triton.jit
def _store(acc, out_ptr, bias_ptr, z, first_m, first_n, m, n, EVEN: tl.constexpr):
    """`acc + bias`, rounded, to the rows and columns of matrix z that exist."""
    offs_m, offs_n = first_m + tl.arange(0, acc.shape[0]), first_n + tl.arange(0, acc.shape[1])
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + tl.minimum(offs_n, n - 1)).to(tl.float32)[None, :]
    out_ptrs = out_ptr + (z.to(tl.int64) * m + offs_m[:, None]) * n + offs_n[None, :]
    y = acc.to(out_ptr.dtype.element_ty)
    if EVEN:
        tl.store(out_ptrs, y)
    else:
        tl.store(out_ptrs, y, mask=(offs_m[:, None] < m) & (offs_n[None, :] < n))


@triton.jit
def _scale_rows(first_row, rows, BLOCK_ROWS: tl.constexpr, ROWS_PER_SCALE: tl.constexpr):
    """Which scale each row of a tile has; one for all where the tile lies in one block."""
    # Rows outside of the matrix take the last one's scale: what they give is not stored.
    count: tl.constexpr = 1 if ROWS_PER_SCALE >= BLOCK_ROWS else BLOCK_ROWS
    return tl.minimum(first_row + tl.arange(0, count), rows - 1) // ROWS_PER_SCALE
