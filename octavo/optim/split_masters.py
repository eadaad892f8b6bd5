"""FP32 master weights of BF16 parameters in two additional bytes: the parameter is the upper half of its master.

A BF16 weight has eight significant bits: at a learning rate of 1e-5 most updates are below half of the last one, and
are lost in rounding. So the optimiser keeps the lower half of an FP32 number for every weight (`numerics/split.py`), as
one of its states, and steps the two together:

    master = join(weight, low)      FP32, as are the gradient and the optimiser's means
    update master                   by any optimiser: it finds a Parameter in FP32
    weight, low = split(master)     the weight is what the master rounds to

Training equals that of FP32 weights, bit for bit, except that forward reads them in BF16. `keep_masters(parameters)`
marks parameters to train so; every optimiser that steps them then does, through a hook that torch calls before each
optimiser's step. Masters exist for some parameters at a time.

Checkpoints. `state_dict()` of the optimiser has the low halves, and FP32 means are cut in two BF16 halves there
("exp_avg" and "exp_avg_low"): torch casts states to the dtype of their parameter when it loads them, and these come
through unchanged. So a run resumes exactly, also where the checkpoint is loaded before the first step; and a plain
optimiser that reads it finds the means it knows, in BF16.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from octavo.nn.sharded import is_sharded
from octavo.numerics import split as spec
from octavo.optim.partial_step import plain_step, step_groups
from octavo.optim.split_adamw import FusedSplitAdamW

LOW = "weight_low"
_SUFFIX = "_low"
_MARK, _ATTACHED, _OTHERS = "_octavo_master", "_octavo_masters", "_octavo_per_parameter"
_AT_A_TIME = 2**26  # elements with masters and FP32 gradients at a time: half a GiB
_OTHER_WAY = (
    "train with another optimiser, or say master_weights=False where the model is loaded or the trainer is built"
)
_hook: list[Any] = []


def keep_masters(parameters: Iterable[Tensor], keep: bool | None = True) -> None:
    """Have optimisers step the BF16 ones among these parameters through FP32 masters.

    `keep=False` ends this; `None` leaves earlier decisions alone and says yes for the rest. Optimisers that round BF16
    weights stochastically (`bf16_stochastic_round`) continue to do so, since that was a choice. Sharded parameters
    (DTensor) in BF16 cannot have masters: True is an error for them, and None leaves them alone; the trainers then warn
    (`why_without_masters`). A copy of a model (`copy.deepcopy`) has other parameters, and needs its own call; a model
    from `FastLanguageModel` makes it by itself.
    """
    for parameter in parameters:
        if keep and is_sharded(parameter) and parameter.dtype == torch.bfloat16:
            raise ValueError(
                f"FP32 masters (master_weights, keep_masters) of a sharded parameter {tuple(parameter.shape)} in BF16 "
                "are not supported: shard the model in FP32 with MixedPrecisionPolicy(param_dtype=torch.bfloat16), "
                "which computes the same, or round at random (build_optimizer(..., stochastic_rounding=True))"
            )
        if keep is not None or not hasattr(parameter, _MARK):
            setattr(parameter, _MARK, keep is not False)
    if keep is not False and not _hook:
        _hook.append(register_optimizer_step_pre_hook(_before_step))


def why_without_masters(optimizer: Any) -> str:
    """Return a warning if `optimizer` trains sharded BF16 weights, which cannot have masters; empty if it does not."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # unwrap Accelerate's
    given = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    sharded = [p for p in given if is_sharded(p) and p.dtype == torch.bfloat16 and getattr(p, _MARK, True)]
    if not sharded or getattr(optimizer, "bf16_stochastic_round", False):
        return ""
    return (
        f"{len(sharded)} of {len(given)} trained weights are shards in BF16, which have no FP32 masters: each step "
        "rounds them to BF16, and most small updates are lost. Shard the model in FP32, with "
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16); or round at random (build_optimizer(..., "
        "stochastic_rounding=True)); master_weights=False accepts it"
    )


def is_decided(parameter: Tensor) -> bool:
    """Return True if `keep_masters` was called for this parameter in this process."""
    return hasattr(parameter, _MARK) and bool(_hook or not getattr(parameter, _MARK))


def has_master(optimizer: Any, parameter: Tensor) -> bool:
    """Return True if `optimizer` steps this parameter through an FP32 master."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # unwrap Accelerate's
    wanted = getattr(parameter, _MARK, False) and parameter.dtype == torch.bfloat16
    return wanted and type(parameter.data) is Tensor and not getattr(optimizer, "bf16_stochastic_round", False)


def master_at(optimizer: Any, parameter: Tensor, indices: Tensor) -> Tensor:
    """Return elements of the master by their flat indices; of the parameter itself if it has no master yet."""
    values = parameter.detach().reshape(-1)[indices]
    if not has_master(optimizer, parameter):
        return values
    low = optimizer.state.get(parameter, {}).get(LOW)
    return values.float() if low is None else spec.join(values, low.reshape(-1)[indices])


def joined(state: dict[str, Any]) -> dict[str, Any]:
    """Return the states of a parameter with a master in FP32, as they were before `state_dict` split them."""
    whole: dict[str, Any] = {}
    for name, value in state.items():
        if name == LOW or not _is_half(value):
            whole[name] = value
        elif not name.endswith(_SUFFIX) or name.removesuffix(_SUFFIX) not in state:
            low = state.get(name + _SUFFIX)
            whole[name] = value.float() if low is None else spec.join_views(value, low)
    return whole


def leave_to_others(optimizer: torch.optim.Optimizer, left: bool) -> None:
    """Mark an optimiser whose parameters are stepped singly, within `in_fp32`, and not before its own step."""
    if left:
        _attach(optimizer)
    setattr(optimizer, _OTHERS, left)


@contextmanager
def in_fp32(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> Iterator[dict[Tensor, Tensor]]:
    """Yield what to step for each of `parameters`: its FP32 master, with an FP32 gradient and its states, or itself.

    Masters are split again at the end. A parameter keeps its data meanwhile: from one whose data change their dtype,
    torch drops the node of its gradient, and with it the hooks by which DDP averages gradients.
    """
    masters: list[_Master] = []
    shown = {parameter: parameter for parameter in parameters}
    changed = False
    try:
        for parameter in list(shown):
            if has_master(optimizer, parameter):
                masters.append(_Master(optimizer, parameter))
                shown[parameter] = masters[-1].joined
        yield shown
        if any(master.was_passed_over() for master in masters):
            raise _PassedOver(
                f"{type(optimizer).__name__} has stepped a BF16 weight with an FP32 master that it does not read from "
                f"its param_groups: {_OTHER_WAY}"
            )
        changed = True
    finally:
        for master in masters:
            master.end(changed=changed)


class _PassedOver(ValueError):
    """Weights were written beside their masters."""


class _Master:
    """The FP32 master of a parameter, which has its states for the length of a step."""

    @torch.no_grad()
    def __init__(self, optimizer: torch.optim.Optimizer, parameter: Any) -> None:
        self.optimizer, self.parameter, self.version = optimizer, parameter, parameter._version
        self.given = _stamp(parameter.grad)
        state = dict(optimizer.state.get(parameter, {}))
        self.low = state.pop(LOW, None)
        if self.low is None:
            self.low = spec.new_low(parameter.detach())
        self.joined: Any = nn.Parameter(_way_for(parameter, self.low).join(parameter.detach(), self.low))
        self.joined.__dict__ |= parameter.__dict__
        if parameter.grad is not None:
            sparse = parameter.grad.layout != torch.strided
            self.joined.grad = parameter.grad.float() if sparse else torch.empty_like(self.joined).copy_(parameter.grad)
        self.grad = self.joined.grad
        if state:  # optimisers create states only where there are none at all
            optimizer.state[self.joined] = joined(state) if any(map(_is_half, state.values())) else state
        optimizer.state.pop(parameter, None)  # last: there may be no memory for the above

    def was_passed_over(self) -> bool:
        """Return True if the parameter itself was written, by an optimiser that keeps a list of its own."""
        return bool(self.parameter._version != self.version)

    @torch.no_grad()
    def end(self, *, changed: bool) -> None:
        state = self.optimizer.state.pop(self.joined, {})
        self.optimizer.state[self.parameter] = {**state, LOW: self.low}
        if self.joined.grad is not self.grad and _stamp(self.parameter.grad) == self.given:  # and none has come since
            self.parameter.grad = None if self.joined.grad is None else self.joined.grad.bfloat16()
        if changed:
            _way_for(self.parameter, self.low).split(self.joined.detach(), self.parameter.detach(), self.low)


def _stamp(grad: Tensor | None) -> tuple[int, int]:
    """Return what changes with a gradient that is replaced or written."""
    return id(grad), 0 if grad is None else grad._version


def _way_for(high: Tensor, low: Any) -> Any:
    if high.is_cuda and find_spec("triton"):
        from octavo.kernels import split as kernel

        if kernel.can_split(high, low):
            return kernel
    return spec


def _is_half(value: Any) -> bool:
    """Return True for a plain state in BF16; low-bit states have formats of their own."""
    return type(value) is Tensor and value.dtype == torch.bfloat16


class _Masters:
    """Hooks of one optimiser, around its step and on its `state_dict`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._pre = optimizer.register_step_pre_hook(self._step)
        self._post = optimizer.register_step_post_hook(lambda *_: self._end())
        for register in (optimizer.register_state_dict_pre_hook, optimizer.register_load_state_dict_pre_hook):
            register(lambda *_: self._restore())
        optimizer.register_state_dict_post_hook(_split_states)
        self._hidden: list[tuple[Any, Tensor]] = []
        self._fused_adamw = FusedSplitAdamW()
        self._whole = ExitStack()

    def come_last(self, optimizer: Any) -> None:
        """Run after other hooks before the step, which may change gradients, and before other hooks after it."""
        optimizer._optimizer_step_pre_hooks.move_to_end(self._pre.id)
        optimizer._optimizer_step_post_hooks.move_to_end(self._post.id, last=False)

    def _step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(optimizer, _OTHERS, False):
            return None
        self._restore()
        new = _with_closure_called(args, kwargs)
        mine = [p for p in _stepped(optimizer) if p.grad is not None]
        if _is_by_element(optimizer):
            self._step_some_at_a_time(optimizer, mine)
        else:
            shown = self._whole.enter_context(in_fp32(optimizer, mine))
            self._whole.enter_context(_in_groups(optimizer, shown))
        return new

    def _step_some_at_a_time(self, optimizer: Any, mine: list[Any]) -> None:
        for some in _portions(self._fused_adamw.step(optimizer, mine, LOW)):
            _step_in_fp32(optimizer, some)  # a call of its own, which keeps no master while the next are made
        for p in mine:  # hidden from the step that follows, and restored after it
            self._hidden.append((p, p.grad))
            p.grad = None

    def _restore(self) -> None:
        """End what a step that broke off has left. Weights that were loaded since stay as they are."""
        self._hidden.clear()
        with suppress(_PassedOver):
            self._whole.close()

    def _end(self) -> None:
        self._whole.close()
        for p, grad in self._hidden:
            if p.grad is None:
                p.grad = grad
        self._hidden.clear()


def _step_in_fp32(optimizer: torch.optim.Optimizer, some: list[Tensor]) -> None:
    with in_fp32(optimizer, some) as shown:
        groups = [
            {**group, "params": [shown[p] for p in group["params"] if p in shown]} for group in optimizer.param_groups
        ]
        step_groups(optimizer, [group for group in groups if group["params"]], plain_step(optimizer))


@contextmanager
def _in_groups(optimizer: torch.optim.Optimizer, shown: dict[Tensor, Tensor]) -> Iterator[None]:
    """Show an optimiser other tensors in its groups."""
    before = [list(group["params"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"][:] = [shown.get(p, p) for p in group["params"]]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"][:] = parameters


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Set up masters for an optimiser; torch calls this before every step, and before the optimiser's own hooks."""
    masters = getattr(optimizer, _ATTACHED, None)
    if masters is None:
        if not _stepped(optimizer):
            return
        _refuse_lbfgs(optimizer)
        masters = _attach(optimizer)
    masters.come_last(optimizer)


def _attach(optimizer: torch.optim.Optimizer) -> _Masters:
    masters: _Masters | None = getattr(optimizer, _ATTACHED, None)
    if masters is None:
        masters = _Masters(optimizer)
        setattr(optimizer, _ATTACHED, masters)
    return masters


def _refuse_lbfgs(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"LBFGS evaluates the model within its step, where BF16 weights with FP32 masters are in FP32: {_OTHER_WAY}"
        )


def _stepped(optimizer: Any) -> list[Any]:
    """Return the parameters with masters that an optimiser steps itself.

    One that holds another (Lookahead, SAM) leaves those of the other to it, which would keep states of masters that
    are gone after the step; ZeroRedundancyOptimizer receives those that other ranks have stepped, too.
    """
    if type(optimizer).__module__.startswith("torch.distributed."):
        return []
    held = [o for o in vars(optimizer).values() if isinstance(o, torch.optim.Optimizer) and o is not optimizer]
    theirs = {p for other in held for group in other.param_groups for p in group["params"]}
    mine = [p for group in optimizer.param_groups for p in group["params"] if p not in theirs]
    return [p for p in mine if p.requires_grad and has_master(optimizer, p)]


def _with_closure_called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the closure of `step(closure)`, which computes gradients, while weights are still in BF16."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return args[:1], {**kwargs, "closure": lambda: loss}


def _is_by_element(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the step of a parameter does not depend on others, as in torch, torchao and here."""
    module = type(optimizer).__module__
    return module.startswith(("torch.optim.", "torchao.", "octavo.", "transformers."))


def _portions(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    some: list[Tensor] = []
    for parameter in parameters:
        if some and sum(p.numel() for p in some) + parameter.numel() > _AT_A_TIME:
            yield some
            some = []
        some.append(parameter)
    if some:
        yield some


def _split_states(_optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """Split FP32 states of parameters with masters into halves that `load_state_dict` leaves unchanged."""
    states = {i: _split_state(state) if LOW in state else state for i, state in saved["state"].items()}
    return {**saved, "state": states}


def _split_state(state: dict[str, Any]) -> dict[str, Any]:
    halves: dict[str, Any] = {}
    for name, value in state.items():
        if name != "step" and type(value) is Tensor and value.dtype == torch.float32:
            halves[name], halves[name + _SUFFIX] = spec.views(value)
        else:
            halves[name] = value
    return halves
