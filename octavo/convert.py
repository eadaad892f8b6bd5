"""`convert_to_fp8`: a model's linears in FP8, in place, and `restore` to undo it.

A linear keeps its identity, its Parameters, its hooks and its state-dict keys: only its class changes. So an optimiser
built before the conversion trains the same weights as one built after it. A decoder of transformers that
`octavo/decoders` knows also gets its fused pieces; every other model gets plain FP8 linears. A conversion that is
refused, or breaks off, leaves the model as it was.
"""

from collections.abc import Sequence

from torch import nn

from octavo.decoders import fuse, match
from octavo.kernels.tuning import tuning_for
from octavo.nn import cost_model
from octavo.nn.attention import NOT_ON_A_GPU
from octavo.nn.choice import Choice, Filter
from octavo.nn.linear import FP8Linear, LinearInFP8
from octavo.nn.model_report import entries_of, entry_of, shapes_of
from octavo.nn.regional import compile_layers, undo_compile
from octavo.nn.report import FP8, REPORT, ConversionReport, Entry, dtype_name
from octavo.nn.sharded import plain_class
from octavo.nn.undo import Fused, all_or_nothing
from octavo.numerics import FP8ScalingManager, FP8TrainingConfig
from octavo.numerics.checks import check_choice, check_positive_int
from octavo.numerics.config import check_config
from octavo.support import has_fp8_tensor_cores, require_tensor_cores

PRECISIONS = ("fp8", "bf16")
COMPILE = ("layers",)
_RAW = "a raw parameter: under octavo.fp8_autocast its products run in FP8"
_CONVERTED = "_octavo_converted"  # in a converted model: the report that it had before, if any


def convert_to_fp8(
    model: nn.Module,
    config: FP8TrainingConfig | str | None = None,
    *,
    precision: str = "fp8",
    tokens: int | None = None,
    filter: Filter | None = None,
    include: Sequence[str] = (),
    compile: str | None = None,
) -> ConversionReport:
    """Run the linears of `model` in FP8 from now on. Returns what was done, layer by layer; print it.

    `config`: an `FP8TrainingConfig`, or the name of a recipe, such as "block". `precision="bf16"` fuses loss and
    attention and leaves out padding, without FP8: the baseline that FP8 itself has to beat. `tokens`: the number of
    tokens in a step; layers that FP8 would make slower at that size then stay in high precision.

    `filter(name, linear)`: False leaves that linear alone, beside those that `config.skip` names. Adapters (LoRA's A
    and B, and those of PEFT's other methods) are left alone, because products of their rank never pay; `include` names
    those to convert nevertheless, as `skip` does: names, parts of dotted names, or patterns.

    `compile="layers"` compiles the repeated layers, one by one, for any number of tokens. It is for models that have no
    fused pieces; those with fused pieces gain little.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: convert_to_fp8 takes a torch.nn.Module")
    config = check_config(config)
    check_choice("precision", precision, PRECISIONS)
    if compile is not None:
        check_choice("compile", compile, COMPILE)
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
    if precision == "bf16":
        with all_or_nothing(model):
            _attach(report, model)
            fuse.fuse_loss(modules, report, fuse.Trained(None, None))
            _compile(model, report, compile)
        return report
    linears = {
        entry.name: modules[entry.name] for entry in report.in_fp8 if plain_class(modules[entry.name]) is nn.Linear
    }
    choice.check_names()
    if not linears:
        raise ValueError(f"{type(model).__name__} {_why_nothing(modules)}\n{report}")
    _check_head(modules, config)
    for linear in linears.values():
        require_tensor_cores(linear.weight.device, config)

    report.scaling = FP8ScalingManager.from_config(config)
    with all_or_nothing(model):
        _attach(report, model)
        weights = fuse.Trained(config, report.scaling, frozenset(linears))
        fuse.fuse_products(modules, report, weights)
        fuse.fuse_loss(modules, report, weights)
        for name, linear in linears.items():
            if plain_class(linear) is nn.Linear:  # not part of something fused
                FP8Linear.convert_in_place(linear, config, report.scaling, name or "linear")
        report.scaling.to(next(linear.scaling_device for linear in linears.values() if isinstance(linear, FP8Linear)))
        report.scaling.follow_optimizers(model)
        _compile(model, report, compile)
    return report


def _compile(model: nn.Module, report: ConversionReport, what: str | None) -> None:
    if what is not None:
        report.fused.append(f"layers compiled by torch.compile ({compile_layers(model)})")


def _attach(report: ConversionReport, model: nn.Module) -> None:
    """Mark a model as converted, with this report; `restore` gives back the one that it had."""
    model.__dict__[_CONVERTED] = model.__dict__.get(REPORT)
    fuse.attach(report, model)


def _detach_report(module: nn.Module, *, unfused: bool) -> None:
    """Undo `_attach`. The report of a model that was loaded into FP8 stays; its fused pieces do not."""
    if _CONVERTED in module.__dict__:
        ConversionReport.detach_from(module)
        before: ConversionReport | None = module.__dict__.pop(_CONVERTED)
        if before is not None:
            fuse.attach(before, module)
    report: ConversionReport | None = module.__dict__.get(REPORT)
    if report is not None and unfused:
        report.fused[:] = ["nothing fused any more: octavo.restore was called"]


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
    if any(isinstance(module, FP8Linear) and module.arrives_in_fp8 for module in model.modules()):
        raise ValueError(
            f"FSDP2 gathers weights of {type(model).__name__} in FP8, and would go on: call remove() on what "
            "octavo.fp8_all_gather returned first"
        )
    unfused = 0
    for module in model.modules():
        unfused += fuse.restore(module)  # first: an FP8 linear that is a unit of FSDP2 is given a class, too
        if isinstance(module, FP8Linear):
            module.restore_in_place()
        if isinstance(module, Fused):
            module.unfuse()
        undo_compile(module)
    for module in model.modules():
        _detach_report(module, unfused=unfused > 0)


def is_converted(model: nn.Module) -> bool:
    """Whether `convert_to_fp8` has been here, or BDH was fused: on the model, or on a part of it."""
    return any(isinstance(module, FP8Linear | Fused) or _CONVERTED in module.__dict__ for module in model.modules())


def can_convert(model: nn.Module, config: FP8TrainingConfig) -> bool:
    """Whether the model has a linear that `convert_to_fp8` would run in FP8."""
    modules = dict(model.named_modules())
    choice = Choice(modules, config)
    return any(not choice.why_not(name, m) for name, m in modules.items() if isinstance(m, nn.Linear))


def _check_head(modules: dict[str, nn.Module], config: FP8TrainingConfig) -> None:
    """Raise, before anything is changed, if the model cannot have the FP8 head that is asked for."""
    if not config.fp8_head:
        return
    reason = "this model is not one of the Hugging Face decoders whose loss is computed in chunks"
    for module in modules.values():
        if match.is_causal_lm(module):
            reason = match.why_no_loss(module)
            if not reason:
                return
    raise ValueError(f"fp8_head=True: {reason}; leave it off, or take the head out of `skip` to make it an FP8 linear")


def _entries(modules: dict[str, nn.Module], choice: Choice, precision: str, tokens: int | None) -> list[Entry]:
    outputs = match.outputs_of_groups(modules)

    def linear_entry(name: str, linear: nn.Linear) -> Entry:
        if isinstance(linear, LinearInFP8):
            return entry_of(name, linear)
        reason = "precision='bf16'" if precision == "bf16" else choice.why_not(name, linear)
        reason = reason or _why_not_worth_it(linear, choice.config, tokens, outputs.get(name, linear.out_features))
        if reason:
            return Entry(name, "linear", dtype_name(linear.weight), reason, shapes_of(linear))
        return Entry(name, "linear", FP8, "", shapes_of(linear), str(choice.config.recipe))

    return entries_of(modules, linear_entry, _RAW)


def _why_not_worth_it(linear: nn.Linear, config: FP8TrainingConfig, tokens: int | None, outputs: int) -> str:
    """The cost model's verdict, where FP8 is for speed: in emulation nothing pays, it is there for its numerics."""
    if tokens is None or config.emulate is True or not has_fp8_tensor_cores(linear.weight.device):
        return ""
    return cost_model.why_not(tokens, linear.in_features, outputs, tuning_for(linear.weight.device))
