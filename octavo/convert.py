"""`convert_to_fp8`: a model's linears in FP8, in place, and `restore` to undo it.

A linear keeps its identity, its Parameters, its hooks and its state-dict keys: only its class changes. So an optimiser
built before the conversion trains the same weights as one built after it. The decoders that `octavo/hf` knows also get
its fused pieces; every other model gets plain FP8 linears. A conversion that is refused, or breaks off, leaves the
model as it was.
"""

import sys
from collections.abc import Sequence

from torch import Tensor, nn

from octavo.nn import cost_model
from octavo.nn.attention import NOT_ON_A_GPU
from octavo.nn.choice import Choice, Filter
from octavo.nn.frozen_report import entry_of
from octavo.nn.linear import FP8Linear, LinearInFP8
from octavo.nn.report import FP8, ConversionReport, Entry
from octavo.nn.undo import Fused, all_or_nothing
from octavo.numerics import FP8ScalingManager, FP8TrainingConfig
from octavo.numerics.checks import check_choice, check_positive_int
from octavo.numerics.config import check_config
from octavo.support import has_fp8_tensor_cores, require_tensor_cores

PRECISIONS = ("fp8", "bf16")
_OTHER_PRODUCTS = (
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.Bilinear,
)
_CONVERTED = "_octavo_converted"


def convert_to_fp8(
    model: nn.Module,
    config: FP8TrainingConfig | str | None = None,
    *,
    precision: str = "fp8",
    tokens: int | None = None,
    filter: Filter | None = None,
    include: Sequence[str] = (),
) -> ConversionReport:
    """Run the linears of `model` in FP8 from now on. Returns what was done, layer by layer; print it.

    `config`: an `FP8TrainingConfig`, or the name of a recipe, such as "block". `precision="bf16"` uses the same fused
    pieces without FP8: the baseline that FP8 itself has to beat. `tokens`: the number of tokens in a step; layers that
    FP8 would make slower at that size then stay in high precision.

    `filter(name, linear)`: False leaves that linear alone, beside those that `config.skip` names. Adapters (LoRA's A
    and B, and those of PEFT's other methods) are left alone, because products of their rank never pay; `include` names
    those to convert nevertheless, as `skip` does: names, parts of dotted names, or patterns.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: convert_to_fp8 takes a torch.nn.Module")
    config = check_config(config)
    check_choice("precision", precision, PRECISIONS)
    if tokens is not None:
        check_positive_int("tokens", tokens)
    if precision == "fp8" and config.fp8_dpa:
        raise ValueError(
            "fp8_dpa=True: convert_to_fp8 runs linears in FP8 and leaves attention as it is. " + NOT_ON_A_GPU
        )
    modules = dict(model.named_modules())
    if is_converted(model):
        raise ValueError(f"{type(model).__name__} is already converted; call octavo.restore(model) first")
    choice = Choice(modules, config, filter, include)
    report = ConversionReport(
        f"layers of {type(model).__name__}",
        _entries(modules, choice, precision, tokens),
        emulate=config.emulate,
    )
    report.note_weights(modules)
    report.watch(model, _hooked)
    if precision == "bf16":
        with all_or_nothing(model):
            _fuse(modules, config, report, None)
            model.__dict__[_CONVERTED] = True
        return report
    linears = {entry.name: modules[entry.name] for entry in report.in_fp8 if type(modules[entry.name]) is nn.Linear}
    choice.check_names()
    if not linears:
        raise ValueError(f"{type(model).__name__} {_why_nothing(modules)}\n{report}")
    _check_head(modules, config)
    for linear in linears.values():
        require_tensor_cores(linear.weight.device, config)

    report.scaling = FP8ScalingManager.from_config(config)
    with all_or_nothing(model):
        _fuse(modules, config, report, report.scaling)
        for name, linear in linears.items():
            if type(linear) is nn.Linear:  # not part of something fused
                FP8Linear.take_over(linear, config, report.scaling, name or "linear")
        model.__dict__[_CONVERTED] = True
        report.scaling.to(next(linear.scaling_device for linear in linears.values() if isinstance(linear, FP8Linear)))
        report.scaling.follow_optimizers(model)
    return report


def _why_nothing(modules: dict[str, nn.Module]) -> str:
    linears = [module for module in modules.values() if isinstance(module, nn.Linear)]
    if any(isinstance(linear, LinearInFP8) for linear in linears):
        return "is in FP8 already: its weights are frozen in it, and nothing else is there to convert"
    why = "has no nn.Linear to convert, as it is" if linears else "has no nn.Linear to convert"
    return f"{why}; if it multiplies raw parameters, run its forward under octavo.fp8_autocast(config)"


def restore(model: nn.Module) -> None:
    """Undo `convert_to_fp8`, or `fuse` of a BDH: the same modules, Parameters and hooks, of the classes they had."""
    if any(isinstance(module, FP8Linear) and module.fp8_only is not None for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has weights in FP8 only: call remove() on what offload_master returned first"
        )
    for module in model.modules():
        if isinstance(module, FP8Linear):
            module.give_back()
        if isinstance(module, Fused):
            module.unfuse()
        module.__dict__.pop(_CONVERTED, None)
        if _is_transformers(module):
            from octavo.hf import decoder

            decoder.restore(module)


def is_converted(model: nn.Module) -> bool:
    """Whether `convert_to_fp8` has been here, or BDH was fused: on the model, or on a part of it."""
    return any(isinstance(module, FP8Linear | Fused) or _CONVERTED in module.__dict__ for module in model.modules())


def can_convert(model: nn.Module, config: FP8TrainingConfig) -> bool:
    """Whether the model has a linear that `convert_to_fp8` would run in FP8."""
    modules = dict(model.named_modules())
    choice = Choice(modules, config)
    return any(not choice.why_not(name, m) for name, m in modules.items() if isinstance(m, nn.Linear))


def _fuse(
    modules: dict[str, nn.Module],
    config: FP8TrainingConfig,
    report: ConversionReport,
    scaling: FP8ScalingManager | None,
) -> None:
    """Use the fused pieces of the decoders that are known. Without `scaling`, in BF16: what is not a product."""
    known = {name: module for name, module in modules.items() if _is_transformers(module)}
    if not known:
        return
    from octavo.hf import decoder

    in_fp8 = {entry.name for entry in report.in_fp8 if type(modules[entry.name]) is nn.Linear}
    groups = mlps = 0
    for name, module in known.items():
        if scaling is None:
            break
        if decoder.is_attention(module) and in_fp8 >= _members(name, decoder.QKV):
            decoder.fuse_attention(module, name, config, scaling)
            groups += 1
        elif decoder.is_mlp(module) and in_fp8 >= _members(name, (*decoder.GATE_UP, "down_proj")):
            reason = decoder.why_no_mlp(module)
            if reason:
                report.fused.append(f"{name} not fused: {reason}")
            else:
                decoder.fuse_mlp(module, name, config, scaling)
                mlps += 1
    if groups:
        report.fused.append(f"q, k and v in one product ({groups})")
    if mlps:
        report.fused.append(f"MLP with its activation in one function ({mlps})")
    if scaling is not None and config.activations == "fp8":
        report.fused += _join_norms(list(known.values()), config)

    for name, module in known.items():
        if not decoder.is_causal_lm(module):
            continue
        decoder.fuse_last_norm(module)
        reason = decoder.why_no_loss(module)
        if reason:
            report.fused.append(f"loss not fused: {reason}")
        else:
            fp8_head = scaling is not None and config.fp8_head
            decoder.fuse_loss(module, config if scaling is not None else None, scaling)
            report.fused.append(f"head and loss in chunks, head in {'FP8' if fp8_head else 'BF16'}")
            if fp8_head:
                _note_head(report, f"{name}.lm_head" if name else "lm_head", config)
        if decoder.use_fused_attention(module):
            report.fused.append("attention on cuDNN where it applies")


def _join_norms(modules: list[nn.Module], config: FP8TrainingConfig) -> list[str]:
    from octavo.hf import layer

    layers = [module for module in modules if layer.can_fuse(module)]
    if layers and not layer.joins_norm(config, config.recipe):
        return ["norms apart from the products that follow them: those have several scales for x"]
    for module in layers:
        layer.fuse(module)
    return [f"norms with the products that follow them ({len(layers)})"] if layers else []


def _check_head(modules: dict[str, nn.Module], config: FP8TrainingConfig) -> None:
    """Before anything is changed: an FP8 head must be one that can be had."""
    if not config.fp8_head:
        return
    reason = "this model is not one of the Hugging Face decoders whose loss is computed in chunks"
    for module in modules.values():
        if _is_transformers(module):
            from octavo.hf import decoder

            if decoder.is_causal_lm(module):
                reason = decoder.why_no_loss(module)
                if not reason:
                    return
    raise ValueError(f"fp8_head=True: {reason}; leave it off, or take the head out of `skip` to make it an FP8 linear")


def _members(name: str, members: tuple[str, ...]) -> set[str]:
    return {f"{name}.{member}" for member in members}


def _note_head(report: ConversionReport, name: str, config: FP8TrainingConfig) -> None:
    from octavo.hf import decoder

    for entry in report.entries:
        if entry.name == name:
            entry.precision, entry.reason, entry.op = FP8, "", "head"
            entry.formats = str(decoder.head_recipe(config))


def _hooked(model: nn.Module) -> list[str]:
    if not any(map(_is_transformers, model.modules())):
        return []
    from octavo.hf import decoder

    return decoder.called_alone(model)


def _is_transformers(module: nn.Module) -> bool:
    return "transformers" in sys.modules and type(module).__module__.startswith("transformers.models.")


def _entries(modules: dict[str, nn.Module], choice: Choice, precision: str, tokens: int | None) -> list[Entry]:
    """One for every module that multiplies, and for every raw matrix that a model's own code may multiply."""
    entries = []
    config = choice.config
    shared = _shared_outputs(modules)
    for name, module in modules.items():
        if isinstance(module, LinearInFP8):
            entries.append(entry_of(name, module))
        elif isinstance(module, nn.Linear):
            reason = "precision='bf16'" if precision == "bf16" else choice.why_not(name, module)
            reason = reason or _why_not_worth_it(module, config, tokens, shared.get(name, module.out_features))
            shapes = f"{module.in_features} → {module.out_features}"
            found = _dtype(module.weight) if reason else FP8
            entries.append(Entry(name, "linear", found, reason, shapes, "" if reason else str(config.recipe)))
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


def _why_not_worth_it(linear: nn.Linear, config: FP8TrainingConfig, tokens: int | None, outputs: int) -> str:
    """The planner's word, where FP8 is for speed: in emulation nothing pays, it is there for its numerics."""
    if tokens is None or config.emulate is True or not has_fp8_tensor_cores(linear.weight.device):
        return ""
    return cost_model.why_not(tokens, linear.in_features, outputs)


def _shared_outputs(modules: dict[str, nn.Module]) -> dict[str, int]:
    known = {name: module for name, module in modules.items() if _is_transformers(module)}
    if not known:
        return {}
    from octavo.hf import decoder

    return decoder.outputs_with_group(known)


def _dtype(parameter: Tensor) -> str:
    return str(parameter.dtype).removeprefix("torch.")
