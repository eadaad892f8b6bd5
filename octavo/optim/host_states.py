"""Optimiser states in pinned host memory, which are on the GPU only while their parameter's step is computed.

Parameters are stepped in the same order in every step, so the states of the next ones are copied while one is stepped
(`transfers.py`). Low-bit states keep the copies small: an 8B has 8 GB of them in 4 bits, and 64 in FP32. Master
weights, if any, are copied with the states.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from octavo.nn.sharded import local, placed_like
from octavo.optim.split_masters import LOW, has_master, joined
from octavo.optim.transfers import State, Transfers, Trip, is_moved, mapped

AHEAD = 2  # parameters whose states are prefetched
_MASTER = "master"


class HostStates:
    """States of an optimiser in host memory. `masters`: FP32 weights there of parameters that hold other values."""

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Mapping[Tensor, Tensor] | None = None) -> None:
        self.optimizer = optimizer
        self._host_copies: dict[Tensor, State] = {p: {_MASTER: master} for p, master in (masters or {}).items()}
        self._written: dict[Tensor, Any] = {}  # event after which the host copy is complete
        self._coming: dict[Tensor, Trip] = {}
        self._here: dict[Tensor, Trip] = {}
        self._after: dict[Tensor, Tensor] = {}  # the parameter that followed in the previous step
        self._last_stepped: Tensor | None = None
        self._transfers: dict[torch.device, Transfers] = {}
        self._order: list[Any] = []  # parameters of a checkpoint that is being loaded, and below their states
        self._loaded: dict[Any, State] = {}
        self._hooks = [
            optimizer.register_state_dict_pre_hook(lambda _optimizer: self.wait()),
            optimizer.register_load_state_dict_pre_hook(self._take_loaded),
            optimizer.register_load_state_dict_post_hook(self._store_loaded),
        ]
        for parameter, state in list(optimizer.state.items()):
            self._store(parameter, state, torch.float32 if self._is_stepped_in_fp32(parameter) else None)

    def bring(self, parameter: Tensor) -> Tensor | None:
        """Copy the states of `parameter` to its device, and start copying the next ones. Returns its master."""
        trip = self._coming.pop(parameter, None) or self._start(parameter)
        self._here[parameter] = trip
        self._of(parameter).wait_for(trip)
        state = dict(trip.state)
        master = state.pop(_MASTER, None)
        if state:  # else the optimiser creates it
            self.optimizer.state[parameter] = state
        for following in self._following(parameter):
            if following not in self._coming and following not in self._here:
                self._coming[following] = self._start(following)
        return master

    def _start(self, parameter: Tensor) -> Trip:
        return self._of(parameter).bring(self._host_copies.get(parameter, {}), self._written.get(parameter))

    def _following(self, parameter: Tensor) -> Iterator[Tensor]:
        following = self._after.get(parameter)
        for _ in range(AHEAD):
            if following is None or following is parameter:
                return
            yield following
            following = self._after.get(following)

    def send(self, parameter: Tensor, master: Tensor | None = None) -> None:
        """Copy the states of `parameter`, and its master, back to the host, where the optimiser finds them."""
        state = self.optimizer.state.get(parameter, {}) | ({} if master is None else {_MASTER: master})
        host_copy = self._host_copies.setdefault(parameter, {})
        trip = self._here.pop(parameter, None)
        self._written[parameter] = self._of(parameter).send(state, host_copy, trip)
        self._show(parameter)
        if self._last_stepped is not None:
            self._after[self._last_stepped] = parameter
        self._last_stepped = parameter

    def master(self, parameter: Tensor) -> Tensor:
        """Return the up-to-date master in host memory."""
        self.wait()
        return self._host_copies[parameter][_MASTER]

    def wait(self) -> None:
        """Wait for all transfers, after which the host may read and change its copies."""
        for transfers in self._transfers.values():
            transfers.synchronize()

    def set_master(self, parameter: Tensor, values: Tensor) -> None:
        self.wait()
        self._cancel(parameter)
        self._host_copies[parameter][_MASTER].copy_(values)

    def restore(self) -> None:
        """Move all states to the devices of their parameters, and stop offloading."""
        self.wait()
        self._coming.clear()
        for parameter, host_copy in self._host_copies.items():
            dtype = parameter.dtype if _MASTER in host_copy else None
            states = {name: _in_dtype(value, dtype) for name, value in host_copy.items() if name != _MASTER}
            if states:
                self.optimizer.state[parameter] = mapped(states, partial(_copied_to, parameter.device))
        self._host_copies.clear()
        for hook in self._hooks:
            hook.remove()

    def _cancel(self, parameter: Tensor) -> None:
        trip = self._coming.pop(parameter, None)
        if trip is not None:
            self._of(parameter).cancel(trip)

    def _of(self, parameter: Tensor) -> Transfers:
        device = parameter.device
        if device not in self._transfers:
            self._transfers[device] = Transfers(device)
        return self._transfers[device]

    def _show(self, parameter: Tensor) -> None:
        """Give the optimiser the states in host memory."""
        state = {name: value for name, value in self._host_copies[parameter].items() if name != _MASTER}
        if state:
            self.optimizer.state[parameter] = state

    def _store(self, parameter: Tensor, state: State, dtype: torch.dtype | None) -> None:
        """Copy states that lie elsewhere into host memory."""
        host_copy = self._host_copies.setdefault(parameter, {})
        to_host = partial(_to_host, parameter.device)
        if has_master(self.optimizer, parameter):
            state = joined(state)
        in_dtype = {name: value if name == LOW else _in_dtype(value, dtype) for name, value in state.items()}
        host_copy |= mapped(in_dtype, to_host)
        self._show(parameter)

    def _is_stepped_in_fp32(self, parameter: Tensor) -> bool:
        return parameter in self._host_copies or has_master(self.optimizer, parameter)

    def _take_loaded(self, _optimizer: Any, loaded: dict[str, Any]) -> dict[str, Any]:
        """Take the states out of a loaded checkpoint; torch would put them all on the GPU, in the parameters' dtype."""
        states = loaded["state"].items()
        parameters = chain.from_iterable(group["params"] for group in loaded["param_groups"])
        self._loaded = {i: {name: x for name, x in state.items() if is_moved(x)} for i, state in states}
        self._order = list(parameters)
        rest = {i: {name: x for name, x in state.items() if not is_moved(x)} for i, state in states}
        return {**loaded, "state": rest}

    def _store_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        self.wait()
        self._last_stepped = None
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for i, parameter in zip(self._order, parameters, strict=True):
            self._cancel(parameter)
            host_copy = self._host_copies.pop(parameter, {})
            if _MASTER in host_copy:
                self._host_copies[parameter] = {_MASTER: host_copy[_MASTER]}
            del host_copy  # frees its memory for the loaded state
            state = optimizer.state.get(parameter, {}) | self._loaded.pop(i, {})
            if state:
                # The dtype of the tensor that is stepped, as in torch.
                in_fp32 = self._is_stepped_in_fp32(parameter)
                self._store(parameter, state, torch.float32 if in_fp32 else parameter.dtype)


def _in_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast a plain floating-point state; low-bit states have formats of their own."""
    if dtype is None or not is_moved(value) or not value.is_floating_point():
        return value
    mine = local(value)
    return value if hasattr(mine, "__tensor_flatten__") else placed_like(mine.to(dtype), value)


def _to_host(device: torch.device, x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu", pin_memory=device.type == "cuda").copy_(x)


def _copied_to(device: torch.device, x: Tensor) -> Tensor:
    return x.to(device, copy=True)
