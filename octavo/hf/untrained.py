"""The forward hook of a loaded model: a loss that trains nothing says so, and BF16 weights keep FP32 masters.

Both are settled when a model is loaded, and have to hold for a copy of it, in another process, and for Parameters that
were added since: all of them come by the hook.
"""

from typing import Any

import torch
from torch import Tensor, nn

from octavo.decoders.causal_lm import nothing_is_trained
from octavo.optim import keep_masters
from octavo.optim.split_masters import is_decided

_MASTERS = "octavo_master_weights"


def explain_untrained(model: nn.Module) -> None:
    """Have the backward of a loss that nothing was trained for say so, in place of torch's `does not require grad`."""
    if _explain not in model._forward_hooks.values():
        model.register_forward_hook(_explain)


def remember_masters(model: nn.Module, master_weights: bool) -> None:
    """Have BF16 weights stepped through FP32 masters, or not; also those of a copy, and in another process."""
    model.__dict__[_MASTERS] = master_weights
    keep_masters(model.parameters(), master_weights)


def _explain(model: nn.Module, _inputs: Any, output: Any) -> None:
    masters = model.__dict__.get(_MASTERS)
    if masters is not None and not all(map(is_decided, model.parameters())):
        # A copy has other Parameters, and so has an embedding that was made larger.
        keep_masters((p for p in model.parameters() if not is_decided(p)), masters)
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor) and torch.is_grad_enabled() and not loss.requires_grad:
        output.loss = _raising(loss, nothing_is_trained(type(model).__name__))


def _raising(loss: Tensor, message: str) -> Tensor:
    """Return the loss as a tensor whose backward raises, and that may be modified in place, unlike a leaf."""

    def explain(_gradient: Tensor) -> None:
        raise ValueError(message)

    leaf = loss.clone().requires_grad_()
    leaf.register_hook(explain)
    return leaf.clone()
