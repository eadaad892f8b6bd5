"""One parameter's step at a time, by the optimiser that has them all. With its states in host memory, if wanted."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.optim.host_states import HostStates


class OneByOne:
    """`apply(parameter)`: the optimiser's step for this one, whose gradient is then gone."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, states: HostStates | None = None) -> None:
        self.optimizer = optimizer
        self.states = states
        self._step = _plain_step(optimizer)
        # By number: loading a checkpoint puts new groups in the place of the old ones.
        self._group = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for parameter in self._group if parameter.requires_grad]

    def apply(self, parameter: Tensor) -> None:
        if self.states is not None:
            self.states.bring(parameter)
        self._step_for(parameter, parameter)
        parameter.grad = None
        if self.states is not None:
            self.states.send(parameter)

    def _step_for(self, parameter: Tensor, shown: Tensor) -> None:
        """Others may have gradients that are not complete, so the optimiser is shown no other."""
        optimizer = self.optimizer
        groups = optimizer.param_groups
        optimizer.param_groups = [{**groups[self._group[parameter]], "params": [shown]}]
        try:
            self._step(optimizer)
        finally:
            optimizer.param_groups = groups


def _plain_step(optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
    """Without the hooks that torch puts around `step` of each class: they are for whole steps."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
