"""Quantisation of one operand of a product, x, w or g, in the layouts that the GEMMs read.

A product contracts each operand along two different dimensions: x_MK along K in forward and along M for the weight's
gradient. `layout` names what is wanted of an operand `[..., R, C]`:

    rows      `[..., R, C]`, scales along C
    columns   `[..., C, R]`, transposed, scales along R
    both      rows, then columns

Per tensor and per 128×128 block the two layouts hold the same FP8 values. Per row, per 1×128 and per 1×32 they do not:
each is quantised from the high-precision values, never one from the other.

A delayed scale that does not hold the tensor (`scaling.holds`) is replaced by the tensor's own: for this use and, while
recording, for the rest of the step.

While recording, the operand's state (see `scaling.py`) receives the amax, whether all values were finite, the shares of
elements that saturated (the clamp changed them) and underflowed (non-zero values that became zero), and whether the
delayed scale held. The state's scale is one for the whole tensor, so only granularity `tensor` sets it here; for the
others the next roll of the history does.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from octavo.numerics.amax import finite_amax, percentile_or_top
from octavo.numerics.config import OperandRecipe
from octavo.numerics.formats import Format
from octavo.numerics.quantize import Quantized, compute_scale, expand_scale, quantize_by, scale_from_amax
from octavo.numerics.scaling import AMAX, CALLS, RESCALED, SATURATED, SCALE, UNDERFLOW, holds, record_use

LAYOUTS = ("rows", "columns", "both")


def quantize_operand(
    x: Tensor,
    state: Tensor,
    recipe: OperandRecipe,
    *,
    record: bool = True,
    layout: str = "rows",
    scale: Tensor | None = None,
) -> list[Quantized]:
    """Quantise `x[..., R, C]` by its recipe into the requested layouts.

    `scale`: one for the whole tensor, computed before and used as is; the state is then neither read nor written.
    """
    if scale is not None:
        return _in_layout(_quantize(x, recipe, scale), layout)
    top, finite = finite_amax(x)
    amax = top if recipe.percentile is None else percentile_or_top(x, recipe.percentile, top)
    in_force = state[SCALE].clone()
    scale = choose_scale(state, amax, recipe, record=record)
    if recipe.granularity == "tensor":
        quantized = _in_layout(_quantize(x, recipe, scale), layout)
    else:
        transposed = replace(recipe, granularity=recipe.columns or recipe.granularity)
        rows, columns = (x, recipe), (x.mT, transposed)
        wanted = {"rows": [rows], "columns": [columns], "both": [rows, columns]}[layout]
        quantized = [_quantize(view, how, _current_scale(view, how)) for view, how in wanted]
    if record:
        record_use(state, amax, ~finite)
        _record_losses(state, x if layout != "columns" else x.mT, quantized[0], recipe.format, top)
        if recipe.granularity == "tensor":
            state[SCALE] = torch.where(amax > 0, scale, in_force)
            if recipe.delayed:
                state[RESCALED] += (in_force > 0) & (scale != in_force)
    return quantized


def choose_scale(state: Tensor, amax: Tensor, recipe: OperandRecipe, *, record: bool) -> Tensor:
    """The scale of a whole tensor of this amax: the one in force, if it is delayed and holds, else the tensor's own."""
    if not recipe.delayed:
        return scale_from_amax(amax, recipe.format, recipe.margin)
    in_force = state[SCALE].clone()
    most = torch.maximum(state[AMAX], amax) if record else amax
    own = scale_from_amax(most, recipe.format, recipe.margin)
    return torch.where(holds(in_force, most, recipe.format, recipe.margin), in_force, own)


def quantize_group(
    xs: Sequence[Tensor],
    state: Tensor,
    recipe: OperandRecipe,
    *,
    record: bool = True,
    layout: str = "rows",
    scale: Tensor | None = None,
) -> list[Quantized]:
    """Quantise several matrices side by side as one operand, such as q, k and v, which share their input."""
    x = torch.cat(list(xs)) if len(xs) > 1 else xs[0]
    return quantize_operand(x, state, recipe, record=record, layout=layout, scale=scale)


def _in_layout(rows: Quantized, layout: str) -> list[Quantized]:
    """Return the layouts of an operand that has one scale."""
    if layout == "rows":
        return [rows]
    # A copy even where .mT is contiguous already (one row or one column): operators may not return aliases.
    columns = Quantized(rows.data.mT.clone(memory_format=torch.contiguous_format), rows.scale)
    return [columns] if layout == "columns" else [rows, columns]


def _quantize(x: Tensor, recipe: OperandRecipe, scale: Tensor) -> Quantized:
    return quantize_by(x, scale, recipe.format, recipe.rounding)


def _current_scale(x: Tensor, recipe: OperandRecipe) -> Tensor:
    return compute_scale(
        x,
        format=recipe.format,
        granularity=recipe.granularity,
        margin=recipe.margin,
        block=recipe.block,
        mx_rule=recipe.mx_rule,
    )


def _record_losses(state: Tensor, x: Tensor, q: Quantized, format: Format, top: Tensor) -> None:
    size = max(x.numel(), 1)
    limit = q.scale.float() * format.saturation_threshold
    if x.device.type != "cpu" or (x.numel() and bool(top > limit.amin())):  # on the CPU, looking first saves a pass
        # In FP32: a 0-d limit would be rounded to the dtype of x. An infinity becomes NaN, it does not saturate.
        magnitude = x.detach().float().abs()
        state[SATURATED] += ((magnitude > expand_scale(limit, x.shape)) & magnitude.isfinite()).sum() / size
    state[UNDERFLOW] += (torch.count_nonzero(x) - _count_non_zero_fp8(q.data, format)) / size
    state[CALLS] += 1


def _count_non_zero_fp8(data: Tensor, format: Format) -> Tensor:
    bits = data.view(torch.uint8)
    # Shifting the sign out makes −0 count as zero; in the fnuz formats that pattern is NaN.
    return torch.count_nonzero(bits if "FNUZ" in format.name else bits << 1)
