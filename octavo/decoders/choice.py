"""Which products with a base frozen in FP8 run in FP8: as a user says, and otherwise where it pays.

True       y and dx are FP8 products
False      neither is: the weight is dequantised for both
"dgrad"    y as with False, and dx an FP8 product
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from octavo.decoders import match
from octavo.kernels.tuning import tuning_for
from octavo.nn import cost_model
from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.model_report import entry_of
from octavo.nn.report import REPORT, ConversionReport

DGRAD = "dgrad"


def check_products(fp8_products: Any) -> None:
    """Raise for anything but True, False, "dgrad", and None for a choice that is not made."""
    if fp8_products is not None and not isinstance(fp8_products, bool) and fp8_products != DGRAD:
        raise ValueError(f"fp8_products={fp8_products!r}: True, False, or {DGRAD!r} for FP8 in backward alone")


def set_products(linears: Sequence[FP8FrozenLinear], fp8_products: bool | str) -> None:
    """Set how these linears multiply, whatever was chosen before."""
    for linear in linears:
        linear.fp8_products, linear.fp8_forward = fp8_products is not False, fp8_products != DGRAD
        linear.chosen_by_cost_model = False


def choose_products(model: nn.Module) -> str:
    """Have a frozen base multiply in BF16 where FP8 does not pay. Returns the reason, empty for FP8."""
    modules = dict(model.named_modules())
    together = match.outputs_of_groups(modules)
    linears = {name: module for name, module in modules.items() if isinstance(module, FP8FrozenLinear)}
    shapes = [
        (linear.in_features, linear.out_features / together.get(name, linear.out_features), linear.out_features)
        for name, linear in linears.items()
    ]
    device = next(linear.weight.device for linear in linears.values())
    reason = cost_model.why_not_frozen(shapes, tuning_for(device))
    for linear in linears.values():
        linear.fp8_products, linear.chosen_by_cost_model = not reason, True
    return reason


def insist_on_fp8(model: nn.Module) -> None:
    """Have products run in FP8 that `choose_products` has in BF16: somebody asked for it, whether it pays or not."""
    linears = _frozen(model)
    changed = [linear for linear in linears if linear.chosen_by_cost_model and not linear.fp8_products]
    for linear in changed:
        linear.fp8_products = True
    if changed:
        _note(model, changed, "since then, products in FP8, as asked for")


def multiply_in_fp8_in_backward(model: nn.Module) -> None:
    """Have forward multiply activations as they are, and leave backward as it is."""
    changed = [linear for linear in _frozen(model) if linear.fp8_products and linear.fp8_forward]
    for linear in changed:
        linear.fp8_forward = False
    if changed:
        _note(model, changed, "FP8 products in backward alone, as rollouts compute")


def _frozen(model: nn.Module) -> list[FP8FrozenLinear]:
    return [module for module in model.modules() if isinstance(module, FP8FrozenLinear)]


def _note(model: nn.Module, changed: Sequence[FP8FrozenLinear], said: str) -> None:
    """Bring the reports of a model, and of models within it, up to date."""
    for module in model.modules():
        report: ConversionReport | None = module.__dict__.get(REPORT)
        if report is None:
            continue
        report.fused.append(f"{said} ({len(changed)})")
        now = {name.removesuffix(".base_layer"): layer for name, layer in module.named_modules()}  # under PEFT
        for entry in report.entries:
            layer = now.get(entry.name)
            if isinstance(layer, FP8FrozenLinear) and any(layer is each for each in changed):
                new = entry_of(entry.name, layer)
                entry.precision, entry.reason, entry.formats = new.precision, new.reason, new.formats
