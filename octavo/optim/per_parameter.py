"""Optimiser steps for one parameter at a time, optionally with the states in host memory."""

import torch
from torch import Tensor

from octavo.optim.host_states import HostStates
from octavo.optim.partial_step import plain_step, step_groups
from octavo.optim.split_masters import in_fp32, leave_to_others


class PerParameter:
    """Steps single parameters of an optimiser: `apply(parameter)` updates it and frees its gradient."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, states: HostStates | None = None) -> None:
        self.optimizer = optimizer
        self.states = states
        self._step = plain_step(optimizer)
        # Index of its group: loading a checkpoint replaces the group objects.
        self._group = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        leave_to_others(optimizer, True)

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for parameter in self._group if parameter.requires_grad]

    def apply(self, parameter: Tensor) -> None:
        if self.states is not None:
            self.states.bring(parameter)
        with in_fp32(self.optimizer, [parameter]) as shown:
            self._step_for(parameter, shown[parameter])
        parameter.grad = None
        if self.states is not None:
            self.states.send(parameter)

    def _step_for(self, parameter: Tensor, shown: Tensor) -> None:
        """Step with a group that holds this parameter alone: the gradients of others may not be complete."""
        group = self.optimizer.param_groups[self._group[parameter]]
        step_groups(self.optimizer, [{**group, "params": [shown]}], self._step)
