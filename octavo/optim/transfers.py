"""Copies of a parameter's states between host memory and its device. A state is a dict, as optimisers keep it.

On a GPU each direction has its own stream, so that both directions of the bus are used at once, and the host never
waits. States are copied into buffers that are reused: memory from the allocator would stay taken until the copy back is
done, while the host, far ahead of the GPU, would get new memory for the next states, until all states of a model were
there. A copy into a buffer waits, on the device, for the copy out of it.

    inwards    wait until the host copy is written and the buffer is free     host copy → buffer
    compute    wait for that copy                                             the optimiser's step
    outwards   wait for the step                                              buffer → host copy

Of a sharded state (DTensor), this rank's shard is copied; the optimiser finds a DTensor in either place.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.nn.sharded import is_sharded, local, placed_like

State = dict[str, Any]


@dataclass
class Trip:
    """A state on its way to the device, or there."""

    state: State
    arrived: Any = None  # an event
    buffers: list[Tensor] = field(default_factory=list)


class Transfers:
    """Transfers from and to one device; on a CPU, plain copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        streams: list[Any] = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)]
        self._in, self._out = streams
        self._free: dict[int, deque[tuple[Tensor, Any]]] = {}  # by size: buffers, and when they will be free

    def bring(self, host_copy: State, written: Any) -> Trip:
        """Start copying host memory to the device. `written`: the event that `send` returned for it, if any."""
        trip = Trip({})
        if self._in is None:
            trip.state = mapped(host_copy, lambda x: x.clone())
            return trip
        with torch.cuda.stream(self._in):
            if written is not None:
                self._in.wait_event(written)
            trip.state = mapped(host_copy, lambda x: self._land(x, trip))
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
        # Not a view of the buffer, which a compiler of the step would have to recreate.
        landed = torch.empty(0, dtype=x.dtype, device=self.device)
        return landed.set_(buffer.untyped_storage(), 0, x.shape, x.stride()).copy_(x, non_blocking=True)

    def wait_for(self, trip: Trip) -> None:
        """Make the current stream wait for the state."""
        if trip.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(trip.arrived)

    def send(self, state: State, host_copy: State, trip: Trip | None) -> Any:
        """Copy a state to host memory after the work queued so far; allocates memory for new entries."""
        new = [name for name, value in state.items() if is_moved(value) and name not in host_copy]
        for name in new:
            host_copy[name] = map_tensor(state[name], pinned_like)
        if self._out is None:
            copy(host_copy, state)
            return None
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            copy(host_copy, state)
            event = self._out.record_event()
        buffers = trip.buffers if trip is not None else []
        if new:
            # The optimiser has just created these states; without waiting, the allocator would not get their memory
            # back before all states existed.
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
        """Return the buffers of a trip whose state is not needed."""
        self._return(trip.buffers, trip.arrived)

    def _return(self, buffers: list[Tensor], event: Any) -> None:
        for buffer in buffers:
            self._free[buffer.nbytes].append((buffer, event))

    def synchronize(self) -> None:
        """Wait until the host may read and write all of its copies."""
        for stream in (self._in, self._out):
            if stream is not None:
                stream.synchronize()


def is_moved(value: Any) -> bool:
    """Return True for tensors that are transferred; counters stay where they are."""
    return isinstance(value, Tensor) and value.dim() > 0


def mapped(state: State, function: Callable[[Tensor], Tensor]) -> State:
    return {name: map_tensor(value, function) if is_moved(value) else value for name, value in state.items()}


def map_tensor(value: Any, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `function` to a tensor, or to each inner tensor of a low-bit state; of a shard, to this rank's."""
    if is_sharded(value):
        return placed_like(map_tensor(local(value), function), value)
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


def copy(host_copy: State, state: State) -> None:
    for name, value in state.items():
        if not is_moved(value):
            host_copy[name] = value
            continue
        here, there = local(value), local(host_copy[name])
        if hasattr(here, "__tensor_flatten__"):
            for inner in here.__tensor_flatten__()[0]:
                getattr(there, inner).copy_(getattr(here, inner), non_blocking=True)
        else:
            there.copy_(here, non_blocking=True)


def pinned_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
