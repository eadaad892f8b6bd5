"""`convert_to_fp8`: every linear of a model in FP8, in place, and `restore` to undo it.

A linear keeps its identity, its Parameters, its hooks and its state-dict keys: only its class changes. So an optimiser
built before the conversion trains the same weights as one built after it.
"""

from dataclasses import dataclass

from torch import nn

from octavo.nn.autocast import is_skipped
from octavo.nn.linear import FP8Linear
from octavo.nn.report import FP8, Entry, Report
from octavo.numerics import FP8ScalingManager, FP8TrainingConfig


@dataclass
class ConversionReport(Report):
    """Every linear of the model: in FP8 or not, and why. `scaling` holds their histories and statistics."""

    scaling: FP8ScalingManager | None = None


def convert_to_fp8(model: nn.Module, config: FP8TrainingConfig | None = None) -> ConversionReport:
    """Run the linears of `model` in FP8 from now on. Returns what was done, layer by layer; print it."""
    config = config or FP8TrainingConfig()
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear to convert; "
            "if it multiplies raw parameters, run its forward under octavo.fp8_autocast(config)"
        )
    if any(isinstance(module, FP8Linear) for _, module in linears):
        raise ValueError(f"{type(model).__name__} is already converted; call octavo.restore(model) first")

    scaling = FP8ScalingManager.from_config(config)
    report = ConversionReport(f"linears of {type(model).__name__}", scaling=scaling)
    for name, linear in linears:
        reason = _why_not(name, linear, config)
        precision = FP8 if not reason else str(linear.weight.dtype).removeprefix("torch.")
        shapes = f"{linear.in_features} → {linear.out_features}"
        formats = "" if reason else str(config.recipe)
        report.entries.append(Entry(name, "linear", precision, reason, shapes, formats))
    if not report.in_fp8:
        raise ValueError(f"no linear of {type(model).__name__} can run in FP8:\n{report}")
    for entry, (name, linear) in zip(report.entries, linears, strict=True):
        if entry.precision == FP8:
            linear.__class__ = FP8Linear
            linear._enable_fp8(config, scaling, name or "linear")  # type: ignore[operator]
    scaling.to(next(linear for _, linear in linears if isinstance(linear, FP8Linear))._scaling_device)
    if config.scaling == "delayed":
        scaling.follow_optimizers()
    return report


def restore(model: nn.Module) -> None:
    """Undo `convert_to_fp8`: the same modules, Parameters and hooks, as plain `nn.Linear`."""
    for module in model.modules():
        if isinstance(module, FP8Linear):
            module._disable_fp8()
            module.__class__ = nn.Linear  # type: ignore[assignment]


def _why_not(name: str, linear: nn.Linear, config: FP8TrainingConfig) -> str:
    if is_skipped(name, config):
        return "left alone: config.skip names it"
    if type(linear) is not nn.Linear:
        return f"a subclass of nn.Linear ({type(linear).__name__}) with a forward of its own"
    if not linear.weight.is_floating_point() or linear.weight.element_size() not in (2, 4):
        return f"weight of {linear.weight.dtype}"
    return ""
