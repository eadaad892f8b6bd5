"""Proof that training changes the weights it should.

A weight can be trained in name only: it was replaced after the optimiser was built (Accelerate's FP8 by torchao does
that), it is in no parameter group, or the optimiser does nothing. The loss then falls a little all the same, because
other weights learn. So around the first optimiser step a few elements of every trainable weight are compared.

What must move, in a step: a weight whose gradient is not zero, while its learning rate is above zero and the step is
not skipped. The elements compared are 64 spread over the weight, and the two where the gradient is largest and
smallest: of an embedding a step may move a few rows only. What cannot be judged in one step is looked at again in the
next: the learning rate is zero at the start of a warm-up, and LoRA's A has no gradient while its B is zero.

What need not move, and is reported instead of refused:
- A weight without a gradient. It may be cut off from the loss, or just not be used (an expert that no token chose, a
  tower for images in a batch of text); nobody can tell which without hooks, which would make a compiled model compile
  again. Engines that keep gradients to themselves (DeepSpeed) look like that, too.
- A weight whose update is below its rounding: 1 + 1e-5 is 1 in BF16.

It costs less than a kilobyte a weight and one synchronisation a step, in as many steps as it takes: one, mostly.

A weight whose norm moves may still lose most of its updates: of a BF16 weight at a learning rate of 1e-5, most elements
stay what they are. So the elements that moved are counted, of those with a gradient, and below `ENOUGH` of them it is
reported. `SampledWeights` gives the same figure from log to log. Weights with FP32 masters are looked at there
(`octavo/optim/split_masters.py`).
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo.nn.fp8_only import full_precision, offloaded_of
from octavo.nn.sharded import part_in_zero
from octavo.optim.split_masters import master_at

ELEMENTS = 64
SAMPLED = 32  # weights that are looked at from log to log
ENOUGH = 0.9  # of the elements with a gradient should move in a step
_ZERO = "its gradient was zero"
_LORA_A = ".lora_A."
MOST_STEPS = 10  # with a learning rate above zero; what has not moved by then is reported


@dataclass
class _Probe:
    """A few elements of one weight, before the step."""

    weight: Tensor
    indices: Tensor
    before: Tensor
    reached: Tensor  # whether each element has a gradient
    gradient: Tensor  # its largest magnitude, 0-d
    lr: float
    in_optimizer: bool
    like_adam: bool
    eps: float  # Adam's, beside the root of its second moment


@dataclass
class UpdateCheck:
    """A check that trainable weights are updated, over the first optimiser steps.

    Call `before_step` and `after_step` around the step until `done`; `findings` then says what is left.

    `after_step` raises a RuntimeError that lists the weights that should have moved. For an optimiser that will step
    within backward, call `watch` before it is made to: each weight is looked at when its gradient is complete.
    """

    model: nn.Module
    done: bool = False
    steps: int = 0
    reached: int = 0  # elements that were looked at and had a gradient
    moved: int = 0
    by_rewards: bool = False  # the loss compares rewards within groups: where they are equal, gradients are zero
    _holds_some: bool = False
    _pending: dict[str, str] = field(default_factory=dict)  # name → why it could not be judged yet
    _probes: dict[str, _Probe] = field(default_factory=dict)
    _hooks: list[Any] = field(default_factory=list)
    _counted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._pending = {name: "no step" for name, p in self.model.named_parameters() if p.requires_grad}
        self.done = not self._pending

    @torch.no_grad()
    def before_step(self, optimizer: Any) -> None:
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        highest = max((float(group["lr"]) for group in optimizer.param_groups), default=0.0)
        # A sharding engine gives its optimiser tensors of its own: holding none of the model's proves nothing then.
        self._holds_some = any(id(parameter) in groups for parameter in self.model.parameters())
        for name, parameter in self.model.named_parameters():
            if name in self._pending and name not in self._probes:
                self._look(name, optimizer, parameter, groups.get(id(parameter)), highest)
        self.steps += highest > 0

    @torch.no_grad()
    def watch(self, optimizer: Any) -> None:
        groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        for name, parameter in self.model.named_parameters():
            if name in self._pending and id(parameter) in groups:
                look = partial(self._look_in_backward, name, optimizer, groups[id(parameter)])
                self._hooks.append(parameter.register_post_accumulate_grad_hook(look))

    def _look_in_backward(self, name: str, optimizer: Any, group: int, parameter: Any) -> None:
        if name in self._pending and name not in self._probes:
            self._look(name, optimizer, parameter, optimizer.param_groups[group])

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _look(
        self, name: str, optimizer: Any, parameter: nn.Parameter, group: dict[str, Any] | None, highest: float = 0.0
    ) -> None:
        """Probe a weight. `group`: its parameter group; None if it has none, `highest` is the rate it might have."""
        self._pending[name], probe = _probe(optimizer, parameter, group, highest if group is None else group["lr"])
        if probe is not None:
            self._probes[name] = probe

    @torch.no_grad()
    def after_step(self, optimizer: Any) -> None:
        if not getattr(optimizer, "step_was_skipped", False):  # Accelerate's word, after gradients that overflowed
            self._judge(optimizer)
        self._probes = {}
        self.done = not self._pending or self.steps >= MOST_STEPS
        if self.done:
            self.close()

    def _judge(self, optimizer: Any) -> None:
        if not self._probes:
            return
        flags = [_compare(probe, optimizer) for probe in self._probes.values()]
        compared = torch.stack(
            [flag.to(flags[0].device) for flag in flags]
        ).tolist()  # layers may be on several devices
        stuck = []
        for (name, probe), counts in zip(self._probes.items(), compared, strict=True):
            has_gradient, moved, below_rounding, reached, reached_and_moved = counts
            if name not in self._counted:
                self._counted.add(name)
                self.reached += reached
                self.moved += reached_and_moved
            if not has_gradient:  # weight decay alone may move it, and proves nothing
                self._pending[name] = _ZERO
            elif moved:
                del self._pending[name]
            elif below_rounding and (probe.in_optimizer or not self._holds_some):
                self._pending[name] = f"its updates at lr={probe.lr:g} are below the rounding of {_dtype(probe.before)}"
            else:
                stuck.append(name if probe.in_optimizer else f"{name} (not in the optimiser)")
        if stuck:
            raise RuntimeError(_stuck_message(stuck, len(self._probes)))

    def findings(self) -> list[str]:
        """One line for each reason why weights could not be judged."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self._pending.items():
            if reason == _ZERO and self.steps < 2 and _LORA_A in name:
                continue  # its B is zero until after the first step
            by_reason.setdefault(reason, []).append(name)
        lines = [_finding(names, why, self.by_rewards) for why, names in by_reason.items()]
        if self.moved < ENOUGH * self.reached:
            lines.append(
                f"{self.moved / self.reached:.0%} of {self.reached:,} elements with a gradient moved in their first "
                "step: updates below the rounding of their dtype are lost. Keep FP32 masters (master_weights=True, "
                "with an optimiser that does not round stochastically), load weights in FP32, or raise the learning "
                "rate"
            )
        return lines


def _finding(names: list[str], why: str, by_rewards: bool) -> str:
    if by_rewards and why == _ZERO:
        return (
            f"{len(names)} trainable weights had no gradient in the first steps: a group of completions with equal "
            "rewards gives none. If it stays so, the rewards do not tell completions apart"
        )
    return f"{len(names)} trainable weights were not seen to learn: {why}: {_some(names)}"


class SampledWeights:
    """A few elements of a few weights, from one look to the next."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        trained = [p for p in model.parameters() if p.requires_grad and _flat(p).numel()]
        self._weights = trained[:: max(1, len(trained) // SAMPLED)][:SAMPLED]
        self._places = [_spread(_flat(p)) for p in self._weights]
        self._before = self._look(optimizer)

    @torch.no_grad()
    def share_moved(self, optimizer: Any) -> float:
        """The share of elements that are not what they were at the last look."""
        before, self._before = self._before, self._look(optimizer)
        moved = [(old != new).sum() for old, new in zip(before, self._before, strict=True)]
        total = sum(x.numel() for x in before)
        return int(torch.stack([m.to(moved[0].device) for m in moved]).sum()) / total if total else 0.0

    def _look(self, optimizer: Any) -> list[Tensor]:
        return [_elements(optimizer, p, at).float() for p, at in zip(self._weights, self._places, strict=True)]


def _probe(
    optimizer: Any, parameter: nn.Parameter, group: dict[str, Any] | None, rate: Any
) -> tuple[str, _Probe | None]:
    """The reason why a weight cannot be judged in this step, or else a probe of its elements."""
    if parameter.grad is None:
        return "no gradient (not used by the forward, cut off from the loss, or kept by a sharding engine)", None
    if parameter.grad.layout != torch.strided:
        return "its gradient is sparse", None
    lr = float(rate)
    if lr == 0:
        return "its learning rate was zero", None
    weight, gradient = _flat(parameter), _flat(parameter.grad)
    if weight.numel() == 0 or weight.numel() != gradient.numel():
        return "this process has no part of it", None
    lowest, highest = gradient.argmin(), gradient.argmax()
    indices = torch.cat([_spread(weight), torch.stack([lowest, highest]).to(weight.device)])
    largest = torch.maximum(gradient[lowest].abs(), gradient[highest].abs()).float()
    before, reached = _elements(optimizer, parameter, indices), gradient[indices.to(gradient.device)] != 0
    # The settings tell: an optimiser whose step does nothing has no state that would.
    like_adam = group is None or "betas" in group
    eps = _eps(group)
    return "", _Probe(parameter, indices, before, reached, largest, lr, group is not None, like_adam, eps)


def _eps(group: dict[str, Any] | None) -> float:
    eps = 0.0 if group is None else group.get("eps", 0.0)
    return float(eps) if isinstance(eps, (int, float)) else 0.0


def _compare(probe: _Probe, optimizer: Any) -> Tensor:
    """Compare a weight with its probe, on its device.

    Returns whether it has a gradient, whether it moved, whether its update is below its rounding, the number of
    elements with a gradient, and of those the number that moved.

    Adam's first updates have the size of the learning rate, whatever the gradient, unless that is as small as eps:
    lr × g / (g + eps). Data that leaves attention no choice, such as one token over and over, gives q and k gradients
    that are rounding alone. Of an optimiser that is none of that kind the update is taken to be lr × gradient, if the
    gradient is below one.
    """
    after = _elements(optimizer, probe.weight, probe.indices)
    before = probe.before.to(after.device, after.dtype)  # a master in FP32, where the first step has made one
    gradient, reached = probe.gradient.to(after.device), probe.reached.to(after.device)
    moved = after != before
    size = probe.lr * (gradient / (gradient + probe.eps) if probe.like_adam else gradient.clamp(max=1.0))
    below = ((size <= before.float().abs() * torch.finfo(after.dtype).eps) | ~reached).all()
    return torch.stack([gradient != 0, moved.any(), below, reached.sum(), (moved & reached).sum()]).long()


def _spread(weight: Tensor) -> Tensor:
    return torch.arange(0, weight.numel(), max(1, weight.numel() // ELEMENTS), device=weight.device)[:ELEMENTS]


def _elements(optimizer: Any, parameter: Tensor, indices: Tensor) -> Tensor:
    """Elements of a weight in the precision in which they are trained."""
    sharded = isinstance(parameter, DTensor) or part_in_zero(parameter) is not None
    if sharded or offloaded_of(parameter) is not None:
        values = _flat(full_precision(parameter))
        return values[indices.to(values.device)]
    return master_at(optimizer, parameter, indices)


def _flat(tensor: Tensor) -> Tensor:
    """The elements of a tensor on this process, flat: its part of one that FSDP2 or ZeRO-3 shards."""
    part = part_in_zero(tensor)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor if part is None else part
    return local.detach().reshape(-1)


def _stuck_message(names: list[str], judged: int) -> str:
    return (
        f"{len(names)} of {judged} weights with a gradient and a learning rate above 0 did not move in the optimiser's "
        f"step: {_some(names)}. They would never train. Look for parameters that were replaced after the optimiser was "
        "built (Accelerate's FP8 by torchao does that: leave its fp8 off and call octavo.convert_to_fp8 before the "
        "Trainer is built), for parameter groups that leave them out (freeze what is not to train: "
        "requires_grad_(False)), and for an optimiser whose step() does nothing"
    )


def _some(names: list[str], most: int = 12) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
