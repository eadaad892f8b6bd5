"""PEFT's LoRA on linears frozen in FP8: the fused product, and merging that can be undone to the byte.

`install` tells PEFT about `FP8FrozenLinear`, once, when the first such model is loaded: `peft.get_peft_model` and
`PeftModel.from_pretrained` then wrap it with `FP8LoraLinear`, with no word from the user. (PEFT has a registry for
that, but keeps it in each `LoraConfig`, and forgets it when an adapter is saved.)
"""

from collections.abc import Sequence
from functools import cache, wraps
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraModel
from peft.tuners.lora import layer as peft_layer
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from octavo.decoders.gathering import around
from octavo.decoders.hooks import is_hooked
from octavo.decoders.match import added_adapters
from octavo.nn.frozen import FP8FrozenLinear, quantize_weight
from octavo.nn.linear_function import linear
from octavo.numerics.quantize import Quantized
from octavo.ops.adapters import Adapter, Adapters

logger = logging.get_logger(__name__)


@cache
def install() -> None:
    create: Any = LoraModel._create_new_module

    @wraps(create)
    def create_new_module(lora_config: Any, adapter_name: str, target: nn.Module, **kwargs: Any) -> nn.Module:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if not isinstance(base, FP8FrozenLinear):
            return create(lora_config, adapter_name, target, **kwargs)
        kwargs.pop("device_map", None)
        return FP8LoraLinear(target, adapter_name, config=lora_config, **kwargs)

    model: Any = LoraModel
    model._create_new_module = staticmethod(create_new_module)
    inject: Any = BaseTuner.inject_adapter

    @wraps(inject)
    def inject_adapter(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not LoraModel and any(isinstance(module, FP8FrozenLinear) for module in model.modules()):
            raise ValueError(
                f"{type(self).__name__}: PEFT would take the weights' FP8 bytes for their values; beside a base in FP8 "
                "use LoRA, or load the model without load_in_fp8"
            )
        return inject(self, model, *args, **kwargs)

    tuner: Any = BaseTuner
    tuner.inject_adapter = inject_adapter


class FP8LoraLinear(peft_layer.Linear):
    """`peft.tuners.lora.Linear` over an `FP8FrozenLinear`."""

    base_layer: FP8FrozenLinear
    _before_merging: Quantized | None

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> None:
        for option in ("use_dora", "lora_bias", "arrow_config", "use_bdlora", "alora_invocation_tokens"):
            if getattr(config, option, None):
                raise ValueError(f"{option}={getattr(config, option)!r}: not on a base in FP8; use plain LoRA")
        start = getattr(config, "init_lora_weights", True)
        if start not in (True, False, "gaussian"):
            raise ValueError(
                f"init_lora_weights={start!r}: computed from, or changing, weights in high precision; on a base in FP8 "
                "one of True, False, 'gaussian'"
            )
        super().__init__(base_layer, adapter_name, config, **kwargs)
        self._before_merging = None

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move an adapter to the base's device and dtype, which PEFT cannot tell from bytes.

        With `autocast_adapter_dtype`, PEFT makes FP32 of it afterwards.
        """
        super()._move_adapter_to_device_of_base_layer(adapter_name, device)
        for matrices in (self.lora_A, self.lora_B):
            if adapter_name in matrices:
                matrices[adapter_name].to(self.base_layer.high_dtype)

    def forward(self, x: Tensor, *args: Any, residual: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Compute base and adapters. `residual`: is added to the output."""
        adapters = self.fusible(args, kwargs)
        if adapters is None or x.numel() == 0:
            y = super().forward(x, *args, **kwargs)
            return y if residual is None else residual + y
        base = self.base_layer

        def product(x: Tensor) -> Tensor:
            downs, ups = zip(*[self.matrices(name) for name in adapters], strict=True)
            positions = tuple(Adapter(0, base.out_features, float(self.scaling[name])) for name in adapters)
            return linear(
                x, base.as_weight(), base.spec(x), base.states, bias=base.bias,
                adapters=Adapters(positions, downs, ups), residual=residual, x_is_saved=base.input_is_saved,
            )  # fmt: skip

        return around([base, *self.adapter_modules(adapters)], product, x)

    def fusible(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> list[str] | None:
        """The adapters to compute with the base in one function; None if the call takes PEFT's own forward."""
        names = added_adapters(self)
        if not names or args or any((kwargs or {}).values()):
            return None
        modules = [group[name] for name in names for group in (self.lora_dropout, self.lora_A, self.lora_B)]
        return None if is_hooked(self.base_layer, *modules) or self.base_layer.weight.is_meta else names

    def adapter_modules(self, names: Sequence[str]) -> list[nn.Module]:
        """The modules that hold the matrices of these adapters."""
        return [group[name] for name in names for group in (self.lora_A, self.lora_B)]

    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        down: Any = self.lora_A[name]
        up: Any = self.lora_B[name]
        return down.weight, up.weight

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters into the FP8 weight, which is quantised anew. Its bytes are saved for `unmerge`."""
        for name in check_adapters_to_merge(self, adapter_names) or ():
            if name not in self.lora_A:
                continue
            base = self.base_layer
            merged = base.dequantize(torch.float32) + self.get_delta_weight(name).float()
            if safe_merge and not merged.isfinite().all():
                raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")
            if self._before_merging is None:
                self._before_merging = Quantized(*(tensor.clone() for tensor in base.quantized))
            assert base.format is not None
            base.set_weight(quantize_weight(merged, base.granularity, base.format.name))
            self.merged_adapters.append(name)
            logger.warning_once(
                "octavo: adapters are merged into weights in FP8, and a change below half a step of FP8 is lost. "
                "FastLanguageModel.save_pretrained_merged(model, folder, save_method='merged_16bit') keeps it"
            )

    def unmerge(self) -> None:
        if self._before_merging is not None:
            self.base_layer.set_weight(self._before_merging)
        self._before_merging = None
        self.merged_adapters.clear()


def add_adapters(model: nn.Module, *, checkpointing: bool | str, seed: int, options: dict[str, Any]) -> nn.Module:
    """`peft.get_peft_model`, with gradient checkpointing if asked for."""
    autocast = options.pop("autocast_adapter_dtype", True)
    base: Any = model
    set_checkpointing(base, checkpointing)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
        revision = getattr(base, "octavo_revision", None)  # PEFT writes down by which one to load the base again
        return peft.get_peft_model(base, config, autocast_adapter_dtype=autocast, revision=revision)


def load_adapters(model: nn.Module, name: str, most: int | None, options: dict[str, Any]) -> Any:
    """Return the model with adapters of a folder or of the Hub, which are trained.

    `most`: the highest rank that is allowed. `options`: of the Hub.
    """
    adapted: Any = peft.PeftModel.from_pretrained(model, name, is_trainable=True, **options)
    rank = getattr(adapted.active_peft_config, "r", 0)
    if most is not None and rank > most:
        raise ValueError(f"{name}: adapters with r={rank}, and max_lora_rank={most}; load with max_lora_rank={rank}")
    return adapted


def set_checkpointing(base: Any, checkpointing: bool | str) -> None:
    """Turn gradient checkpointing on or off, and have trainers that turn it on do it in the same way."""
    base.octavo_checkpointing = checkpointing
    if checkpointing:
        _remember_offload()
        base.gradient_checkpointing_enable()
    elif getattr(base, "is_gradient_checkpointing", False):
        base.gradient_checkpointing_disable()


@cache
def _remember_offload() -> None:
    """Have every call that turns checkpointing on heed "unsloth": trainers call it with settings of their own."""
    original: Any = PreTrainedModel.gradient_checkpointing_enable

    @wraps(original)
    def enable(self: Any, *args: Any, **kwargs: Any) -> None:
        # Without an accelerator, checkpoints are in host memory anyway, and there is none to pin.
        if self.__dict__.get("octavo_checkpointing") == "unsloth" and torch.cuda.is_available() and len(args) < 3:
            kwargs["offload"] = True
        original(self, *args, **kwargs)

    kind: Any = PreTrainedModel
    kind.gradient_checkpointing_enable = enable
