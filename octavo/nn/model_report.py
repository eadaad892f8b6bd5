"""The report of a model: an entry for every module that multiplies, and for every raw matrix that may be multiplied."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.linear import LinearInFP8
from octavo.nn.report import FP8, ConversionReport, Entry, dtype_name, is_adapter

_ADAPTER = "an adapter: its products are as narrow as its rank, and stay in high precision"
_RAW = "a raw parameter: Octavo loads linears into FP8, and leaves this as it is"
_OTHER_PRODUCTS = (
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.Bilinear,
)


def report_of(model: nn.Module, *, title: str = "", reasons: Mapping[str, str] | None = None) -> ConversionReport:
    """Layers that run in FP8 and those that do not, as the model is now: loaded into FP8, or converted before.

    `reasons`: why linears of these names do not.
    """
    modules = dict(model.named_modules())
    products = {name: module for name, module in modules.items() if not isinstance(module, nn.Embedding)}
    entries = entries_of(products, partial(entry_of, reasons=reasons), _RAW)
    report = ConversionReport(title or f"layers of {type(model).__name__}", entries)
    for module in products.values():
        if isinstance(module, LinearInFP8):
            report.scaling, report.emulate = module.scaling, module.config.emulate
    report.note_weights(modules)
    return report


def entries_of(
    modules: Mapping[str, nn.Module], linear_entry: Callable[[str, nn.Linear], Entry], raw: str
) -> list[Entry]:
    """The entries of a model. `linear_entry` makes that of a linear; `raw` is why raw matrices are not in FP8."""
    entries = []
    for name, module in modules.items():
        if isinstance(module, nn.Linear):
            entries.append(linear_entry(name, module))
        elif isinstance(module, _OTHER_PRODUCTS):
            dtype, kind = next((dtype_name(p) for p in module.parameters()), ""), type(module).__name__
            entries.append(Entry(name, kind, dtype, f"{kind} stays in high precision"))
        elif not type(module).__module__.startswith("torch.nn."):
            for key, parameter in module.named_parameters(name, recurse=False):
                if parameter.dim() >= 2:
                    entries.append(Entry(key, "parameter", dtype_name(parameter), raw, str(list(parameter.shape))))
    return entries


def entry_of(name: str, linear: nn.Linear, reasons: Mapping[str, str] | None = None) -> Entry:
    """The entry of a linear as it is now: in FP8, with its weight frozen in it, or not."""
    if is_adapter(name):
        return Entry(name, "adapter", dtype_name(linear.weight), _ADAPTER, shapes_of(linear))
    if not isinstance(linear, LinearInFP8):
        reason = (reasons or {}).get(name, "not converted")
        return Entry(name, "linear", dtype_name(linear.weight), reason, shapes_of(linear))
    entry = Entry(name, "linear", FP8, "", shapes_of(linear), str(linear.recipe))
    if isinstance(linear, FP8FrozenLinear) and linear.format is not None:
        entry.weight = str(linear.format.dtype).removeprefix("torch.")
        if not linear.fp8_products:
            entry.precision, entry.formats = str(linear.high_dtype).removeprefix("torch."), ""
            entry.reason = "its weight alone is in FP8, and dequantised for each product"
        elif not linear.fp8_forward:
            entry.reason = "backward alone: its weight is dequantised for the product of forward"
    return entry


def shapes_of(linear: nn.Linear) -> str:
    return f"{linear.in_features} → {linear.out_features}"
