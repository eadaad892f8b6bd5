"""Delayed scaling: quantise with a scale from earlier steps, so that one pass over the tensor is enough.

A scale from earlier steps is a guess. Where it turns out wrong, the tensor is quantised again with a scale of its own.

Each named tensor has a *state* of FP32 numbers on its device; quantising reads the scale from it and records there:

    SCALE       dequantising factor in force; 0 until the first non-zero use
    AMAX        largest magnitude seen in this step (the maximum over its micro-batches)
    SEEN        uses in this step
    NON_FINITE  1 if a use in this step met NaN or infinity
    SATURATED, UNDERFLOW, CALLS   sums since the last `statistics()`: fractions of elements, and uses
    LAST_AMAX   the newest entry of the history
    RESCALED    uses since the last `statistics()` that the delayed scale could not hold
    USED        for kernels: the scale that their first pass quantised with

The rules:
- The first non-zero use takes the tensor's own amax, and its scale stays in force for the rest of the step. So
  recomputing a forward under activation checkpointing uses the same scale.
- A scale *holds* a tensor if rounding saturates nothing and the largest magnitude is a normal number (`holds`). A
  tensor that the scale in force does not hold takes its own amax, like a first use. So nothing that jumps from one
  step to the next saturates, and nothing vanishes: inputs, loaded weights, updates by hand, evaluation.
- A history rolls once per optimiser step, only where the tensor was used, and only if *everything* was finite in that
  step; all of it is decided on the device, without a host synchronisation. Asking twice rolls once.
- After rolling, `scale = history amax × margin / FP8_MAX` every `interval` steps.

Two words for two things: a state's SCALE *dequantises* (value = data × scale); `get_scale` returns the *quantising*
multiplier FP8_MAX / (amax × margin). `margin` is a factor here (an exponent in `FP8TrainingConfig`).
"""

import math
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from octavo.numerics.amax import tensor_amax
from octavo.numerics.checks import check_choice, check_positive_int, checked_percentile
from octavo.numerics.config import ALGORITHMS, FP8TrainingConfig
from octavo.numerics.formats import E4M3, Format, get_format
from octavo.numerics.multiplier import Multiplier
from octavo.numerics.quantize import SMALLEST_SCALE, reciprocal

SCALE, AMAX, SEEN, NON_FINITE, SATURATED, UNDERFLOW, CALLS, LAST_AMAX, RESCALED, USED = range(10)
SLOTS = 12  # a multiple of four, so that states next to each other are all aligned to 16 bytes
EMA_DECAY = 0.9
_PER_STATE = ("_history", "_amax", "_ema", "_steps")
# Managers that follow optimisers, with the model of each. One global hook serves all: with a hook per manager, garbage
# collection of a manager during a step would change torch's hooks while torch iterates over them.
_followers: "weakref.WeakKeyDictionary[FP8ScalingManager, _Trained | None]" = weakref.WeakKeyDictionary()
_followers_hook: list[Any] = []


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for manager, trained in list(_followers.items()):
        manager._follow(optimizer, trained)


class _Trained:
    """Parameters of a model: its present ones, as long as the model exists, and its earlier ones."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.had = [weakref.ref(parameter) for parameter in model.parameters()]

    def parameters(self) -> list[nn.Parameter]:
        """Return the Parameters still alive: parts may outlive the model, and an engine may have replaced some."""
        model = self.model()
        had = [parameter for reference in self.had if (parameter := reference()) is not None]
        return had + (list(model.parameters()) if model is not None else [])


class Exchange(Protocol):
    """Agrees with other ranks before histories roll (`octavo.dist.amax`)."""

    def reduce(self, states: Tensor) -> None:
        """Replace what is recorded in these states `[rows, SLOTS]`, a copy of them all, by what all ranks recorded."""

    def settle(self) -> None:
        """Compute what follows from states that have rolled."""


class FP8ScalingManager:
    """Scales and amax histories of any number of named tensors.

    Manually, with one call a step: `update_amax(name, amax)`, then `get_scale(name)`. With micro-batches:
    `record(name, amax)` as often as needed and `step()` once. Layers pass their `state` to the quantise operation,
    which does the recording; `follow_optimizers()` makes every `optimizer.step()` call `step()`.
    """

    def __init__(
        self,
        history_len: int = 1024,
        margin: float = 2.0,
        *,
        format: Format | str = E4M3,
        algorithm: str = "max",
        interval: int = 1,
        percentile: float | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if isinstance(history_len, FP8TrainingConfig):
            raise TypeError("history_len is a configuration: FP8ScalingManager.from_config(config) takes one")
        check_positive_int("history_len", history_len)
        check_positive_int("interval", interval)
        check_choice("algorithm", algorithm, ALGORITHMS)
        if percentile is not None:
            percentile = checked_percentile("percentile", percentile)
        if not 0 < margin < math.inf:
            raise ValueError(f"margin={margin!r}: a finite factor above 0 (2.0 leaves room for values to double)")
        self.history_len = history_len
        self.margin = margin
        self.format = get_format(format)
        self.algorithm = algorithm
        self.interval = interval
        self.percentile = percentile
        self.device = torch.device(device)
        self.states: list[Tensor] = []
        self._index: dict[str, int] = {}
        self._follows = False
        self._has_own_optimizer = False
        self.exchange: Exchange | None = None  # with other ranks; None: every rank has its own histories
        self.step_count = 0  # calls of `step()`, rolled or not
        self._maximum: list[float] = []  # FP8_MAX and margin of each state
        self._margin: list[float] = []
        # Each state's history, the amax its scale was made from, its running mean and its age; grown in `_arrange`.
        here: dict[str, Any] = {"device": "cpu"}  # the default device is `meta` while transformers loads a model
        self._history = torch.zeros(0, history_len, dtype=torch.float32, **here)
        self._amax = torch.zeros(0, dtype=torch.float32, **here)
        self._ema = torch.zeros(0, dtype=torch.float32, **here)
        self._steps = torch.zeros(0, dtype=torch.int64, **here)
        self._limits = torch.zeros(0, 2, dtype=torch.float32, **here)  # FP8_MAX and margin again, where the states are

    @classmethod
    def from_config(cls, config: FP8TrainingConfig, device: torch.device | str = "cpu") -> "FP8ScalingManager":
        return cls(
            config.amax_history_len,
            1.0,  # operands have their own
            algorithm=config.amax_compute_algo,
            interval=config.amax_update_interval,
            percentile=config.percentile,
            device=device,
        )

    @property
    def names(self) -> list[str]:
        return list(self._index)

    def register(
        self, name: str, format: Format | str | None = None, margin: float | None = None, state: Tensor | None = None
    ) -> Tensor:
        """Return the state of `name`, created on first use. `state`: a tensor of `SLOTS` that holds it from now on."""
        if name not in self._index:
            self._index[name] = len(self.states)
            self._maximum.append((self.format if format is None else get_format(format)).max)
            self._margin.append(self.margin if margin is None else margin)
            self.states.append(new_states(device=self.device) if state is None else state)
        elif state is not None and state is not self.states[self._index[name]]:
            state.copy_(self.states[self._index[name]])
            self.states[self._index[name]] = state
        return self.states[self._index[name]]

    def record(self, name: str, amax: Tensor | float) -> None:
        """Record an amax seen in this step; `step()` takes the maximum of them into the history."""
        if isinstance(amax, int | float) and -math.inf < amax < 0:
            raise ValueError(f"amax of {name!r} is {amax!r}: a magnitude is not negative")
        state = self.register(name)
        # Detached: states outlive the step, and would keep the graph of `w.abs().max()` alive.
        amax = torch.as_tensor(amax, dtype=torch.float32, device=state.device).detach()
        if amax.dim():
            raise ValueError(f"amax of {name!r} has shape {tuple(amax.shape)}: one number (observe() takes a tensor)")
        finite = amax.isfinite()
        record_use(state, torch.where(finite, amax.abs(), 0.0), ~finite)

    def observe(self, name: str, x: Tensor) -> None:
        """Record the amax of a tensor: its maximum, or the manager's `percentile`."""
        state = self.register(name)
        record_use(state, tensor_amax(x, self.percentile).to(state.device), ~x.isfinite().all())

    def update_amax(self, name: str, amax: Tensor | float) -> None:
        """Record one step's amax and roll this tensor's history."""
        self.record(name, amax)
        self._roll(self._index[name])

    def get_scale(self, name: str) -> Multiplier:
        """Return the quantising multiplier FP8_MAX / (amax × margin), 0-d; 1 before any update.

        Its type marks it as a multiplier, so that `quantize`, `dequantize` and `fp8_linear` accept it.
        """
        if name not in self._index:
            return Multiplier.of(torch.ones((), dtype=torch.float32, device=self.device))
        self._arrange()
        i = self._index[name]
        scale, amax = self.states[i][SCALE], self._amax[i]
        # From the amax if there is one: 448 / (1 × 2) is 224, but the reciprocal of its reciprocal need not be.
        # Tensor by tensor: torch computes number / tensor as reciprocal × number, off by one unit at times.
        multiplier = (amax.new_full((), self._maximum[i]) / (amax * self._margin[i])).clamp(max=1 / SMALLEST_SCALE)
        multiplier = torch.where(amax > 0, multiplier, reciprocal(scale))
        return Multiplier.of(torch.where(scale > 0, multiplier, 1.0))

    def step(self) -> None:
        """Roll every history: call once per optimiser step. A second call without new uses changes nothing."""
        self.step_count += 1
        if self.states:
            self._roll()
        if self.exchange is not None:
            self.exchange.settle()

    def to(self, device: torch.device | str) -> None:
        """Move everything; states keep their identity, since layers hold references to them."""
        self.device = torch.device(device)
        for state in self.states:
            if state.device != self.device:
                state.data = state.data.to(self.device)

    def follow_optimizers(self, model: nn.Module | None = None) -> None:
        """Call `step()` after `optimizer.step()`, for as long as this manager lives.

        Every optimiser counts until one that holds Parameters of `model` has stepped; from then on only such ones do.
        (Sharding engines give their optimisers tensors of their own, so holding none proves nothing.)
        """
        self._follows = True
        if not _followers_hook:
            _followers_hook.append(register_optimizer_step_post_hook(_after_step))
        _followers[self] = _Trained(model) if model is not None else None

    def followed_model(self) -> nn.Module | None:
        """Return the model that `follow_optimizers` was given, if it still exists."""
        trained = _followers.get(self)
        return None if trained is None else trained.model()

    def _follow(self, optimizer: torch.optim.Optimizer, trained: _Trained | None) -> None:
        owns = trained is not None and _holds(optimizer, trained.parameters())
        self._has_own_optimizer |= owns
        if owns or not self._has_own_optimizer:
            self.step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._follows:  # a copy (of a whole model, say) follows on its own, and does not know its model
            self._has_own_optimizer = False
            self.follow_optimizers()

    @torch.no_grad()
    def _roll(self, only: int | None = None) -> None:
        """Roll every history, or that of one state. Nothing here waits for the device."""
        self._arrange()
        selected = slice(None) if only is None else slice(only, only + 1)
        mine = self.states[selected]
        states = torch.stack(mine)
        if only is None and self.exchange is not None:
            self.exchange.reduce(states)
        rolls = (states[:, SEEN] > 0) & (states[:, NON_FINITE].sum() == 0)
        amax = states[:, AMAX]

        history = self._history[selected]
        rolled = torch.cat([amax[:, None], history[:, :-1]], dim=1)
        history = torch.where(rolls[:, None], rolled, history)
        unset = self._ema[selected] == 0  # zeros before the first non-zero amax do not count
        ema = torch.where(unset, amax, EMA_DECAY * self._ema[selected] + (1 - EMA_DECAY) * amax)
        ema = torch.where(rolls, ema, self._ema[selected])
        steps = self._steps[selected] + rolls

        read = {"max": history.amax(dim=1), "most_recent": history[:, 0], "ema": ema}[self.algorithm]
        maximum, margin = self._limits[selected].unbind(dim=1)
        scale = torch.where(read > 0, (read / maximum * margin).clamp(min=SMALLEST_SCALE), 0.0)
        due = rolls & ((steps % self.interval == 0) | (self._amax[selected] == 0))
        states[:, SCALE] = torch.where(due, scale, states[:, SCALE])
        self._amax[selected] = torch.where(due, read, self._amax[selected])
        states[:, LAST_AMAX] = torch.where(rolls, amax, states[:, LAST_AMAX])
        states[:, AMAX : NON_FINITE + 1] = 0.0

        self._history[selected], self._ema[selected], self._steps[selected] = history, ema, steps
        torch._foreach_copy_(mine, list(states.unbind()))

    def _arrange(self) -> None:
        """Grow the history to all states, and bring it to their device."""
        if self.states and self.states[0].device != self.device:
            self.device = self.states[0].device
        missing = len(self.states) - len(self._steps)
        if missing or self._steps.device != self.device:
            with torch.inference_mode(False):
                for name in _PER_STATE:
                    old = getattr(self, name).to(self.device)
                    setattr(self, name, torch.cat([old, old.new_zeros(missing, *old.shape[1:])]))
        if len(self._limits) != len(self.states) or self._limits.device != self.device:
            with torch.inference_mode(False):
                limits = list(zip(self._maximum, self._margin, strict=True))
                self._limits = torch.tensor(limits, dtype=torch.float32, device=self.device).reshape(-1, 2)

    def histories(self) -> list[Tensor]:
        """Return what states are rolled by, to be read or written in place."""
        self._arrange()
        return [getattr(self, name) for name in _PER_STATE]

    def statistics(self, *, reset: bool = True) -> dict[str, dict[str, float]]:
        """Return statistics since the last reset, by name. Synchronises.

        `scale` and `amax` are the newest. `saturated` and `underflow` are shares of elements, `rescaled` is the share
        of uses that the delayed scale did not hold: those were quantised with their own amax.
        """
        if not self.states:
            return {}
        states = torch.stack(self.states)
        if reset:
            for state in self.states:
                state[SATURATED : CALLS + 1] = 0.0
                state[RESCALED] = 0.0
        statistics = {}
        for name, state in zip(self._index, states.tolist(), strict=True):
            if state[CALLS]:
                statistics[name] = {
                    "scale": state[SCALE],
                    "amax": state[AMAX] if state[SEEN] else state[LAST_AMAX],
                    "saturated": state[SATURATED] / state[CALLS],
                    "underflow": state[UNDERFLOW] / state[CALLS],
                    "rescaled": state[RESCALED] / state[CALLS],
                }
        return statistics

    def state_dict(self) -> dict[str, Any]:
        self._arrange()
        states = torch.stack(self.states) if self.states else torch.zeros(0, SLOTS, dtype=torch.float32)
        return {
            "names": self.names,
            "maximum": list(self._maximum),
            "margin": list(self._margin),
            "rows": states.cpu().clone(),
            **{name: getattr(self, name).cpu().clone() for name in _PER_STATE},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state; states keep their identity, since layers hold references to them."""
        saved_len = state["_history"].shape[1]
        if saved_len != self.history_len:
            raise ValueError(f"history_len={self.history_len}: the saved scaling state has {saved_len}; use that")
        for name, saved in zip(state["names"], state["maximum"], strict=True):
            mine = self._maximum[self._index[name]] if name in self._index else saved
            if mine != saved:
                raise ValueError(
                    f"{name}: the saved scaling state is for a format with maximum {saved:g}, this one has {mine:g}; "
                    "use the same fp8_format"
                )
        for i, name in enumerate(state["names"]):
            saved_slots = state["rows"][i]  # shorter if an earlier version wrote it
            self.register(name).zero_()[: len(saved_slots)].copy_(saved_slots)
            self._maximum[self._index[name]] = state["maximum"][i]
            self._margin[self._index[name]] = state["margin"][i]
        self._limits = torch.zeros(0, 2, dtype=torch.float32)
        self._arrange()
        index = torch.tensor([self._index[name] for name in state["names"]], dtype=torch.int64, device=self.device)
        for name in _PER_STATE:
            getattr(self, name)[index] = state[name].to(self.device)


def new_states(*shape: int, device: torch.device | str) -> Tensor:
    """Return empty states in FP32, outside inference mode, since training writes to them later.

    The default dtype is ignored: transformers sets it to the model's while it loads one.
    """
    with torch.inference_mode(False):
        return torch.zeros(*shape, SLOTS, dtype=torch.float32, device=device)


def holds(scale: Tensor, amax: Tensor, format: Format, margin: float) -> Tensor:
    """Return True if `scale` serves a tensor with this amax: nothing saturates, and the largest magnitude is normal.

    Growth by less than half a step of the format is rounded, not saturated: 3.5 % in E4M3, 7 % in E5M2. A `margin`
    below 1 asks for saturation, and gets as much as it asks for.
    """
    fits = amax * min(margin, 1.0) <= scale * format.saturation_threshold
    counts = amax * margin >= scale * format.smallest_normal
    return (scale > 0) & ((amax == 0) | (fits & counts))


def _holds(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> bool:
    mine = {id(parameter) for parameter in parameters}
    return any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"])


def record_use(state: Tensor, amax: Tensor, non_finite: Tensor) -> None:
    """Write one use of a tensor into its state."""
    state[AMAX] = torch.maximum(state[AMAX], amax)
    state[SEEN] += 1
    state[NON_FINITE] = torch.maximum(state[NON_FINITE], non_finite.float())
