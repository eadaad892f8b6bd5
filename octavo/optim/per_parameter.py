"""One parameter's step at a time, by the optimiser that has them all. With its states in host memory, if wanted."""

import torch
from torch import Tensor

from octavo.optim.host_states import HostStates
from octavo.optim.partial_step import plain_step, step_groups
from octavo.optim.split_masters import in_fp32, is_left_to_others


class PerParameter:
    """`apply(parameter)`: the optimiser's step for this one, whose gradient is then gone."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, states: HostStates | None = None) -> None:
        self.optimizer = optimizer
        self.states = states
        self._step = plain_step(optimizer)
        # By number: loading a checkpoint puts new groups in the place of the old ones.
        self._group = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        is_left_to_others(optimizer, True)

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for parameter in self._group if parameter.requires_grad]

    def apply(self, parameter: Tensor) -> None:
        if self.states is not None:
            self.states.bring(parameter)
        with in_fp32(self.optimizer, [parameter]):
            self._step_for(parameter, parameter)
        parameter.grad = None
        if self.states is not None:
            self.states.send(parameter)

    def _step_for(self, parameter: Tensor, shown: Tensor) -> None:
        """Others may have gradients that are not complete, so the optimiser is shown no other."""
        group = self.optimizer.param_groups[self._group[parameter]]
        step_groups(self.optimizer, [{**group, "params": [shown]}], self._step)
