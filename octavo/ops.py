"""The operations that layers call, and the one place that chooses how they run.

`torch.ops.octavo.quantize` and `torch.ops.octavo.gemm_nt` are opaque to `torch.compile` and to autograd: a layer's
backward is written out in `octavo/nn`. Each runs the specification in `octavo/numerics`, on every device; kernels,
where there are any, take its place on CUDA.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.numerics import OperandRecipe, Quantized, padded_gemm_nt
from octavo.numerics.formats import E8M0_DTYPE
from octavo.numerics.operand import quantize_operand
from octavo.numerics.quantize import MX_BLOCK

_LIBRARY = torch.library.Library("octavo", "DEF")
_LIBRARY.define("quantize(Tensor x, Tensor(a!) row, str recipe, bool record, str layout) -> Tensor[]")
_LIBRARY.define(
    "gemm_nt(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, ScalarType out_dtype, SymInt[] batch) "
    "-> Tensor"
)


def quantize(x: Tensor, row: Tensor, recipe: OperandRecipe, *, record: bool, layout: str) -> list[Quantized]:
    """Quantise an operand by its recipe; see `numerics.operand.quantize_operand`."""
    parts = torch.ops.octavo.quantize(x, row, recipe.encode(), record, layout)
    return [Quantized(parts[i], parts[i + 1]) for i in range(0, len(parts), 2)]


def gemm_nt(
    a: Quantized, b: Quantized, *, bias: Tensor | None = None, out_dtype: torch.dtype, batch: Sequence[int]
) -> Tensor:
    """`a[..., M, K] · b[..., N, K]ᵀ + bias`, any size, summed down to the batch shape; see `numerics.gemm`."""
    return torch.ops.octavo.gemm_nt(a.data, a.scale, b.data, b.scale, bias, out_dtype, batch)


def _quantize_spec(x: Tensor, row: Tensor, recipe: str, record: bool, layout: str) -> list[Tensor]:
    found = quantize_operand(x, row, OperandRecipe.decode(recipe), record=record, layout=layout)
    if len(found) == 2 and found[0].scale is found[1].scale:
        # Per tensor, both layouts share one scale; an operator may not return the same tensor twice.
        found[1] = found[1]._replace(scale=found[1].scale.clone())
    return [tensor for q in found for tensor in q]


def _quantize_fake(x: Tensor, row: Tensor, recipe: str, record: bool, layout: str) -> list[Tensor]:
    operand = OperandRecipe.decode(recipe)
    *batch, r, c = x.shape
    found = []
    for rows, columns in {"rows": [(r, c)], "columns": [(c, r)], "both": [(r, c), (c, r)]}[layout]:
        scale_shape = {
            "tensor": [],
            "channel": [*batch, rows, 1],
            "block": [*batch, -(-rows // operand.block[0]), -(-columns // operand.block[1])],
            "mx": [*batch, rows, -(-columns // MX_BLOCK)],
        }[operand.granularity]
        found.append(x.new_empty([*batch, rows, columns], dtype=operand.format.dtype))
        found.append(x.new_empty(scale_shape, dtype=E8M0_DTYPE if operand.granularity == "mx" else torch.float32))
    return found


def _gemm_nt_spec(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    batch: list[int],
) -> Tensor:
    return padded_gemm_nt(Quantized(a, a_scale), Quantized(b, b_scale), bias=bias, out_dtype=out_dtype, batch=batch)


def _gemm_nt_fake(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    batch: list[int],
) -> Tensor:
    return a.new_empty([*batch, a.shape[-2], b.shape[-2]], dtype=out_dtype)


_LIBRARY.impl("quantize", _quantize_spec, "CompositeExplicitAutograd")
_LIBRARY.impl("gemm_nt", _gemm_nt_spec, "CompositeExplicitAutograd")
torch.library.register_fake("octavo::quantize", _quantize_fake, lib=_LIBRARY)
torch.library.register_fake("octavo::gemm_nt", _gemm_nt_fake, lib=_LIBRARY)
