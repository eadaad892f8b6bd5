"""torchao's optimisers, with the step of each parameter in one pass over it where there is a kernel for that."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def in_one_pass(optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The same optimiser with the same states. What the kernel does not know is left to torchao's own, compiled step."""
    from octavo.kernels import adamw

    class OnePass(optimizer_class):  # type: ignore[valid-type,misc]
        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            groups = self.param_groups
            rest = [{**group, "params": self._step_group(group)} for group in groups]
            if any(group["params"] for group in rest):
                self.param_groups = rest
                try:
                    super(optimizer_class, self).step()  # past the class that torch may have put step hooks around
                finally:
                    self.param_groups = groups
            return loss

        def _step_group(self, group: dict[str, Any]) -> list[Tensor]:
            """Those with a gradient that are still to be stepped."""
            return [p for p in group["params"] if p.grad is not None and not self._step_one(p, group)]

        def _step_one(self, p: Tensor, group: dict[str, Any]) -> bool:
            grad, state = p.grad, self.state[p]
            if grad is None or grad.is_sparse or group["amsgrad"]:
                return False
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = self._new_buffer(p, True), self._new_buffer(p, False)
            if not adamw.can_step(p, state["exp_avg"], state["exp_avg_sq"]):
                return False
            state["step"] += 1
            adamw.step(
                p, grad, state["exp_avg"], state["exp_avg_sq"], count=int(state["step"]), lr=float(group["lr"]),
                betas=group["betas"], eps=group["eps"], weight_decay=group["weight_decay"],
                stochastic=self.bf16_stochastic_round,
            )  # fmt: skip
            return True

    OnePass.__name__ = OnePass.__qualname__ = optimizer_class.__name__
    return OnePass
