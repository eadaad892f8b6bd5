"""The state that a recording of a decoder depends on, beside the values of its tensors: it is right while that holds.

A replay calls no Python: it reads the addresses, multiplies by the factors and draws the dropout that were there when
it was recorded, and gives gradients to the Parameters that were trained. So before each replay all of it is compared.
For 16 layers with adapters everywhere that takes the host 1 ms, and their step takes the GPU 70.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from octavo.decoders.hooks import HOOKS

_HARMLESS = "transformers.utils.output_capturing"  # stay for good where hidden states were asked for once
# PEFT's layers and dropout: which adapters, how strong. (Linears in FP8 have another `scaling`, always the same.)
_PRODUCTS = ("fp8_products", "fp8_forward")  # True, unless a linear in FP8 says otherwise
_FLAGS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling", "p", "gradient_checkpointing")


def state_of(decoder: nn.Module) -> list[Any]:
    """A list that is equal as long as a step runs the same kernels on the same addresses, for the same Parameters."""
    state: list[Any] = [torch_module._has_any_global_hook()]
    todo = [decoder]
    while todo:
        module = todo.pop()
        own = module.__dict__
        state.append(type(module))
        if module.training:
            state.append(True)
        for parameter in own["_parameters"].values():
            if parameter is not None:
                state.append(parameter.data_ptr())
                if parameter.requires_grad:
                    state.append(id(parameter))
        for buffer in own["_buffers"].values():
            if buffer is not None:
                state.append(buffer.data_ptr())
        for name in _FLAGS:
            value = own.get(name)
            if value:  # PEFT sets some of them only when they are first on
                state.append((name, repr(value)))
        for name in _PRODUCTS:
            if not own.get(name, True):
                state.append(name)
        if "forward" in own:
            state.append(("forward", id(own["forward"])))
        for name in HOOKS:
            if own[name]:
                state.append((name, len(own[name])))
        todo += [child for child in own["_modules"].values() if child is not None]
    return state


def autocast_of(device: torch.device) -> Any:
    """The dtype of torch's autocast, in which a decoder then computes; None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def who_watches(decoder: nn.Module) -> str:
    """The first module with a hook or a forward of its own, which a replay would not call, by name; empty if none."""
    if torch_module._has_any_global_hook():
        return "torch.nn.modules"
    for name, module in decoder.named_modules():
        hooks = [hook for kind in HOOKS for hook in getattr(module, kind).values()]
        if "forward" in module.__dict__ or any(getattr(hook, "__module__", None) != _HARMLESS for hook in hooks):
            return name or type(module).__name__
    return ""
