"""Copies of a parameter's states between host memory and its device: a state is a dict, as optimisers keep it.

On a GPU each direction has a stream of its own, so that both ways of the bus are used at once, and the host waits for
nothing. What comes lands in buffers that are used over and over: memory from the allocator would have to be kept until
the copy back is done, while the host, which is far ahead of the GPU, would be given new memory for what comes next,
until all states of a model were there. Who takes a buffer waits, on the device, for the copy that leaves it.

    inwards    wait until the room is written and the buffer is free     room → buffer
    compute    wait for that copy                                        the optimiser's step
    outwards   wait for the step                                         buffer → room
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


@dataclass
class Trip:
    """A state on its way to the device, or there."""

    state: State
    arrived: Any = None  # an event
    buffers: list[Tensor] = field(default_factory=list)


class Transfers:
    """Of one device. On a CPU everything is copied at once, and copies are plain ones."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        streams: list[Any] = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)]
        self._in, self._out = streams
        self._free: dict[int, deque[tuple[Tensor, Any]]] = {}  # by size: buffers, and when they will be free

    def bring(self, room: State, written: Any) -> Trip:
        """Start to copy a room to the device. `written`: what `send` returned for it, if anything."""
        trip = Trip({})
        if self._in is None:
            trip.state = mapped(room, lambda x: x.clone())
            return trip
        with torch.cuda.stream(self._in):
            if written is not None:
                self._in.wait_event(written)
            trip.state = mapped(room, lambda x: self._land(x, trip))
            trip.arrived = self._in.record_event()
        return trip

    def _land(self, x: Tensor, trip: Trip) -> Tensor:
        free = self._free.setdefault(x.nbytes, deque())
        if free:
            buffer, left = free.popleft()
            self._in.wait_event(left)
        else:
            buffer = torch.empty(x.nbytes, dtype=torch.uint8, device=self.device)
        trip.buffers.append(buffer)
        # Not a view of the buffer: what compiles a step would have to know how to make it again.
        landed = torch.empty(0, dtype=x.dtype, device=self.device)
        return landed.set_(buffer.untyped_storage(), 0, x.shape, x.stride()).copy_(x, non_blocking=True)

    def wait_for(self, trip: Trip) -> None:
        """What is computed from here on finds the state on the device."""
        if trip.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(trip.arrived)

    def send(self, state: State, room: State, trip: Trip | None) -> Any:
        """Copy a state into its room, after what has been computed so far. What has no place there yet, gets one."""
        new = [name for name, value in state.items() if is_moved(value) and name not in room]
        for name in new:
            room[name] = map_tensor(state[name], pinned_like)
        if self._out is None:
            copy(room, state)
            return None
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            copy(room, state)
            event = self._out.record_event()
        buffers = trip.buffers if trip is not None else []
        if new:
            # In its first step an optimiser makes the states, and the allocator would not get their memory back before
            # all of them were there.
            self._out.synchronize()
        else:
            mine = {buffer.untyped_storage().data_ptr() for buffer in buffers}
            each(state, lambda x: None if x.untyped_storage().data_ptr() in mine else self._keep_until_sent(x))
        self._return(buffers, event)
        return event

    def _keep_until_sent(self, x: Tensor) -> None:
        if x.is_cuda:
            x.record_stream(self._out)

    def cancel(self, trip: Trip) -> None:
        """A trip that nobody waits for any more."""
        self._return(trip.buffers, trip.arrived)

    def _return(self, buffers: list[Tensor], event: Any) -> None:
        for buffer in buffers:
            self._free[buffer.nbytes].append((buffer, event))

    def synchronize(self) -> None:
        """Until the host may read and write every room."""
        for stream in (self._in, self._out):
            if stream is not None:
                stream.synchronize()


def is_moved(value: Any) -> bool:
    """Not counters, which stay where they are."""
    return isinstance(value, Tensor) and value.dim() > 0


def mapped(state: State, function: Callable[[Tensor], Tensor]) -> State:
    return {name: map_tensor(value, function) if is_moved(value) else value for name, value in state.items()}


def map_tensor(value: Any, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Of a low-bit state, each of the tensors that it consists of."""
    if not hasattr(value, "__tensor_flatten__"):
        return function(value)
    names, context = value.__tensor_flatten__()
    inner = {name: function(getattr(value, name)) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())


def each(state: State, function: Callable[[Tensor], Any]) -> None:
    def look(x: Tensor) -> Tensor:
        function(x)
        return x

    mapped(state, look)


def copy(room: State, state: State) -> None:
    for name, value in state.items():
        if not is_moved(value):
            room[name] = value
        elif hasattr(value, "__tensor_flatten__"):
            for part in value.__tensor_flatten__()[0]:
                getattr(room[name], part).copy_(getattr(value, part), non_blocking=True)
        else:
            room[name].copy_(value, non_blocking=True)


def pinned_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
