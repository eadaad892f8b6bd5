"""FP8 in Accelerate, and so in the stock Trainer and TRL's trainers.

    octavo.setup_fp8_mixed_precision_training()        # every Accelerator built from now on trains in FP8
    octavo.watch_environment()                         # ... or only if ACCELERATE_MIXED_PRECISION=fp8 says so

An `Accelerator` built while this is on converts the models it prepares with `octavo.convert_to_fp8` and runs the rest
under Accelerate's BF16 autocast. Conversion keeps every Parameter, so the optimiser may be built before or after it.
`accelerator.fp8_reports` has a report for each model, and its first line is printed. `accelerator.save_state` saves the
scales, too; a state saved without FP8 loads as well, and scales then start afresh. LoRA's matrices stay in BF16.

How it gets in. Accelerate's list of FP8 back ends is closed, and trainers build the `Accelerator` themselves. So
`Accelerator.__init__` is wrapped, and an Accelerator that is to train in FP8 becomes an instance of a subclass whose
`prepare` converts. `prepare` and `prepare_model` of the class are wrapped, too, to refuse models for an Accelerator
that was built too early. `.disable()` takes all three away again. Nothing is wrapped before one of the two functions
above is called.

Facts about the variable (read and run: transformers 5.17.0 and 5.22.2, TRL 1.16.0, Accelerate 1.15.0):

- `TrainingArguments` reads ACCELERATE_MIXED_PRECISION when it is built, into `args.mixed_precision`; later changes do
  not count. It does not write the variable. Both versions do the same.
- `fp16=True`, else `bf16=True`, overrides what was read. `bf16=False` and `bf16=None` leave it.
- TRL's configs default to `bf16=None` and turn it into `bf16 = not fp16` first: not given means `bf16=True`, and the
  variable is overridden. Only `bf16=False` lets `fp8` through.
- The Trainer passes `mixed_precision=args.mixed_precision`, "no" included, to `Accelerator`, where an argument beats
  the variable. So "no" may mean that nobody has chosen, or that the variable came too late.
- Stock Accelerate turns `fp8` into torchao if it is installed, else Transformer Engine, else an ImportError.
- ACCELERATE_FP8_BACKEND is read whenever an Accelerator is built or prepares, also in BF16; a name other than AO, TE,
  MSAMP or NO is a ValueError there.
- `accelerate launch` with `mixed_precision: fp8` wants torchao, Transformer Engine or MS-AMP to be installed, whichever
  back end is used in the end, and exports a default for every FP8 option.
- With several GPUs and no launcher the Trainer wraps the model in DataParallel and does not prepare it: its first
  backward is refused here.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import AORecipeKwargs, DistributedType, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from torch import Tensor, nn

from octavo.convert import COMPILE, ConversionReport, convert_to_fp8, is_converted
from octavo.decoders.choice import insist_on_fp8
from octavo.decoders.classes import HEAD
from octavo.hf import accelerate_backends as backends
from octavo.hf.accelerate_state import save_with_state
from octavo.nn.linear import LinearInFP8
from octavo.nn.model_report import report_of
from octavo.nn.undo import all_or_nothing
from octavo.numerics import FP8TrainingConfig
from octavo.numerics.checks import check_choice
from octavo.numerics.config import check_config
from octavo.support import check_fp8_support

VARIABLE = "ACCELERATE_MIXED_PRECISION"
BACKENDS = ("octavo", "te", "ao")
_RECIPE_HANDLERS = (AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs, FP8RecipeKwargs)


class FP8MixedPrecision:
    """A switch that is on until `.disable()` or the end of its `with` block. Accelerators built meanwhile keep FP8."""

    def __init__(
        self,
        backend: str,
        config: FP8TrainingConfig | None,
        *,
        tokens: int | None = None,
        compile: str | None = None,
        watches: bool = False,
    ) -> None:
        self.backend = backend
        self.config = config
        self.tokens = tokens
        self.compile = compile
        self.watches = watches

    @property
    def enabled(self) -> bool:
        return self in _on.values()

    def disable(self) -> None:
        """Leave Accelerate as it was found. Models stay converted; `octavo.restore(model)` undoes that."""
        for slot in [slot for slot, mode in _on.items() if mode is self]:
            del _on[slot]
        if not _on:
            _unwrap()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()

    def applies_to(self, asked: str | None) -> bool:
        """Whether an Accelerator given `mixed_precision=asked` is to train in FP8. Contradictions raise."""
        variable = os.environ.get(VARIABLE, "no").lower()
        if self.watches and "fp8" not in (asked, variable):
            return False
        if (asked or variable) == "fp16":
            raise ValueError(
                f"mixed_precision='fp16' (fp16=True in TrainingArguments, or {VARIABLE}=fp16) while FP8 is on: what is "
                "not in FP8 runs in BF16; pass fp16=False and bf16=False"
            )
        if asked == "bf16" and variable == "fp8":
            raise ValueError(
                f"mixed_precision='bf16' overrides {VARIABLE}=fp8: pass bf16=False to TrainingArguments (TRL's configs "
                "set bf16=True when it is not given), or unset the variable to train in BF16"
            )
        if asked == "no" and self.watches:
            raise ValueError(
                f"mixed_precision='no' overrides {VARIABLE}=fp8: TrainingArguments reads the variable when built, so "
                "set it before that; or leave mixed_precision='no' out of Accelerator(...)"
            )
        return True


_on: dict[str, FP8MixedPrecision] = {}  # "chosen" beats "watched"
_originals: dict[str, Callable[..., Any]] = {}


def setup_fp8_mixed_precision_training(
    backend: str = "octavo",
    config: FP8TrainingConfig | str | None = None,
    *,
    tokens: int | None = None,
    compile: str | None = None,
) -> FP8MixedPrecision:
    """Train in FP8 with every `Accelerator` built from now on, also by the Trainer or a trainer of TRL's.

    `backend`: `octavo`, or one of Accelerate's own: `te` (Transformer Engine) or `ao` (torchao). `config` is the
    recipe; `tokens` and `compile` are passed to `convert_to_fp8`. Calling it again replaces what was set up before.
    """
    check_choice("backend", backend, BACKENDS)
    if compile is not None:
        check_choice("compile", compile, COMPILE)
    config = None if config is None else check_config(config)
    if backend != "octavo":
        for name, value in (("tokens", tokens), ("compile", compile)):
            if value is not None:
                raise ValueError(f"{name}={value!r} with backend={backend!r}: only Octavo takes it; leave it out")
        backends.check_installed(backend)
        backends.check_yaml_names()
        backends.handler_for(backend, config)  # what the back end cannot do is refused here
    backends.check_backend_variable(backend)
    return _turn_on("chosen", FP8MixedPrecision(backend, config, tokens=tokens, compile=compile))


def watch_environment(config: FP8TrainingConfig | str | None = None) -> FP8MixedPrecision:
    """Let ACCELERATE_MIXED_PRECISION=fp8 mean Octavo, whenever it is set. Without the variable nothing changes."""
    config = None if config is None else check_config(config)
    watching = _on.get("watched")
    if watching is not None:
        watching.config = config or watching.config
        return watching
    return _turn_on("watched", FP8MixedPrecision("octavo", config, watches=True))


def _turn_on(slot: str, mode: FP8MixedPrecision) -> FP8MixedPrecision:
    _on[slot] = mode
    for name, wrapper in (("__init__", _wrapped_init), ("prepare", _refusing), ("prepare_model", _refusing)):
        if name not in _originals:
            _originals[name] = Accelerator.__dict__[name]
            setattr(Accelerator, name, wrapper(_originals[name]))
    return mode


def _unwrap() -> None:
    for name, original in list(_originals.items()):
        # Where someone has wrapped ours, it stays, and does nothing.
        if getattr(Accelerator.__dict__[name], "__wrapped__", None) is original:
            setattr(Accelerator, name, original)
            del _originals[name]


def _mode() -> FP8MixedPrecision | None:
    return _on.get("chosen") or _on.get("watched")


def _wrapped_init(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @wraps(original)
    def init(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        mode = _mode()
        given = signature.bind(self, *args, **kwargs)
        asked = given.arguments.get("mixed_precision")
        if mode is None or not mode.applies_to(None if asked is None else str(asked)):
            original(self, *args, **kwargs)
            return
        precision = "bf16" if mode.backend == "octavo" else "fp8"
        _check_state(precision)
        given.arguments["mixed_precision"] = precision
        given.arguments["kwargs_handlers"] = _handlers(mode, given.arguments.get("kwargs_handlers") or [])
        original(*given.args, **given.kwargs)
        _join(self, mode)

    return init


def _handlers(mode: FP8MixedPrecision, given: Sequence[Any]) -> list[Any]:
    """The handlers that an Accelerator was given, and the back end's. Settings for another back end raise."""
    for handler in given:
        if isinstance(handler, _RECIPE_HANDLERS):
            raise ValueError(
                f"kwargs_handlers has a {type(handler).__name__} while FP8 is on with backend={mode.backend!r}: take "
                "it out, and give setup_fp8_mixed_precision_training the backend and its config"
            )
    backends.check_backend_variable(mode.backend)
    if mode.backend == "octavo":
        backends.check_launcher_recipe(check_config(mode.config))
        return list(given)
    return [*given, backends.handler_for(mode.backend, mode.config)]


def _check_state(precision: str) -> None:
    """Raise if the process has another precision: Accelerate has one, which the first Accelerator sets."""
    state = AcceleratorState._shared_state
    fixed = state.get("_mixed_precision")
    if fixed not in (None, precision) and state["distributed_type"] != DistributedType.DEEPSPEED:
        raise ValueError(
            f"mixed_precision={fixed!r} was fixed by an earlier Accelerator of this process, and FP8 needs "
            f"{precision!r}: turn FP8 on before the first one, or call AcceleratorState._reset_state() in between"
        )


def _join(accelerator: Accelerator, mode: FP8MixedPrecision) -> None:
    """Make a new Accelerator one that prepares in FP8."""
    _check_ranks(accelerator.num_processes)
    if mode.backend != "octavo":
        if accelerator.mixed_precision != "fp8":
            raise RuntimeError(
                f"Accelerate fell back to {accelerator.mixed_precision}: {check_fp8_support()}; or use backend='octavo'"
            )
        if mode.backend == "ao" and accelerator.is_fsdp2:
            accelerator.ao_recipe_handler = backends.torchao_handler(mode.config, fsdp2=True)
        accelerator.print(f"Octavo FP8: left to Accelerate and {backends.PACKAGES[mode.backend]}")
    accelerator.__class__ = _fp8_class(accelerator.__class__)
    accelerator.fp8_mode = mode
    accelerator.fp8_reports = []
    accelerator._fp8_models = WeakSet()


def _check_ranks(found: int) -> None:
    """Raise where a launcher has started ranks that Accelerate does not join: each would train a copy of its own."""
    started = int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1
    if started > 1 and found == 1:
        raise ValueError(
            f"WORLD_SIZE={started}, but this Accelerator is alone, as on a machine without GPUs: each process would "
            "train a copy of its own. Set ACCELERATE_USE_CPU=1 for ranks on CPUs, or start one process"
        )


@cache
def _fp8_class(cls: type) -> type:
    return type(cls.__name__, (_PreparesInFP8, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


if TYPE_CHECKING:

    class _Before(Accelerator): ...
else:
    _Before = object  # the class that the Accelerator has comes next


class _PreparesInFP8(_Before):
    """The methods of an `Accelerator` that differ when it trains in FP8."""

    fp8_mode: FP8MixedPrecision
    fp8_reports: list[ConversionReport]
    _fp8_models: WeakSet[nn.Module]
    _models: list[nn.Module]
    print: Callable[..., None]

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        self._bring_to_fp8(args)
        return super().prepare(*args, **kwargs)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._bring_to_fp8([model])
        return super().prepare_model(model, *args, **kwargs)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        if not self._models:
            raise RuntimeError(
                "FP8 is on, but this Accelerator has prepared no model: pass the model to accelerator.prepare(). (The "
                "Trainer does not, with several GPUs and no launcher: use `accelerate launch`, or one visible GPU)"
            )
        super().backward(loss, **kwargs)

    def _bring_to_fp8(self, objects: Iterable[Any]) -> None:
        """Convert models before anything else: autocast and wrappers take a model as it is when they meet it."""
        backends.check_backend_variable(self.fp8_mode.backend)
        models = [obj for obj in objects if isinstance(obj, nn.Module) and obj not in self._fp8_models]
        reports: list[ConversionReport] = []
        with all_or_nothing(*models):  # one that is refused leaves the others as they were, too
            for model in models:
                if self.fp8_mode.backend == "octavo":
                    reports.append(_converted(model, self.fp8_mode))
                    _check_head(model)
                elif self.fp8_mode.backend == "te":
                    backends.check_transformer_engine_reaches(model)
        for model, report in zip(models, reports, strict=False):
            self.print(f"Octavo FP8: {report.summary()}")
            self.fp8_reports.append(report)
            save_with_state(self, model, f"fp8_scaling_{len(self.fp8_reports) - 1}.pt")
        for model in models:
            self._fp8_models.add(model)


def _converted(model: nn.Module, mode: FP8MixedPrecision) -> ConversionReport:
    """Convert a model that is not converted yet."""
    if _is_in_fp8(model):
        insist_on_fp8(model)
        return _report_of(model)
    if getattr(model, "_is_accelerate_prepared", False):
        raise ValueError(
            f"{type(model).__name__} was prepared by an Accelerator without FP8: turn FP8 on before it is prepared"
        )
    return convert_to_fp8(model, mode.config, tokens=mode.tokens, compile=mode.compile)


def _is_in_fp8(model: nn.Module) -> bool:
    """Whether the model is converted, or loaded with its weights frozen in FP8."""
    return is_converted(model) or any(isinstance(module, LinearInFP8) for module in model.modules())


def _multiplies_in_fp8(model: nn.Module) -> bool:
    """Whether all products run in FP8: not in a model that was loaded with `fp8_products=False`."""
    linears = [module for module in model.modules() if isinstance(module, LinearInFP8)]
    return _is_in_fp8(model) and all(linear.fp8_products for linear in linears)


def _report_of(model: nn.Module) -> ConversionReport:
    """The report of an earlier conversion, as far as the model shows it."""
    report = report_of(model, title=f"layers of {type(model).__name__}, converted before")
    if not report.in_fp8 and any(isinstance(module, LinearInFP8) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} was loaded with fp8_products=False, and FP8 is on: load it without that, or turn "
            "FP8 off"
        )
    if not report.in_fp8:
        raise ValueError(
            f"{type(model).__name__} was converted with precision='bf16', and FP8 is on: call octavo.restore(model), "
            "or turn FP8 off"
        )
    return report


def _check_head(model: nn.Module) -> None:
    """Raise if an FP8 head would not be used: TRL's trainers replace `forward`, and multiply the head themselves."""
    for module in model.modules():
        head, _ = module.__dict__.get(HEAD, (None, None))
        if head is not None and "forward" in module.__dict__ and not getattr(model, "_is_accelerate_prepared", False):
            raise ValueError(
                f"fp8_head=True: the forward of this {type(module).__name__} was replaced by another (TRL's trainers "
                "do that), which does not use the FP8 head; leave fp8_head off"
            )


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `prepare` of an Accelerator, to raise for one that was built too early to know of FP8."""

    @wraps(original)
    def method(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        mode = _mode()
        if mode is not None and not isinstance(self, _PreparesInFP8):
            models = [obj for obj in (*args, *kwargs.values()) if isinstance(obj, nn.Module)]
            asked = not mode.watches or os.environ.get(VARIABLE, "no").lower() == "fp8"
            for model in models if asked else ():
                insist_on_fp8(model)
            if asked and not all(_multiplies_in_fp8(model) for model in models):
                when = (
                    f"{VARIABLE} was set to fp8" if mode.watches else "setup_fp8_mixed_precision_training() was called"
                )
                raise ValueError(
                    f"this Accelerator was built before {when}, and would train without FP8: do that first, then build "
                    "the TrainingArguments and the Accelerator or Trainer"
                )
        return original(self, *args, **kwargs)

    return method
