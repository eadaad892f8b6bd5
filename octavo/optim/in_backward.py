"""Optimiser steps within backward: each gradient is applied when it is complete, and then freed.

The gradients of a model then never exist all at once. An 8B has 15 GiB of them in BF16; one layer's are 0.4.

    optimizer = build_optimizer("adamw4bit", model.parameters(), lr=1e-5)
    step_in_backward(optimizer)
    for batch in data:
        model(**batch).loss.backward()     # weights have changed when this returns
        optimizer.step()                   # nothing is left to apply; schedulers and histories count this

It is the same optimiser with the same state, so learning rates, checkpoints and `octavo`'s scaling histories work as
before. Operations that need all gradients at once are impossible: clipping their norm, or summing over micro-batches.

On several ranks, a gradient is complete when it is averaged over them. FSDP2 averages before it hands a gradient out,
so there the step is right. DDP and DeepSpeed average `.grad` later, when it has been applied: that is an error.

A weight gets one step for each `optimizer.step()`. A second gradient for it before that, from a second backward or
from reentrant checkpointing, whose graphs end within backward, would be a second step with a part of the gradient: an
error.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from octavo.nn.sharded import ranks
from octavo.optim.host_states import HostStates
from octavo.optim.per_parameter import PerParameter
from octavo.optim.split_masters import leave_to_others

_MARK = "_octavo_in_backward"


class InBackward(PerParameter):
    """Handle that `step_in_backward` returns; `remove()` undoes it."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, states: HostStates | None) -> None:
        super().__init__(optimizer, states=states)
        self._applied: set[Tensor] = set()
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._apply_once) for parameter in self.parameters
        ]
        self._handles.append(optimizer.register_step_post_hook(lambda *_: self.reset()))
        setattr(optimizer, _MARK, self)

    def _apply_once(self, parameter: Tensor) -> None:
        if _waits_for_ranks(parameter):  # the process group may have come since
            raise ValueError(f"step_in_backward {why_not_in_backward(self.optimizer)}")
        if parameter in self._applied:
            raise RuntimeError(
                f"a second gradient of a parameter of shape {tuple(parameter.shape)} before optimizer.step(): its "
                "first one has been applied within backward already. Call optimizer.step() after each backward(), sum "
                "losses instead of calling backward() for each, and where a checkpointed module is used twice, "
                "checkpoint with use_reentrant=False; or train without step_in_backward (release_gradients, offload)"
            )
        self.apply(parameter)
        if parameter.grad is None:  # else it waits for the gradients of its product
            self._applied.add(parameter)

    def reset(self) -> None:
        """Accept gradients of a new step, after one has ended or failed."""
        self._applied.clear()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        leave_to_others(self.optimizer, False)
        if self.states is not None:
            self.states.restore()
        delattr(self.optimizer, _MARK)


def step_in_backward(optimizer: torch.optim.Optimizer, *, offload: bool = False) -> InBackward:
    """Let `optimizer` apply each gradient within backward. `offload`: keep its states in host memory."""
    require_free(optimizer)
    reason = why_not_in_backward(optimizer)
    if reason:
        raise ValueError(f"step_in_backward {reason}")
    if not any(parameter.requires_grad for parameter in _parameters(optimizer)):
        raise ValueError(f"{type(optimizer).__name__} has no parameter that requires a gradient")
    return InBackward(optimizer, states=HostStates(optimizer) if offload else None)


def require_free(optimizer: torch.optim.Optimizer) -> None:
    if steps_in_backward(optimizer):
        raise ValueError(f"{type(optimizer).__name__} steps in backward already; call remove() on what that returned")
    # Another optimiser, from a run that failed, say, would take each gradient first.
    others = {type(other.optimizer).__name__ for p in _parameters(optimizer) for other in _who_steps(p)}
    if others:
        raise ValueError(
            f"{' and '.join(others)} steps parameters of this {type(optimizer).__name__} in backward; call remove() on "
            "what that returned first"
        )


def why_not_in_backward(optimizer: torch.optim.Optimizer) -> str:
    """Return why the gradients of `optimizer` are not complete within backward, and what to do; empty if they are."""
    trained = [parameter for parameter in _parameters(optimizer) if parameter.requires_grad]
    waiting = sum(map(_waits_for_ranks, trained))
    if not waiting:
        return ""
    return (
        f"on {ranks()} ranks: {waiting} of {len(trained)} parameters are not sharded by FSDP2, so their gradients "
        "would be applied before they are averaged, and the ranks would drift apart. Shard the model with "
        "torch.distributed.fsdp.fully_shard before the optimiser is built, train in one process, or step after backward"
    )


def _waits_for_ranks(parameter: Tensor) -> bool:
    """Whether other ranks have yet to add to a gradient when backward hands it out."""
    return ranks() > (parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _who_steps(parameter: Any) -> list[InBackward]:
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return [hook.__self__ for hook in hooks if isinstance(getattr(hook, "__self__", None), InBackward)]


def steps_in_backward(optimizer: Any) -> bool:
    """Return True if gradients are applied before `optimizer.step()`; looks inside Accelerate's wrapper."""
    return hasattr(getattr(optimizer, "optimizer", optimizer), _MARK)


class Offloaded(PerParameter):
    """Handle that `offload_states` returns."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, states=HostStates(optimizer))
        optimizer.register_step_pre_hook(lambda *_: self._apply_all())

    def _apply_all(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                self.apply(parameter)


def offload_states(optimizer: torch.optim.Optimizer) -> Offloaded:
    """Keep the states of `optimizer` in host memory; `step()` copies them in turn and frees the gradients.

    `step_in_backward(optimizer, offload=True)` overlaps the copies with backward, if gradients are not needed all at
    once.
    """
    if steps_in_backward(optimizer):
        raise ValueError(f"{type(optimizer).__name__} steps in backward: step_in_backward(optimizer, offload=True)")
    return Offloaded(optimizer)
