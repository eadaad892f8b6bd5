"""`convert_to_fp8`: every linear of a model in FP8, in place, and `restore` to undo it.

A linear keeps its identity, its Parameters, its hooks and its state-dict keys: only its class changes. So an optimiser
built before the conversion trains the same weights as one built after it.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from octavo.nn.autocast import is_skipped
from octavo.nn.linear import FP8Linear
from octavo.nn.report import FP8, Entry, Report
from octavo.numerics import FP8ScalingManager, FP8TrainingConfig
from octavo.numerics.config import check_config

_OTHER_PRODUCTS = (
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.Bilinear,
)


@dataclass
class ConversionReport(Report):
    """Every layer that multiplies: in FP8 or not, and why. `scaling` holds histories and statistics of the FP8 ones."""

    scaling: FP8ScalingManager | None = None


def convert_to_fp8(model: nn.Module, config: FP8TrainingConfig | None = None) -> ConversionReport:
    """Run the linears of `model` in FP8 from now on. Returns what was done, layer by layer; print it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: convert_to_fp8 takes a torch.nn.Module")
    config = check_config(config)
    modules = dict(model.named_modules())
    if any(isinstance(module, FP8Linear) for module in modules.values()):
        raise ValueError(f"{type(model).__name__} is already converted; call octavo.restore(model) first")
    report = ConversionReport(f"layers of {type(model).__name__}", _entries(modules, config))
    if not report.in_fp8:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear to convert; if it multiplies raw parameters, "
            f"run its forward under octavo.fp8_autocast(config)\n{report}"
        )
    _check_skip(modules, config)

    report.scaling = FP8ScalingManager.from_config(config)
    for entry in report.in_fp8:
        linear = FP8Linear.take_over(modules[entry.name], config, report.scaling, entry.name or "linear")
    report.scaling.to(linear.scaling_device)
    report.scaling.follow_optimizers(model)
    return report


def restore(model: nn.Module) -> None:
    """Undo `convert_to_fp8`: the same modules, Parameters and hooks, as plain `nn.Linear`."""
    for module in model.modules():
        if isinstance(module, FP8Linear):
            module.give_back()


def can_convert(model: nn.Module, config: FP8TrainingConfig) -> bool:
    """Whether the model has a linear that `convert_to_fp8` would run in FP8."""
    linears = ((name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear))
    return any(not _why_not(name, linear, config) for name, linear in linears)


def _entries(modules: dict[str, nn.Module], config: FP8TrainingConfig) -> list[Entry]:
    """One for every module that multiplies, and for every raw matrix that a model's own code may multiply."""
    entries = []
    for name, module in modules.items():
        if isinstance(module, nn.Linear):
            reason = _why_not(name, module, config)
            shapes = f"{module.in_features} → {module.out_features}"
            precision = _dtype(module.weight) if reason else FP8
            entries.append(Entry(name, "linear", precision, reason, shapes, "" if reason else str(config.recipe)))
        elif isinstance(module, _OTHER_PRODUCTS):
            dtype = next((_dtype(p) for p in module.parameters()), "")
            entries.append(
                Entry(name, type(module).__name__, dtype, f"{type(module).__name__} stays in high precision")
            )
        elif not type(module).__module__.startswith("torch.nn."):
            for key, parameter in module.named_parameters(name, recurse=False):
                if parameter.dim() >= 2:
                    reason = "a raw parameter: under octavo.fp8_autocast its products run in FP8"
                    entries.append(Entry(key, "parameter", _dtype(parameter), reason, str(list(parameter.shape))))
    return entries


def _why_not(name: str, linear: nn.Linear, config: FP8TrainingConfig) -> str:
    if is_skipped(name, config):
        return "left alone: config.skip names it"
    if type(linear) is not nn.Linear:
        return f"not nn.Linear itself but a subclass, {type(linear).__name__}"
    if not linear.weight.is_floating_point() or linear.weight.element_size() not in (2, 4):
        return f"weight of {linear.weight.dtype}"
    return ""


def _check_skip(modules: dict[str, nn.Module], config: FP8TrainingConfig) -> None:
    for pattern in config.skip:
        found = any(is_skipped(name, config.replace(skip=(pattern,))) for name in modules)
        if not found and pattern not in FP8TrainingConfig.skip:
            raise ValueError(f"skip={pattern!r}: no module of the model has that name, or matches that pattern")


def _dtype(parameter: Tensor) -> str:
    return str(parameter.dtype).removeprefix("torch.")
