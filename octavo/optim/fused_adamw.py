"""torchao's optimisers with a fused step: one pass over each parameter, where there is a kernel for it.

Elsewhere, and on a CPU, `numerics/adamw.py` computes the same step in torch. Amsgrad uses torchao's own step, which
rounds to nearest.

Of a sharded parameter (DTensor), each rank steps its shard. States in blocks then equal those of the whole parameter
where shards end at block ends, and so does the dither, which goes by the place in the whole. Where a shard of any rank
ends within a block, states are plain on all ranks, as those of whole parameters that blocks do not divide: a checkpoint
has one format.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.compiler import set_stance
from torch.distributed.tensor import DTensor

from octavo.nn.sharded import first_index, is_sharded, local, placed_like, sizes_of_shards
from octavo.numerics import adamw

_SMALLEST = 4096  # elements of a parameter whose states are in blocks; torchao's


@cache
def with_fused_step(optimizer_class: Any) -> Any:
    """Return a subclass of a torchao optimiser with the same states and a fused step."""

    class FusedStep(optimizer_class):
        param_groups: list[dict[str, Any]]

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.register_load_state_dict_pre_hook(_convert_loaded)
            self._first: dict[Tensor, int] = {}  # of shards: looking it up takes some tens of microseconds

        @staticmethod
        def _subclass_zeros(p: Tensor, signed: bool, block_size: int) -> Any:
            state = optimizer_class._subclass_zeros(p, signed, block_size)
            if adamw.is_of_4_bits(state):
                state.qmap.copy_(adamw.levels(signed=signed))
            return state

        def _new_buffer(self, p: Tensor, signed: bool) -> Any:
            if not is_sharded(p):
                return super()._new_buffer(p, signed)
            shard = local(p.detach())
            in_blocks = p.numel() >= _SMALLEST and all(n and n % self.block_size == 0 for n in sizes_of_shards(p))
            zeros = self._subclass_zeros(shard, signed, self.block_size) if in_blocks else torch.zeros_like(shard)
            return placed_like(zeros, p)

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            groups = self.param_groups
            rest = [{**group, "params": self._step_group(group)} for group in groups]
            left = [p for group in rest for p in group["params"]]
            if left:
                self.param_groups = rest
                on_cpu = all(p.device.type == "cpu" for p in left)  # a CPU may lack what compiling needs
                try:
                    with set_stance("force_eager") if on_cpu else nullcontext():
                        # Not optimizer_class.step, which torch may have wrapped in hooks.
                        super(optimizer_class, self).step()
                finally:
                    self.param_groups = groups
            return loss

        def _step_group(self, group: dict[str, Any]) -> list[Tensor]:
            """Step the parameters that have a kernel; return those with a gradient that remain."""
            return [p for p in group["params"] if p.grad is not None and not self._step_one(p, group)]

        def _step_one(self, p: Tensor, group: dict[str, Any]) -> bool:
            grad, state = p.grad, self.state[p]
            if grad is None or grad.is_sparse or group["amsgrad"] or type(local(p.detach())) is not Tensor:
                return False
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = self._new_buffer(p, True)
                state["exp_avg_sq"] = self._new_buffer(p, False)
            state["step"] += 1
            means = local(state["exp_avg"]), local(state["exp_avg_sq"])
            step = adamw.Step(
                int(state["step"]), float(group["lr"]), group["betas"], group["eps"], group["weight_decay"],
                self.bf16_stochastic_round,
            )  # fmt: skip
            shard = local(p.detach())
            if p not in self._first:
                self._first[p] = first_index(p)
            if shard.numel():
                _way_for(shard, *means)(step, shard, local(_placed_as(grad, p)), *means, first=self._first[p])
            return True

    FusedStep.__name__ = FusedStep.__qualname__ = optimizer_class.__name__
    return FusedStep


def _placed_as(grad: Tensor, p: Tensor) -> Tensor:
    """Return a gradient distributed as its parameter; that of FSDP2 is."""
    if isinstance(grad, DTensor) and isinstance(p, DTensor) and grad.placements != p.placements:
        return grad.redistribute(p.device_mesh, p.placements)
    return grad


def _way_for(p: Tensor, mean: Tensor, square: Tensor) -> Callable[..., None]:
    if p.is_cuda and find_spec("triton"):
        from octavo.kernels import adamw as kernel

        if kernel.can_step(p, mean, square):
            return kernel.apply
    return adamw.apply


def _convert_loaded(_optimizer: Any, loaded: dict[str, Any]) -> dict[str, Any]:
    """Re-encode 4-bit states of a checkpoint with other levels, and move counters to the host, which reads them."""
    ways: dict[str, Callable[[Any], Any]] = {
        "exp_avg": adamw.with_levels,
        "exp_avg_sq": adamw.with_levels,
        "step": lambda count: count.cpu(),
    }
    states = {
        i: {name: ways[name](x) if name in ways and isinstance(x, Tensor) else x for name, x in state.items()}
        for i, state in loaded["state"].items()
    }
    return {**loaded, "state": states}
