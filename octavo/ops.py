"""The operations that layers call, and the one place that chooses how they run.

The operators in `torch.ops.octavo` are opaque to `torch.compile` and to autograd: a layer's backward is written out in
`octavo/nn`. Each runs the specification in `octavo/numerics` on every device; on a GPU with FP8 tensor cores the
kernels in `octavo/kernels` take its place where they can.

Here are the single steps, for products of any shape; `ops_linear.py` has whole layers, `ops_loss.py`
the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import gemm as kernels
from octavo.kernels.ranges import ranged
from octavo.numerics import OperandRecipe, Quantized, padded_gemm_nt
from octavo.numerics import operand as spec
from octavo.numerics.formats import E8M0_DTYPE
from octavo.numerics.quantize import MX_BLOCK
from octavo.support import has_fp8_tensor_cores

_LIBRARY = torch.library.Library("octavo", "DEF")
_LIBRARY.define(
    "quantize(Tensor x, Tensor(a!) row, str recipe, bool record, bool transpose, Tensor? scale=None) "
    "-> (Tensor, Tensor)"
)
_LIBRARY.define("quantize_both(Tensor x, Tensor(a!) row, str recipe, bool record) -> (Tensor, Tensor, Tensor, Tensor)")
_LIBRARY.define(
    "gemm_nt(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, ScalarType out_dtype, SymInt[] batch, "
    "bool fast, bool emulate) -> Tensor"
)


@dataclass(frozen=True)
class Product:
    """How a product is computed: everything about it but its tensors."""

    a: OperandRecipe
    b: OperandRecipe
    g: OperandRecipe
    out_dtype: torch.dtype
    b_is_nk: bool = False
    a_is_weight: bool = False
    b_is_weight: bool = True
    record: bool = True  # learn scales and statistics from this use
    emulate: bool = False  # by the specification even where there are kernels
    fast_forward: bool = True  # tensor cores may keep about 14 bits of a running sum
    fast_backward: bool = False
    in_fp8: bool = True  # else, beside a frozen weight, in `out_dtype`, by what that weight dequantises to

    @property
    def frozen_recipes(self) -> tuple[str, str]:
        """Of a and of g, as the operators of frozen weights take them: empty where nothing is quantised."""
        return (self.a.encode(), self.g.encode()) if self.in_fp8 else ("", "")


def quantize(
    x: Tensor, row: Tensor, recipe: OperandRecipe, *, record: bool, layout: str, scale: Tensor | None = None
) -> list[Quantized]:
    """Quantise an operand by its recipe; see `numerics.operand.quantize_operand`."""
    if layout == "both":
        assert scale is None
        data, scale, data_t, scale_t = torch.ops.octavo.quantize_both(x, row, recipe.encode(), record)
        return [Quantized(data, scale), Quantized(data_t, scale_t)]
    return [Quantized(*torch.ops.octavo.quantize(x, row, recipe.encode(), record, layout == "columns", scale))]


def gemm_nt(
    a: Quantized,
    b: Quantized,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype,
    batch: Sequence[int],
    fast: bool = False,
    emulate: bool = False,
) -> Tensor:
    """`a[..., M, K] · b[..., N, K]ᵀ + bias`, any size, summed down to the batch shape; see `numerics.gemm`.

    `fast` allows tensor cores their fast accumulation; `emulate` keeps to the specification on any device.
    """
    return torch.ops.octavo.gemm_nt(a.data, a.scale, b.data, b.scale, bias, out_dtype, batch, fast, emulate)


def quantize_directly(x: Tensor, row: Tensor, recipe: OperandRecipe, record: bool, layout: str) -> list[Quantized]:
    """Not as an operator, for the implementations of others: by the kernel where there is one, else by the spec."""
    return quantize_group([x], row, recipe, record, layout)


def quantize_group(
    xs: Sequence[Tensor], row: Tensor, recipe: OperandRecipe, record: bool, layout: str, scale: Tensor | None = None
) -> list[Quantized]:
    """The same for matrices side by side. `scale`: one for all of them, found before."""
    if has_fp8_tensor_cores(xs[0].device):
        from octavo.kernels import quantize as kernel  # brings Triton
        from octavo.kernels import trust

        trust.require_right_kernels(xs[0].device)
        if kernel.can_quantize(xs, recipe):
            return kernel.quantize_group(xs, row, recipe, record=record, layout=layout, scale=scale)
    return spec.quantize_group(xs, row, recipe, record=record, layout=layout, scale=scale)


def _quantize_op(
    x: Tensor, row: Tensor, recipe: str, record: bool, transpose: bool, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    layout = "columns" if transpose else "rows"
    found = quantize_group([x], row, OperandRecipe.decode(recipe), record, layout, scale)[0]
    # An operator may not return what it was given.
    return found.data, found.scale.clone() if found.scale is scale else pack_scale(found.scale)


def _quantize_both_op(x: Tensor, row: Tensor, recipe: str, record: bool) -> tuple[Tensor, ...]:
    rows, columns = quantize_directly(x, row, OperandRecipe.decode(recipe), record, "both")
    # Per tensor, both layouts share one scale; an operator may not return the same tensor twice.
    scale_t = columns.scale.clone() if columns.scale is rows.scale else columns.scale
    return rows.data, pack_scale(rows.scale), columns.data, pack_scale(scale_t)


def _quantize_fake(
    x: Tensor, row: Tensor, recipe: str, record: bool, transpose: bool, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return fake_quantize(x, OperandRecipe.decode(recipe), transpose)


def fake_quantize(x: Tensor, operand: OperandRecipe, transpose: bool) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of a quantised operand and its packed scale."""
    *batch, r, c = x.mT.shape if transpose else x.shape
    granularity = operand.columns if transpose and operand.columns else operand.granularity
    scale_shape = {
        "tensor": [],
        "channel": [*batch, r, 1],
        "block": [*batch, -(-r // operand.block[0]), -(-c // operand.block[1])],
        "mx": [*batch, r, -(-c // MX_BLOCK)],
    }[granularity]
    scale_dtype = torch.uint8 if granularity == "mx" else torch.float32
    return x.new_empty([*batch, r, c], dtype=operand.format.dtype), x.new_empty(scale_shape, dtype=scale_dtype)


def _quantize_both_fake(x: Tensor, row: Tensor, recipe: str, record: bool) -> tuple[Tensor, ...]:
    return *_quantize_fake(x, row, recipe, record, False), *_quantize_fake(x, row, recipe, record, True)


def multiply(
    a: Quantized,
    b: Quantized,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    batch: Sequence[int],
    fast: bool,
    emulate: bool,
    out: Tensor | None = None,
) -> Tensor:
    """`gemm_nt`, not as an operator; into `out` if there is one. Scales may be packed."""
    on_tensor_cores = not emulate and has_fp8_tensor_cores(a.data.device)
    if on_tensor_cores and not batch and kernels.is_one_call(a, b, bias, out_dtype):
        return kernels.one_call(a, b, out_dtype, fast, out)
    a, b = (Quantized(q.data, unpack_scale(q.scale)) for q in (a, b))
    if not on_tensor_cores or not kernels.can_multiply(a, b):
        y = padded_gemm_nt(a, b, bias=bias, out_dtype=out_dtype, batch=batch)
    elif out is not None and kernels.can_multiply_into(a, b, bias, out):
        return kernels.gemm_nt_into(a, b, bias, out, fast=fast)
    else:
        y = kernels.gemm_nt(a, b, bias=bias, out_dtype=out_dtype, batch=torch.Size(batch), fast=fast)
    return y if out is None else out.copy_(y)


def _gemm_nt_op(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    batch: list[int],
    fast: bool,
    emulate: bool,
) -> Tensor:
    return multiply(Quantized(a, a_scale), Quantized(b, b_scale), bias, out_dtype, batch, fast, emulate)


def _gemm_nt_fake(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    batch: list[int],
    fast: bool,
    emulate: bool,
) -> Tensor:
    return a.new_empty([*batch, a.shape[-2], b.shape[-2]], dtype=out_dtype)


def pack_scale(scale: Tensor) -> Tensor:
    """E8M0 scales leave an operator as bytes: Inductor in torch 2.11 does not know that dtype."""
    return scale.view(torch.uint8) if scale.dtype == E8M0_DTYPE else scale


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, which takes its time to find that there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def is_wide(x: Quantized) -> bool:
    """Whether it is in high precision after all, with an empty scale."""
    return x.data.element_size() > 1


def unpack_scale(scale: Tensor) -> Tensor:
    return scale.view(E8M0_DTYPE) if scale.dtype == torch.uint8 else scale


def install(library: torch.library.Library, name: str, implementation: Any, fake: Any) -> None:
    """Make an operator of what it computes and, for `torch.compile` and the meta device, the shapes of that."""
    library.impl(name, ranged(f"octavo.{name}", implementation), "CompositeExplicitAutograd")

    def shapes(*args: Any) -> Any:
        arguments = getattr(torch.ops.octavo, name).default._schema.arguments
        check_values(f"octavo::{name}", {a.name: value for a, value in zip(arguments, args, strict=False)})
        return fake(*args)

    torch.library.register_fake(f"octavo::{name}", shapes, lib=library)


def check_values(what: str, operands: dict[str, Any]) -> None:
    """Refuse a tensor on the meta device beside real ones: only shapes would be computed, and any numbers returned.

    Scaling rows and scales are not what an operand is missing: those of a weight on the meta device are real.
    """
    groups = ((name, value if isinstance(value, list | tuple) else (value,)) for name, value in operands.items())
    places = [(name, x.device.type) for name, values in groups for x in values if isinstance(x, Tensor)]
    empty = dict.fromkeys(name for name, device in places if device == "meta")
    real = {name: device for name, device in places if device != "meta" and "row" not in name and "scale" not in name}
    if empty and real:
        raise RuntimeError(
            f"{what}: {', '.join(empty)} on the meta device, without values, and {', '.join(real)} on "
            f"{next(iter(real.values()))}. Weights that were offloaded come back when their own module is called; else "
            "give the model its weights (model.to_empty, then load_state_dict)"
        )


for _name, _implementation, _fake in (
    ("quantize", _quantize_op, _quantize_fake),
    ("quantize_both", _quantize_both_op, _quantize_both_fake),
    ("gemm_nt", _gemm_nt_op, _gemm_nt_fake),
):
    install(_LIBRARY, _name, _implementation, _fake)
