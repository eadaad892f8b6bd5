"""Loading straight into FP8 by transformers' own quantiser interface.

    from octavo.hf.quantizer import OctavoConfig                       # also octavo.OctavoConfig
    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=OctavoConfig("block"))

Every linear but the head becomes an `FP8FrozenLinear`. A weight in high precision is quantised as it is read, one at a
time, so memory stays near one byte a parameter. A checkpoint that is in FP8 already goes into the layers as it is:

    quant_method: fp8                   `weight_block_size: [128, 128]` (block), or none (tensor)
    quant_method: compressed-tensors    FP8 weights per `channel`, `tensor`, or `block` of 128×128

The base is frozen: adapters train beside it. transformers itself refuses to train a model that is nothing but
quantised; whoever trains without its Trainer meets `FP8FrozenLinear`'s own refusal.
"""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightRenaming
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_enabled
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AutoHfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from octavo.decoders.choice import check_products, choose_products, set_products
from octavo.decoders.fuse import attach, fuse_all
from octavo.hf.fp8_files import METHOD, fp8_dtype_in, names_in, read_layout
from octavo.hf.untrained import explain_untrained
from octavo.nn.frozen import FROZEN_GRANULARITIES, SCALE_NAME, FP8FrozenLinear, activation_config, quantize_weight
from octavo.nn.model_report import report_of
from octavo.nn.names import matches
from octavo.nn.sharded import own_gpu
from octavo.numerics import FP8ScalingManager, FP8TrainingConfig
from octavo.numerics.checks import check_choice
from octavo.numerics.config import check_config
from octavo.support import announce_emulation, emulation_on, has_fp8_tensor_cores, require_tensor_cores

logger = logging.get_logger(__name__)


@register_quantization_config(METHOD)
class OctavoConfig(QuantizationConfigMixin):
    """Configuration of a model that is loaded into FP8.

    Fields:
        granularity: one scale per `channel` (row: the fastest), per `block` of 128×128, or per `tensor` of each weight.
        fp8: how inputs and gradients are quantised, an `FP8TrainingConfig` or its fields; default: as the weight.
        skip: linears left as they are: names, parts of dotted names, or patterns. The head always is.
        fp8_products: with False the weights alone are in FP8, dequantised for each product: closer to high precision,
            slower for all but small models, and with more activations; with "dgrad", in forward alone. Default: as a
            checkpoint of Octavo says, else True, but on a GPU, and unless `fp8` has products quantised in another way
            than by default, only where that pays.
    """

    def __init__(
        self,
        granularity: str = "channel",
        fp8: FP8TrainingConfig | Mapping[str, Any] | str | None = None,
        skip: Sequence[str] = (),
        fp8_products: bool | str | None = None,
        **kwargs: Any,
    ) -> None:
        check_products(fp8_products)
        if fp8_products is False and fp8 is not None:
            raise ValueError("fp8 with fp8_products=False: it says how products are quantised; leave one of them out")
        check_choice("granularity", granularity, FROZEN_GRANULARITIES)
        unknown = sorted(set(kwargs) - {"quant_method", "checkpoint"})
        if unknown:
            raise ValueError(f"{unknown[0]}={kwargs[unknown[0]]!r}: no such field of OctavoConfig")
        if isinstance(fp8, Mapping):
            fp8 = FP8TrainingConfig.from_dict(fp8)
        fp8 = None if fp8 is None else check_config(fp8)
        self.quant_method: Any = METHOD
        self.granularity = granularity
        self.fp8 = fp8 or activation_config(granularity)
        self._fp8_is_given = fp8 is not None
        self.skip = (skip,) if isinstance(skip, str) else tuple(skip)
        self.fp8_products = fp8_products
        # None for weights in high precision on disk, else the place of their scales.
        self.checkpoint: str | None = kwargs.get("checkpoint")

    def to_dict(self) -> dict[str, Any]:
        return {
            "quant_method": self.quant_method,
            "granularity": self.granularity,
            "fp8": None if self.fp8_products is False else self.fp8.to_dict(),
            "skip": list(self.skip),
            "fp8_products": self.fp8_products,
            "checkpoint": SCALE_NAME,
        }

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()

    def read(self, stored: Mapping[str, Any]) -> "OctavoConfig":
        """This configuration for a checkpoint in FP8, by the `quantization_config` of its config.json.

        Other settings are as they were saved: how inputs and gradients are quantised, and whether they are.
        """
        granularity, scales, left = read_layout(stored)
        products = self.fp8_products
        if products is None and not self._fp8_is_given:  # what is asked for now comes before what it was saved with
            products = stored.get("fp8_products")
        fp8 = self.fp8 if self._fp8_is_given else None if products is False else stored.get("fp8")
        return OctavoConfig(granularity, fp8, (*self.skip, *left), products, checkpoint=scales)


@register_quantizer(METHOD)
class OctavoQuantizer(HfQuantizer):
    """Replaces linears before loading, quantises on the way, freezes afterwards."""

    requires_calibration = False
    quantization_config: OctavoConfig

    def update_device_map(self, device_map: Any) -> Any:
        """Load onto this process's GPU, where weights are quantised, unless told otherwise, or an engine will shard."""
        if device_map is None and torch.cuda.is_available() and not (is_fsdp_enabled() or is_deepspeed_zero3_enabled()):
            return {"": own_gpu()}
        return device_map

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        config = self.quantization_config
        skip = (*config.skip, *config.fp8.skip)
        left = [*self.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules), *skip]
        scaling = FP8ScalingManager.from_config(config.fp8)
        names = [name for name, _ in model.named_modules()]
        linears = {
            name: module
            for name, module in model.named_modules()
            if type(module) is nn.Linear
            and not any(_is_left(name, pattern) for pattern in left)
            and not self._is_head(model, name, kwargs.get("checkpoint_files") or ())
        }
        for pattern in () if config.checkpoint else skip:
            if pattern not in FP8TrainingConfig.skip and not any(_is_left(name, pattern) for name in names):
                raise ValueError(f"skip={pattern!r}: {type(model).__name__} has no module of that name or pattern")
        if not linears:
            raise ValueError(f"skip={list(config.skip)}: it leaves {type(model).__name__} no linear to load into FP8")
        files = kwargs.get("checkpoint_files") or ()
        dtypes = (fp8_dtype_in(files), torch.float32) if config.checkpoint else (None, None)
        for name, linear in linears.items():
            parent, attribute = get_module_from_name(model, name)
            setattr(parent, attribute, _empty(linear, config, scaling, name, *dtypes))

    def _is_head(self, model: Any, name: str, files: Sequence[str]) -> bool:
        """Whether a linear is a head, such as a classifier, and stays as it is: not if the checkpoint has it in FP8."""
        body = f"{model.base_model_prefix}."
        if name.startswith(body) or not hasattr(model, model.base_model_prefix):
            return False
        scale = self.quantization_config.checkpoint
        return scale is None or f"{name}.{scale}" not in names_in(files)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        new = {name for name, parameter in model.named_parameters() if not _was_read(parameter)}
        _give_back_what_is_new(model, new)
        frozen = [module for module in model.modules() if isinstance(module, FP8FrozenLinear)]
        config = self.quantization_config
        if not frozen:
            raise ValueError(
                f"the checkpoint has no weight for any linear of {type(model).__name__}: its names are those of "
                "another model"
            )
        for module in frozen:
            module.finish_loading()
        set_products(frozen, True if config.fp8_products is None else config.fp8_products)
        usual = config.fp8.replace(fp8_head=False) == activation_config(config.granularity)
        as_it_pays = config.fp8_products is None and usual
        on_gpu = has_fp8_tensor_cores(frozen[0].weight.device)
        reason = choose_products(model) if as_it_pays and on_gpu else ""
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in new)  # what the checkpoint lacks has yet to be trained
        _install_lora()
        scaling = frozen[0].scaling
        scaling.to(frozen[0].scaling_device)
        scaling.follow_optimizers(model)
        explain_untrained(model)
        report = report_of(model, reasons=self._reasons(model, new))
        attach(report, model)
        fuse_all(model, report)
        if any(module.fp8_products for module in frozen):
            device, emulate = frozen[0].scaling_device, config.fp8.emulate
            require_tensor_cores(device, config.fp8)
            announce_emulation(device, emulate)
            report.fused += filter(None, [emulation_on(device, emulate)])
        if reason:
            report.fused.append(f"{reason}; fp8_products=True insists")
        if report.left_out():
            logger.warning(f"octavo: {report.left_out()}")
        self.quantization_config.checkpoint = SCALE_NAME  # what it would be if it were saved
        return model

    def _reasons(self, model: Any, new: set[str]) -> dict[str, str]:
        """The reasons why linears were left as they are, by name."""
        config = self.quantization_config
        reasons: dict[str, str] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                named = any(_is_left(name, pattern) for pattern in (*config.skip, *config.fp8.skip))
                kind = f"a {type(module).__name__}, which Octavo does not know"
                reasons[name] = (
                    "new: the checkpoint has no weight for it" if f"{name}.weight" in new
                    else "left alone: skip names it" if named and module is not model.get_output_embeddings()
                    else "the head stays in high precision" if type(module) is nn.Linear
                    else kind
                )  # fmt: skip
        return reasons

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled configuration, in a process that may not have loaded a model yet."""
        self.__dict__.update(state)
        _install_lora()

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        if self.quantization_config.checkpoint:
            return False
        module, name = get_module_from_name(model, param_name)
        return isinstance(module, FP8FrozenLinear) and name == "weight"

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        return 1 if self.param_needs_quantization(model, param_name) else super().param_element_size(
            model, param_name, param
        )  # fmt: skip

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self.quantization_config.granularity)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """Rename scales on the way in, where they are called otherwise. (`model` came with transformers 5.21.)"""
        name = self.quantization_config.checkpoint
        if name in (None, SCALE_NAME):
            return weight_conversions
        # Scales are called otherwise elsewhere.
        rename = WeightRenaming(source_patterns=rf"^(.+)\.{name}$", target_patterns=rf"\1.{SCALE_NAME}")
        return [rename, *weight_conversions]

    def update_tp_plan(self, config: Any) -> Any:
        """Have tensor parallelism refused where it is asked for: the plan is read then alone."""
        plan = getattr(config, "base_model_tp_plan", None) or {}
        config.base_model_tp_plan = {**plan, **{f"{name}.{SCALE_NAME}": _REFUSED for name in plan}}
        return config

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # with adapters

    @property
    def is_compileable(self) -> bool:
        return True


_REFUSED = "octavo_refused"  # the style of scales in a plan of tensor parallelism


class _Refused(TensorParallelLayer):
    """The style of a weight that tensor parallelism cannot shard."""

    def validate_param(self, module: Any, param: str, mesh: Any, parameter_name: str | None = None) -> None:
        raise ValueError(
            f"tp_plan with OctavoConfig: {parameter_name or param} belongs to a weight that is frozen in FP8, and "
            "adapters beside it would have to be sharded with it. Load without quantization_config and call "
            "octavo.convert_to_fp8, to train all weights under tp_plan; or leave tp_plan out, and shard the frozen "
            "base by FSDP2 (fully_shard), to train adapters"
        )


_styles: Any = ALL_PARALLEL_STYLES
_styles.register(_REFUSED, _Refused())


def _install_lora() -> None:
    if importlib.util.find_spec("peft") is not None:
        from octavo.hf import lora

        lora.install()


def _was_read(parameter: Tensor) -> bool:
    """Whether a Parameter was read, or is tied to one that was: transformers marks it, and initialises the rest."""
    return getattr(parameter, "_is_hf_initialized", False)


def _give_back_what_is_new(model: Any, new: set[str]) -> None:
    """Make plain linears again of those without a weight in the checkpoint: nothing untrained is frozen."""
    for name, module in list(model.named_modules()):
        if isinstance(module, FP8FrozenLinear) and f"{name}.weight" in new:
            linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            linear.weight, linear.bias = module.weight, module.bias
            parent, attribute = get_module_from_name(model, name)
            setattr(parent, attribute, linear.train(module.training))


def _is_left(name: str, pattern: str) -> bool:
    """Whether a pattern names this module or one around it; `re:` starts a regular expression in checkpoints."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return matches(name, pattern) or name.startswith(f"{pattern}.")


class _Quantize(ConversionOps):
    """Quantises one weight as it is read, on the device it was read to."""

    def __init__(self, granularity: str) -> None:
        self.granularity = granularity

    def convert(self, input_dict: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            data, scale = quantize_weight(weight, self.granularity)
            result |= {key: data, f"{key.removesuffix('weight')}{SCALE_NAME}": scale}
        return result


def _empty(
    linear: nn.Linear,
    config: OctavoConfig,
    scaling: FP8ScalingManager,
    name: str,
    dtype: torch.dtype | None,
    scale_dtype: torch.dtype | None,
) -> FP8FrozenLinear:
    """A frozen linear whose weight is still to be read, on the meta device, in the dtype in which it will be."""
    with torch.device("meta"):
        frozen = FP8FrozenLinear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            granularity=config.granularity,
            config=config.fp8,
            scaling=scaling,
            name=name,
            dtype=linear.weight.dtype,
        )
        if dtype is not None:
            frozen.weight = nn.Parameter(frozen.weight.to(dtype), requires_grad=False)
        scale = torch.empty((), dtype=scale_dtype or torch.float32)
        setattr(frozen, SCALE_NAME, nn.Parameter(scale, requires_grad=False))
    return frozen


_merge = AutoHfQuantizer.merge_quantization_configs


def _merge_with_octavo(cls: Any, quantization_config: Any, quantization_config_from_args: Any) -> Any:
    """Keep an OctavoConfig where the checkpoint names another method, which transformers would prefer."""
    if not isinstance(quantization_config_from_args, OctavoConfig):
        return _merge(quantization_config, quantization_config_from_args)
    stored = quantization_config if isinstance(quantization_config, Mapping) else quantization_config.to_dict()
    return quantization_config_from_args.read(stored)


_door: Any = AutoHfQuantizer
_door.merge_quantization_configs = classmethod(_merge_with_octavo)
