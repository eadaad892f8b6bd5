"""Recognising the modules of a transformers decoder, and the reasons why a piece of a model cannot be fused.

A module is known by the name and the origin of its class: a class of the same name elsewhere may compute something
else. Nothing here changes a module.
"""

from collections.abc import Container
from functools import cache
from typing import Any

from torch import nn

from octavo.nn.sharded import plain_class
from octavo.numerics.norm import Norm

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3")
QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
MLP = (*GATE_UP, "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("q_norm", "k_norm")
HF_ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu_tanh"}  # by the class of `act_fn`
ORIGINAL = "_octavo_original"  # in a fused module, and in its class: the class that it had
_PLAIN_NORMS = {f"{family}RMSNorm" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")}  # weight · h / rms(h)
_SHIFTED_NORMS = {f"{family}RMSNorm" for family in ("Gemma", "Gemma2", "Gemma3")}  # (1 + weight) · h / rms(h)


def is_attention(module: nn.Module) -> bool:
    return _is_own(module, "Attention") and _has_linears(module, QKV)


def is_mlp(module: nn.Module) -> bool:
    return _is_own(module, "MLP") and _has_linears(module, MLP)


def is_layer(module: nn.Module) -> bool:
    """Whether this layer is h + attention(norm(h)), then h + mlp(norm(h)), with plain norms."""
    return _is_own(module, "DecoderLayer") and all(is_plain_norm(getattr(module, name, None)) for name in NORMS)


def is_causal_lm(module: nn.Module) -> bool:
    return is_of_family(module, "ForCausalLM") and is_head(getattr(module, "lm_head", None))


def is_head(module: Any) -> bool:
    """Whether this is a plain linear, by class: as a head has to be, for its loss to be computed in chunks."""
    return isinstance(module, nn.Linear) and own_class(module) is nn.Linear


def is_plain_norm(module: Any) -> bool:
    """Whether this norm computes weight · h / rms(h)."""
    return _is_named(module, _PLAIN_NORMS)


def is_shifted_norm(module: Any) -> bool:
    """Whether this norm computes (1 + weight) · h / rms(h)."""
    return _is_named(module, _SHIFTED_NORMS)


def norm_of(module: Any) -> Norm | None:
    """Weight and eps of a norm; None if a module is another kind of norm."""
    if is_plain_norm(module):
        return Norm(module.weight, module.variance_epsilon)
    return Norm(module.weight, module.eps, shifted=True) if is_shifted_norm(module) else None


def is_of_family(module: nn.Module, kind: str) -> bool:
    """Whether this is the module of that kind (`Attention`, `ForCausalLM`, …) of a family that is known here."""
    return _is_named(module, _names(kind))


@cache
def _names(kind: str) -> frozenset[str]:
    return frozenset(family + kind for family in FAMILIES)


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, beneath what FSDP2 and Octavo have put over it."""
    kind = plain_class(module)
    parent: type[nn.Module] = kind.__dict__.get(ORIGINAL, kind)
    return parent


def _is_named(module: Any, names: Container[str]) -> bool:
    cls = plain_class(module)
    return cls.__name__ in names and cls.__module__.startswith("transformers.models.")


def _is_own(module: nn.Module, kind: str) -> bool:
    """Whether the module runs the forward of its class: one put in its place, as Accelerate does, calls the old one."""
    return is_of_family(module, kind) and "forward" not in module.__dict__


def _has_linears(module: nn.Module, names: tuple[str, ...]) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Linear) for name in names)


def base_of(module: Any) -> Any:
    """The linear itself, without adapters.

    PEFT is not imported here: a linear with adapters is known by its method `fusible` (`hf/lora.py`).
    """
    return module.base_layer if hasattr(module, "fusible") else module


def added_adapters(layer: Any) -> list[str] | None:
    """The active adapters of PEFT's LoRA around a linear; None if more is done than to add them to its output."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    dropouts = (layer.lora_dropout[name] for name in names)
    dropped = any(isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0 for dropout in dropouts)
    other = any(name in layer.lora_variant or layer.lora_bias[name] for name in names)
    return None if layer.disable_adapters or layer.merged or dropped or other else names


def activation_of(mlp: Any) -> str | None:
    """The name of an MLP's activation; None for one that has no kernel."""
    return HF_ACTIVATIONS.get(plain_class(mlp.act_fn).__name__)


def group_of(module: nn.Module) -> tuple[str, ...]:
    """The linears of an attention or an MLP that share their input; empty for any other module."""
    return QKV if is_attention(module) else GATE_UP if is_mlp(module) else ()


def outputs_of_groups(modules: dict[str, nn.Module]) -> dict[str, int]:
    """The outputs of the product that a linear would be part of, for linears that would share one."""
    outputs: dict[str, int] = {}
    for name, module in modules.items():
        members = group_of(module)
        total = sum(getattr(module, member).out_features for member in members)
        outputs |= {f"{name}.{member}": total for member in members}
    return outputs


def why_no_mlp(module: Any) -> str:
    """Why an MLP is not one function, whatever its weights are; empty if it can be."""
    if activation_of(module) is None:
        return f"activation {type(module.act_fn).__name__} has no kernel"
    if any(getattr(module, member).bias is not None for member in MLP):
        return "its linears have biases"
    return ""


def why_no_loss(model: Any) -> str:
    """Why a model keeps its own head and loss; empty if it need not."""
    if getattr(model.config, "final_logit_softcapping", None):
        return "final_logit_softcapping bends its logits"
    if model.lm_head.bias is not None:
        return "its head has a bias"
    if "forward" in model.__dict__:
        return f"the forward of this {type(model).__name__} was replaced by another (TRL's trainers do that)"
    if not has_default_loss(model):
        return "its loss function is not transformers' default"
    return ""


def has_default_loss(model: Any) -> bool:
    """Whether the model's loss is the one that transformers gives causal models: users may assign or derive another."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    return model.loss_function is ForCausalLMLoss
