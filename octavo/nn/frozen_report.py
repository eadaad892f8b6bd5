"""The report of a model that is in FP8 already: loaded with its weights frozen in it, or converted before."""

from collections.abc import Iterable, Mapping

from torch import nn

from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.linear import LinearInFP8
from octavo.nn.report import FP8, ConversionReport, Entry, dtype_name, is_adapter

_ADAPTER = "an adapter: its products are as narrow as its rank, and stay in high precision"
_RAW = "a raw parameter: Octavo loads linears into FP8, and leaves this as it is"


def report_of(
    model: nn.Module, *, title: str = "", reasons: Mapping[str, str] | None = None, fused: Iterable[str] = ()
) -> ConversionReport:
    """Layers that run in FP8 and those that do not, as the model shows them.

    `reasons`: why linears of these names do not. `fused`: see `ConversionReport`.
    """
    modules = dict(model.named_modules())
    report = ConversionReport(title or f"layers of {type(model).__name__}", fused=list(fused))
    for name, module in modules.items():
        if isinstance(module, nn.Linear):
            report.entries.append(entry_of(name, module, reasons or {}))
            if isinstance(module, LinearInFP8):
                report.scaling, report.emulate = module.scaling, module.config.emulate
        elif not type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Embedding):
            for key, parameter in module.named_parameters(name, recurse=False):
                if parameter.dim() >= 2 and not is_adapter(key):
                    entry = Entry(key, "parameter", dtype_name(parameter), _RAW, str(list(parameter.shape)))
                    report.entries.append(entry)
    report.note_weights(modules)
    return report


def entry_of(name: str, linear: nn.Linear, reasons: Mapping[str, str] | None = None) -> Entry:
    """A linear as it is: in FP8, with its weight frozen in it, or not."""
    shapes = f"{linear.in_features} → {linear.out_features}"
    if is_adapter(name):
        return Entry(name, "adapter", dtype_name(linear.weight), _ADAPTER, shapes)
    if not isinstance(linear, LinearInFP8):
        return Entry(name, "linear", dtype_name(linear.weight), (reasons or {}).get(name, "not converted"), shapes)
    entry = Entry(name, "linear", FP8, "", shapes, str(linear.recipe))
    if isinstance(linear, FP8FrozenLinear) and linear.format is not None:
        entry.weight = str(linear.format.dtype).removeprefix("torch.")
        if not linear.in_fp8:
            entry.precision, entry.formats = str(linear.high_dtype).removeprefix("torch."), ""
            entry.reason = "its weight alone is in FP8, and dequantised for each product"
    return entry
