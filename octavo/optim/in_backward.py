"""The optimiser's step within backward: each gradient is applied when it is complete, and let go of.

Gradients of a model are then never all there at once. An 8B has 15 GiB of them in BF16; one layer's are 0.4.

    optimizer = build_optimizer("adamw4bit", model.parameters(), lr=1e-5)
    step_in_backward(optimizer)
    for batch in data:
        model(**batch).loss.backward()     # weights have changed when this returns
        optimizer.step()                   # nothing is left to apply; what counts steps, counts this

It is the same optimiser with the same state, so learning rates, checkpoints and `octavo`'s scaling histories go on as
before. What needs all gradients at once cannot be had: a limit on their norm, or their sum over several micro-batches.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MARK = "_octavo_in_backward"


class InBackward:
    """What `step_in_backward` has set up. `remove()` undoes it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._step = _plain_step(optimizer)
        self._group = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._apply)
            for parameter in self._group
            if parameter.requires_grad
        ]
        setattr(optimizer, _MARK, self)

    def _apply(self, parameter: Tensor) -> None:
        """Step with this parameter alone: others may have gradients that are not complete."""
        optimizer = self.optimizer
        groups = optimizer.param_groups
        optimizer.param_groups = [{**self._group[parameter], "params": [parameter]}]
        try:
            self._step(optimizer)
        finally:
            optimizer.param_groups = groups
        parameter.grad = None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        delattr(self.optimizer, _MARK)


def step_in_backward(optimizer: torch.optim.Optimizer) -> InBackward:
    """Let `optimizer` apply each gradient within backward."""
    if steps_in_backward(optimizer):
        raise ValueError(f"{type(optimizer).__name__} steps in backward already; call remove() on what that returned")
    if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(f"{type(optimizer).__name__} has no parameter that requires a gradient")
    return InBackward(optimizer)


def steps_in_backward(optimizer: Any) -> bool:
    """Whether gradients are gone by the time of `optimizer.step()`. Accelerate wraps optimisers."""
    return hasattr(getattr(optimizer, "optimizer", optimizer), _MARK)


def _plain_step(optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
    """Without the hooks that torch puts around `step` of each class: they are for whole steps."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
