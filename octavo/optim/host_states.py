"""Optimiser states that live in host memory, pinned, and are on the GPU only while their parameter's step is computed.

Copies run on a stream of their own. Parameters come in the same order in every step, so while one is stepped the states
of those after it are on their way. With low-bit states there is little to move: an 8B with 4-bit states has 8 GB, which
go there and back in about the time that backward takes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

AHEAD = 2  # parameters whose states are on their way
State = dict[str, Any]


class HostStates:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._rooms: dict[Tensor, State] = {}
        self._coming: dict[Tensor, tuple[State, Any]] = {}
        self._after: dict[Tensor, Tensor] = {}  # the parameter that came next in the step before
        self._last: Tensor | None = None
        self._streams: dict[torch.device, Any] = {}
        self._hooks = [
            optimizer.register_state_dict_pre_hook(lambda _optimizer: self.wait()),
            optimizer.register_load_state_dict_post_hook(lambda _optimizer: self._send_all()),
        ]
        self._send_all()

    def bring(self, parameter: Tensor) -> None:
        """The states of `parameter` to its device, and those of the next ones on their way."""
        if not self.optimizer.state.get(parameter):
            return  # its first step
        state, event = self._coming.pop(parameter) if parameter in self._coming else self._copy_in(parameter)
        if event is not None:
            stream = torch.cuda.current_stream(parameter.device)
            stream.wait_event(event)
            _each(state, lambda x: x.record_stream(stream) if x.is_cuda else None)
        self.optimizer.state[parameter] = state
        for following in self._following(parameter):
            if following not in self._coming and self.optimizer.state.get(following):
                self._coming[following] = self._copy_in(following)

    def _following(self, parameter: Tensor) -> Iterator[Tensor]:
        following = self._after.get(parameter)
        for _ in range(AHEAD):
            if following is None or following is parameter:
                return
            yield following
            following = self._after.get(following)

    def send(self, parameter: Tensor) -> None:
        """The states of `parameter` back to the host, where the optimiser finds them."""
        state = self.optimizer.state[parameter]
        room = self._rooms.get(parameter)
        if room is None:
            room = self._rooms[parameter] = _mapped(state, _pinned)
        stream = self._stream_of(parameter)
        if stream is None:
            _copy(room, state)
        else:
            stream.wait_stream(torch.cuda.current_stream(parameter.device))
            with torch.cuda.stream(stream):
                _copy(room, state)
                _each(state, lambda x: x.record_stream(stream) if x.is_cuda else None)
        self.optimizer.state[parameter] = room
        if self._last is not None:
            self._after[self._last] = parameter
        self._last = parameter

    def wait(self) -> None:
        """Until what the host has is what the devices had."""
        for stream in self._streams.values():
            stream.synchronize()

    def give_back(self) -> None:
        """All states to where their parameters are, for good."""
        self.wait()
        self._coming.clear()
        for parameter in list(self._rooms):
            to = partial(_copied_to, parameter.device)
            self.optimizer.state[parameter] = _mapped(self.optimizer.state[parameter], to)
        self._rooms.clear()
        for hook in self._hooks:
            hook.remove()

    def _copy_in(self, parameter: Tensor) -> tuple[State, Any]:
        room, stream = self.optimizer.state[parameter], self._stream_of(parameter)
        if stream is None:
            return _mapped(room, lambda x: x.clone()), None
        with torch.cuda.stream(stream):
            state = _mapped(room, lambda x: x.to(parameter.device, non_blocking=True))
            return state, stream.record_event()

    def _stream_of(self, parameter: Tensor) -> Any:
        """The one for copies from and to the parameter's device; None on a CPU."""
        device = parameter.device
        if device.type == "cuda" and device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams.get(device)

    def _send_all(self) -> None:
        """After loading, which puts states where the parameters are."""
        self._coming.clear()
        self._last = None
        for parameter, state in list(self.optimizer.state.items()):
            if state:
                self._rooms.pop(parameter, None)
                self.send(parameter)
        self._last = None


def _is_moved(value: Any) -> bool:
    """Not counters, which stay on the host as they are."""
    return isinstance(value, Tensor) and value.dim() > 0


def _mapped(state: State, function: Callable[[Tensor], Tensor]) -> State:
    return {name: _map(value, function) if _is_moved(value) else value for name, value in state.items()}


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Of a low-bit state, each of the tensors that it consists of."""
    if not hasattr(value, "__tensor_flatten__"):
        return function(value)
    names, context = value.__tensor_flatten__()
    inner = {name: function(getattr(value, name)) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())


def _each(state: State, function: Callable[[Tensor], Any]) -> None:
    def look(x: Tensor) -> Tensor:
        function(x)
        return x

    _mapped(state, look)


def _copy(room: State, state: State) -> None:
    for name, value in state.items():
        if not _is_moved(value):
            room[name] = value
        elif hasattr(value, "__tensor_flatten__"):
            for part in value.__tensor_flatten__()[0]:
                getattr(room[name], part).copy_(getattr(value, part), non_blocking=True)
        else:
            room[name].copy_(value, non_blocking=True)


def _copied_to(device: torch.device, x: Tensor) -> Tensor:
    return x.to(device, copy=True)


def _pinned(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
