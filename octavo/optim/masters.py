"""Full fine-tuning with FP8 weights on the GPU, and their FP32 masters in host memory with the optimiser's states.

    octavo.convert_to_fp8(model)
    optimizer = build_optimizer("adamw8bit", model.parameters(), lr=1e-5)
    offload_master(model, optimizer)
    for batch in data:
        model(**batch).loss.backward()     # each weight is stepped when its gradient is complete
        optimizer.step()                   # nothing is left to apply; schedulers and histories count this

A product's weights (q, k and v together) are stepped when all of their gradients are complete: masters and states are
copied to the GPU, the optimiser steps the masters in FP32, the rounded masters replace the FP8 weights, and masters and
states are copied back. On the GPU a weight of a converted linear takes one byte, on the host four and its states.
Norms, embedding, head and biases stay as they are on the GPU, and only their states leave it.
"""

import torch
from torch import Tensor, nn

from octavo.nn.groups import FP8OnlyGroup, linears_by_product, why_not_fp8_only
from octavo.nn.linear import FP8Linear
from octavo.nn.sharded import is_sharded
from octavo.optim.host_states import HostStates
from octavo.optim.in_backward import InBackward, require_free, why_not_in_backward


class OffloadedMasters(InBackward):
    """Handle that `offload_master` returns; `remove()` restores the weights, rounded to their former dtype."""

    states: HostStates

    def __init__(self, optimizer: torch.optim.Optimizer, products: list[list[FP8Linear]]) -> None:
        weights = [linear.weight for linears in products for linear in linears]
        # All of them before any weight is freed: if the host has too little memory, the model is unchanged.
        masters: dict[Tensor, Tensor] = {p: _master_of(p) for p in weights}
        super().__init__(optimizer, states=HostStates(optimizer, masters))
        self._product: dict[Tensor, FP8OnlyGroup] = {}
        for linears in products:
            group = FP8OnlyGroup(linears)
            group.write([p.detach().float() for p in group.parameters])
            group.attach(self._read, self._load)
            self._product |= dict.fromkeys(group.parameters, group)
        self._handles.append(optimizer.register_step_pre_hook(lambda *_: self._apply_rest()))

    def apply(self, parameter: Tensor) -> None:
        group = self._product.get(parameter)
        if group is None:
            super().apply(parameter)
        elif all(member.grad is not None for member in group.parameters):
            self._apply_product(group)

    @torch.no_grad()
    def _apply_product(self, group: FP8OnlyGroup) -> None:
        masters = [self._bring(parameter) for parameter in group.parameters]
        for parameter, master in zip(group.parameters, masters, strict=True):
            if parameter.grad is not None:
                self._step_master(parameter, master)
                self._applied.add(parameter)
        group.write(masters)
        for parameter, master in zip(group.parameters, masters, strict=True):
            self.states.send(parameter, master)

    def _step_master(self, parameter: Tensor, master: Tensor) -> None:
        """Step the master in place of the parameter, with the parameter's states."""
        states = self.optimizer.state
        assert parameter.grad is not None
        master.grad = parameter.grad.float()
        parameter.grad = None
        if parameter in states:
            states[master] = states.pop(parameter)
        try:
            self._step_for(parameter, master)
        finally:
            master.grad = None
            if master in states:
                states[parameter] = states.pop(master)

    def _apply_rest(self) -> None:
        """Step products of which only some weights had a gradient."""
        for group in dict.fromkeys(self._product.values()):
            if any(parameter.grad is not None for parameter in group.parameters):
                self._apply_product(group)

    def _bring(self, parameter: Tensor) -> Tensor:
        master = self.states.bring(parameter)
        assert master is not None
        return master

    def _read(self, parameter: Tensor) -> Tensor:
        return self.states.master(parameter)

    @torch.no_grad()
    def _load(self, parameter: Tensor, values: Tensor) -> None:
        """Replace a master and the FP8 weights of its product, whose scale may change."""
        self.states.set_master(parameter, values)
        group = self._product[parameter]
        group.write([self.states.master(p).to(p.device) for p in group.parameters])

    def remove(self) -> None:
        self.states.wait()
        for group in dict.fromkeys(self._product.values()):
            group.detach()
        super().remove()


def _master_of(parameter: Tensor) -> Tensor:
    host_copy = torch.empty(parameter.shape, dtype=torch.float32, device="cpu", pin_memory=parameter.is_cuda)
    return host_copy.copy_(parameter.detach())


def offload_master(model: nn.Module, optimizer: torch.optim.Optimizer) -> OffloadedMasters:
    """Keep the weights of `model`'s FP8 linears in FP8 only, and their FP32 masters in host memory.

    `model`: converted by `convert_to_fp8`, on the device where it trains, per tensor or per block. `optimizer`: built
    from its parameters; any of torch's, or of `build_optimizer`. It steps within backward (see `step_in_backward`), so
    there is no clipping and no accumulation. The host needs 4 bytes per parameter plus the optimiser states: for an 8B
    26 GiB, plus 7 with 4-bit states or 52 with AdamW's own; torch pins memory in powers of two, which adds a tenth.

    The model's `state_dict()` holds the masters, in FP32, and `load_state_dict` writes both them and the FP8 weights;
    the optimiser's is unchanged. Call `remove()` before moving the model.
    """
    require_free(optimizer)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "offload_master with DistributedDataParallel: gradients would be applied before they are averaged; train "
            "in one process"
        )
    reason = why_not_offloaded(optimizer)
    if reason:
        raise ValueError(f"offload_master {reason}")
    return OffloadedMasters(optimizer, _products(model, optimizer))


def why_not_offloaded(optimizer: torch.optim.Optimizer) -> str:
    """Return why `offload_master` is not for these ranks, and what to do; empty if it is."""
    sharded = any(is_sharded(parameter) for group in optimizer.param_groups for parameter in group["params"])
    if not sharded:
        return why_not_in_backward(optimizer)
    return (
        "with FSDP2: masters of shards are not supported; use step_in_backward(optimizer, offload=True), which keeps "
        "the optimiser's states in host memory, or fully_shard(..., offload_policy=CPUOffloadPolicy())"
    )


def _products(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[FP8Linear]]:
    """Return the linears whose weights the optimiser trains, grouped by product; raise if one cannot be offloaded."""
    trained = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    names = {id(module): name for name, module in model.named_modules()}
    products = []
    for linears in linears_by_product(model):
        mine = [linear.weight in trained for linear in linears]
        if not any(mine):
            continue
        where = ", ".join(names[id(linear)] for linear in linears)
        if not all(mine):
            raise ValueError(f"{where} are one product, and the optimiser trains only some of them: train all or none")
        if any(linear.fp8_only is not None for linear in linears):
            raise ValueError(
                f"offload_master of {where}: another optimiser has their masters; call remove() on what offload_master "
                "returned for that one first"
            )
        reason = why_not_fp8_only(linears)
        if reason:
            raise ValueError(f"offload_master of {where}: {reason}")
        if linears[0].weight.device.type == "meta":
            raise ValueError(f"offload_master of {where}: its weight is on the meta device; give it values first")
        products.append(linears)
    if not products:
        raise ValueError(
            f"offload_master: {type(optimizer).__name__} trains no weight of an FP8 linear of {type(model).__name__}; "
            "call octavo.convert_to_fp8(model) first, and give the optimiser model.parameters()"
        )
    _require_own_weights(model, {id(linear.weight) for linears in products for linear in linears})
    return products


def _require_own_weights(model: nn.Module, offloaded: set[int]) -> None:
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(name, recurse=False):
            if id(parameter) in offloaded:
                users.setdefault(id(parameter), []).append(key)
    for names in users.values():
        if len(names) > 1:
            raise ValueError(
                f"{' and '.join(names)} are one Parameter, which others than its FP8 linear read: convert with "
                f"{names[-1].rpartition('.')[0]!r} in skip, or untie them"
            )
