"""Adapters that a model has already: kept, with their values, where a call for new ones asks for these very ones."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import peft
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from octavo.hf.lora import set_checkpointing

logger = logging.get_logger(__name__)
# Fields of a LoraConfig that say which modules it is for, which are compared themselves, ...
_MODULES = {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
# ... and those that say where first values come from, or of what model and PEFT an adapter is.
_ORIGIN = {
    "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config",
    "inference_mode", "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "peft_type", "task_type",
}  # fmt: skip


def has_adapters(model: nn.Module) -> bool:
    return isinstance(model, peft.PeftModel) or any(isinstance(module, BaseTunerLayer) for module in model.modules())


def keep_adapters(model: Any, checkpointing: bool | str, options: dict[str, Any]) -> Any:
    """Return a model that has adapters as it is, if they are of the kind that is asked for.

    PEFT would make new ones, and the values of the old ones would be lost.
    """
    if not isinstance(model, peft.PeftModel):
        raise ValueError(
            f"{type(model).__name__} has adapters in it already: give get_peft_model the model around it, which has "
            "them as its own, or load a folder of adapters by FastLanguageModel.from_pretrained"
        )
    config: Any = model.active_peft_config
    if not isinstance(config, peft.LoraConfig):
        raise _other("LoRA", config.peft_type.value)
    asked = peft.LoraConfig(
        task_type="CAUSAL_LM", **{name: value for name, value in options.items() if name != "autocast_adapter_dtype"}
    )
    for field in fields(asked):
        own, value = getattr(config, field.name, None), getattr(asked, field.name)
        if field.name not in _MODULES | _ORIGIN and _plain(own) != _plain(value):
            raise _other(f"{field.name}={value!r}", f"{field.name}={own!r}")
    base: nn.Module = model.get_base_model()
    adapted = {name for name, module in _places(base) if model.active_adapter in _adapters(module)}
    wanted = _targets(base, asked)
    if adapted != wanted:
        name = min(adapted ^ wanted)
        what = "has one" if name in adapted else "has none"
        raise _other(f"target_modules={options.get('target_modules')!r}", f"{len(adapted)} adapters; {name} {what}")
    set_checkpointing(base, checkpointing)
    for name, parameter in model.named_parameters():
        if f".{model.active_adapter}." in name:
            parameter.requires_grad_(True)
    logger.warning(f"octavo: the model has such adapters already ({model.active_adapter}), and keeps them")
    return model


def _other(asked: str, own: str) -> ValueError:
    return ValueError(
        f"{asked}: this model has adapters already, with {own}; leave get_peft_model out to train them as they are, or "
        "save_pretrained_merged first and load what it wrote"
    )


def _plain(value: Any) -> Any:
    """Return a value of a configuration so that it equals others that mean the same."""
    if isinstance(value, list | tuple | set):
        return sorted(value, key=str) or None
    return value if value != {} else None


def _places(base: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules of a model that have adapters or could have them, without what is inside of these."""
    inside = None
    for name, module in base.named_modules():
        if inside is not None and name.startswith(f"{inside}."):
            continue
        if isinstance(module, BaseTunerLayer | nn.Linear | nn.Embedding | Conv1D):
            inside = name
            yield name, module


def _adapters(module: nn.Module) -> set[str]:
    groups = (getattr(module, name, {}) for name in ("lora_A", "lora_embedding_A"))
    return {name for group in groups for name in group}


def _targets(base: Any, config: peft.LoraConfig) -> set[str]:
    """Return the names of the modules that a configuration is for."""
    if config.target_modules == "all-linear":
        head = base.get_output_embeddings()
        config.target_modules = [
            name
            for name, module in _places(base)
            if module is not head and isinstance(getattr(module, "base_layer", module), nn.Linear | Conv1D)
        ]
    return {name for name, _ in _places(base) if check_target_module_exists(config, name)}
