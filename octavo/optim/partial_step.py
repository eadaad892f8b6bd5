"""An optimiser's step for some of its parameters only."""

from collections.abc import Callable
from typing import Any

import torch

Step = Callable[[Any], Any]


def step_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], step: Step) -> None:
    """Step `groups` by `step`, as if the optimiser had no others."""
    whole = optimizer.param_groups
    optimizer.param_groups = groups
    try:
        step(optimizer)
    finally:
        optimizer.param_groups = whole


def plain_step(optimizer: torch.optim.Optimizer) -> Step:
    """Return `step` without the hooks that torch wraps around it per class, which are for whole steps."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
