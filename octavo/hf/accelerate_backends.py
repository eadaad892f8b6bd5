"""Accelerate's own FP8 back ends, Transformer Engine and torchao, without the traps of Accelerate 1.15.

Each trap ends in a model that trains otherwise than it was told to, without a word:

- torchao, with Accelerate's default `enable_fsdp_float8_all_gather=True`, puts new Parameters into the model after the
  optimiser was built: outside FSDP2 the converted weights never change. Here it is on under FSDP2 only.
- The conversion to Transformer Engine returns at the first linear whose sizes 16 does not divide, and so skips what
  comes after it in the same module. Such a model is refused.
- A handler passes on only what differs from its own defaults. `most_recent` is the default there, and not in
  Transformer Engine (`max`), which therefore never heard of it. Here it is always passed.
- `accelerate config` writes `amax_history_length`, `amax_compute_algorithm` and `optimization_level` into its YAML;
  what reads them wants `amax_history_len`, `amax_compute_algo` and `opt_level`, and takes its defaults. Refused.
- A GPU without FP8 tensor cores turns `fp8` into `fp16` with a warning. Refused (in `hf/accelerate.py`).
"""

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from torch import nn

from octavo.nn.names import is_skipped
from octavo.numerics import FP8TrainingConfig
from octavo.support import check_fp8_support

PACKAGES = {"te": "transformer_engine", "ao": "torchao"}
_INSTALL = {"te": "pip install 'transformer_engine[pytorch]'", "ao": "pip install 'octavo[optim]'"}
_MULTIPLE = 16  # what an FP8 product on tensor cores asks of its sizes
_PREFIX = "ACCELERATE_FP8_"
_MISNAMED = {
    "AMAX_HISTORY_LENGTH": "amax_history_len",
    "AMAX_COMPUTE_ALGORITHM": "amax_compute_algo",
    "OPTIMIZATION_LEVEL": "opt_level",
}
# Values that `accelerate launch` puts into the environment by default, by field of our configuration.
_LAUNCHER_DEFAULTS = {
    "fp8_format": ("FORMAT", "HYBRID"),
    "amax_history_len": ("AMAX_HISTORY_LEN", "1024"),
    "amax_compute_algo": ("AMAX_COMPUTE_ALGO", "most_recent"),
    "margin": ("MARGIN", "0"),
}


def check_installed(backend: str) -> None:
    package = PACKAGES[backend]
    if find_spec(package) is None:
        raise ImportError(
            f"Octavo FP8: `{package}` is not installed. Install it with {_INSTALL[backend]}, "
            "or use backend='octavo', which needs nothing else"
        )


def check_backend_variable(backend: str) -> None:
    """Raise if the environment names another back end of Accelerate's than the one in use."""
    name = _PREFIX + "BACKEND"
    named = os.environ.get(name, "NO").upper()
    if named in ("NO", backend.upper()) and (backend != "octavo" or named == "NO"):
        return
    if named == "OCTAVO":
        raise ValueError(
            f"{name}={os.environ[name]!r}: Accelerate knows AO, TE and MSAMP only and fails on other names; "
            "unset it (in a YAML: leave `fp8_config` out). ACCELERATE_MIXED_PRECISION=fp8 is enough for Octavo"
        )
    raise ValueError(
        f"{name}={os.environ[name]!r} while FP8 is to run by backend={backend!r}: unset it (in a YAML: `fp8_config`), "
        f"or call octavo.setup_fp8_mixed_precision_training(backend={named.lower()!r})"
    )


def check_yaml_names() -> None:
    """Raise for unknown keys of `fp8_config`: the launcher turns any key into a variable, also if nothing reads it."""
    for wrong, right in _MISNAMED.items():
        if _PREFIX + wrong in os.environ:
            raise ValueError(
                f"{_PREFIX}{wrong}={os.environ[_PREFIX + wrong]!r}: nothing reads it; "
                f"in `fp8_config` of the YAML the key is `{right}`, not `{wrong.lower()}`"
            )


def check_launcher_recipe(config: FP8TrainingConfig) -> None:
    """Raise for a recipe in the launcher's YAML, written for Transformer Engine, that Octavo would not follow."""
    for field, (variable, default) in _LAUNCHER_DEFAULTS.items():
        value = os.environ.get(_PREFIX + variable, default)
        if value != default and value.lower() != str(getattr(config, field)).lower():
            raise ValueError(
                f"{_PREFIX}{variable}={value!r} while Octavo's config has {field}={getattr(config, field)!r}: "
                f"take it out of `fp8_config`, and pass config=FP8TrainingConfig({field}=...) to Octavo"
            )


def handler_for(backend: str, config: FP8TrainingConfig | None) -> Any:
    """The kwargs handler that makes an `Accelerator` use this back end."""
    return transformer_engine_handler(config) if backend == "te" else torchao_handler(config, fsdp2=False)


def transformer_engine_handler(config: FP8TrainingConfig | None) -> Any:
    """The handler for Transformer Engine. Without a configuration it follows the environment: the launcher's YAML."""
    from accelerate.utils import TERecipeKwargs

    handler = TERecipeKwargs(**({} if config is None else transformer_engine_fields(config)))
    original, algorithm = handler.to_kwargs, handler.amax_compute_algo
    block = handler.use_mxfp8_block_scaling

    def to_kwargs() -> dict[str, Any]:
        return original() if block else {"amax_compute_algo": algorithm, **original()}

    # On this object: Accelerate looks handlers up by their exact class, so a subclass is not found.
    handler.__dict__["to_kwargs"] = to_kwargs
    handler.__dict__["to_dict"] = lambda: {k: v for k, v in handler.__dict__.items() if not callable(v)}
    return handler


def transformer_engine_fields(config: FP8TrainingConfig) -> dict[str, Any]:
    """A configuration in Transformer Engine's words, for what Accelerate can tell it."""
    mx = config.granularity == "mx"
    if not mx and config.scaling != "delayed":
        _refuse("te", "granularity", config, "delayed scaling per tensor, or granularity='mx'")
    if config.amax_compute_algo == "ema":
        _refuse("te", "amax_compute_algo", config, "max or most_recent")
    if not isinstance(config.margin, int):
        _refuse("te", "margin", config, "one whole number")
    _refuse_others("te", config, ("skip", "rounding", "percentile", "fp8_dpa", "fp8_head", "emulate"))
    if mx:
        return {"fp8_format": config.fp8_format, "margin": config.margin, "use_mxfp8_block_scaling": True}
    return {
        "fp8_format": config.fp8_format,
        "margin": config.margin,
        "interval": config.amax_update_interval,
        "amax_history_len": config.amax_history_len,
        "amax_compute_algo": config.amax_compute_algo,
    }


def torchao_handler(config: FP8TrainingConfig | None, *, fsdp2: bool) -> Any:
    from accelerate.utils import AORecipeKwargs

    return AORecipeKwargs(config=torchao_config(config, fsdp2=fsdp2), module_filter_func=_torchao_filter(config))


def torchao_config(config: FP8TrainingConfig | None, *, fsdp2: bool) -> Any:
    """torchao's configuration, per tensor (`current`) or per row (`channel`): it has no delayed scaling."""
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig

    emulate = not check_fp8_support()
    if config is None:
        return Float8LinearConfig(pad_inner_dim=True, enable_fsdp_float8_all_gather=fsdp2, emulate=emulate)
    if config.scaling != "current" or config.granularity not in ("tensor", "channel"):
        what = "scaling" if config.scaling != "current" else "granularity"
        _refuse("ao", what, config, "FP8TrainingConfig.from_recipe('current') or ('channel')")
    if config.emulate is False and emulate:
        raise RuntimeError(f"emulate=False: {check_fp8_support()}")
    _refuse_others("ao", config, ("rounding", "percentile", "margin", "fp8_dpa", "fp8_head"))
    emulate = emulate or config.emulate is True
    if config.granularity == "channel":
        return replace(Float8LinearConfig.from_recipe_name("rowwise"), pad_inner_dim=True, emulate=emulate)
    return Float8LinearConfig(pad_inner_dim=True, enable_fsdp_float8_all_gather=fsdp2, emulate=emulate)


def _torchao_filter(config: FP8TrainingConfig | None) -> Callable[[nn.Module, str], bool] | None:
    """The filter of linears for torchao. Without a configuration Accelerate's own: not the first, not the last."""
    if config is None:
        return None

    def is_converted(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and not _is_odd(module) and not is_skipped(name, config)

    return is_converted


def check_transformer_engine_reaches(model: nn.Module) -> None:
    """Refuse a model of which Accelerate's conversion would skip layers without a word."""
    for name, module in model.named_modules():
        children = list(module.named_children())
        for i, (child, linear) in enumerate(children):
            if not isinstance(linear, nn.Linear) or not _is_odd(linear):
                continue
            skipped = [later for later, m in children[i + 1 :] if any(isinstance(x, nn.Linear) for x in m.modules())]
            if skipped:
                raise ValueError(
                    f"{f'{name}.{child}' if name else child} is {linear.in_features} → {linear.out_features}, which 16 "
                    f"does not divide: Accelerate's conversion to Transformer Engine would stop there and leave "
                    f"{', '.join(skipped)} in BF16; pad it to a multiple of 16, or use backend='octavo'"
                )
            break


def _is_odd(linear: nn.Linear) -> bool:
    return bool(linear.in_features % _MULTIPLE or linear.out_features % _MULTIPLE)


def _refuse(backend: str, field: str, config: FP8TrainingConfig, allowed: str) -> None:
    raise ValueError(
        f"{field}={getattr(config, field)!r} with backend={backend!r}: it takes {allowed}; or use backend='octavo'"
    )


def _refuse_others(backend: str, config: FP8TrainingConfig, fields: tuple[str, ...]) -> None:
    """Raise for fields that the back end has no words for, unless they are as by default."""
    defaults: Mapping[str, Any] = FP8TrainingConfig().to_dict()
    values = config.to_dict()
    for field in fields:
        if values[field] != defaults[field]:
            _refuse(backend, field, config, f"only {field}={defaults[field]!r}")
