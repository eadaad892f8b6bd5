"""Fused step of torch's AdamW on split FP32 masters: one pass over each parameter, where there is a kernel for it.

Joined, stepped by torch and split again, a parameter would be read and written three times, by several launches each:
39 ms for a 1B on an H200, where AdamW on its BF16 weights takes 10 (`benchmarks/master_weights.py`, 2026-11-16).
"""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from octavo.numerics import split
from octavo.numerics.adamw import Step

_OFF = ("amsgrad", "maximize", "capturable", "differentiable")


class FusedSplitAdamW:
    """Steps the parameters of an optimiser that have a kernel. Caches their step counts, which may be on the GPU."""

    def __init__(self) -> None:
        self._counts: dict[Tensor, tuple[Tensor, int, int]] = {}  # the count's tensor, its version, and its value

    def step(self, optimizer: Any, parameters: Iterable[Tensor], low_name: str) -> list[Tensor]:
        """Step those of `parameters` that have a kernel; return the others."""
        if type(optimizer) is not torch.optim.AdamW or _is_scaled(optimizer) or not find_spec("triton"):
            return list(parameters)
        left: list[Tensor] = []
        counted: list[Tensor] = []
        wanted = set(parameters)
        for group in optimizer.param_groups:
            plain = not any(group[name] for name in _OFF) and not isinstance(group["lr"], Tensor)
            for p in (p for p in group["params"] if p in wanted):
                if plain and self._step_one(optimizer.state[p], p, group, low_name, counted):
                    continue
                left.append(p)
        if counted:
            torch._foreach_add_(counted, 1.0)
        return left

    def _step_one(
        self, state: dict[str, Any], p: Tensor, group: dict[str, Any], low_name: str, counted: list[Tensor]
    ) -> bool:
        from octavo.kernels import adamw as kernel

        grad = p.grad
        if not p.is_cuda or grad is None or grad.layout != torch.strided:
            return False
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if group["fused"] else "cpu")
            state |= {name: torch.zeros_like(p, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        if mean.dtype != torch.float32 or square.dtype != torch.float32 or not kernel.can_step(p, mean, square):
            return False  # still split, as loaded
        if low_name not in state:
            state[low_name] = split.new_low(p.detach())
        count = self._count(p, state["step"]) + 1
        step = Step(count, float(group["lr"]), group["betas"], group["eps"], group["weight_decay"], False)
        kernel.apply(step, p, grad, mean, square, state[low_name])
        counted.append(state["step"])
        self._counts[p] = (state["step"], state["step"]._version + 1, count)
        return True

    def _count(self, p: Tensor, tensor: Tensor) -> int:
        """Return the steps so far; reads the GPU once, and again after the count was written or replaced elsewhere."""
        known, version, count = self._counts.get(p, (None, 0, 0))
        return count if known is tensor and version == tensor._version else int(tensor)


def _is_scaled(optimizer: Any) -> bool:
    """Return True if a GradScaler has left its scale for a fused step to divide by."""
    return any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
