"""Memory of a training step by kind: weights, gradients, optimiser states, and the rest of the peak.

    memory = measure_memory(model, optimizer)    # after a step or more
    print(memory)                                # or rich.print(memory), for a table

The first three are sizes of existing tensors. Activations and temporary buffers are the remainder of the allocator's
peak, `torch.cuda.max_memory_allocated`, since the process began or since `torch.cuda.reset_peak_memory_stats()`. A CPU
has no such figure. Of sharded tensors, the bytes of this rank's shards count.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from octavo.nn.fp8_only import offloaded_of
from octavo.nn.sharded import local
from octavo.optim.in_backward import steps_in_backward

GIB, MIB = 2**30, 2**20
NOT_MEASURED = "not measured"
REST = "activations and temporary"


class DeviceMemory(NamedTuple):
    """Bytes of a device: the peak of tensors, what is free, and the total."""

    peak: int
    free: int
    total: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory of a GPU, or None for a CPU. Memory that torch has cached but not allocated counts as free."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return DeviceMemory(torch.cuda.max_memory_allocated(device), free + unused, total)


@dataclass(frozen=True)
class StepMemory:
    """Bytes by kind, on `device`. `host`: states and masters in host memory. `peak`: None if it was not measured."""

    device: str
    weights: int
    gradients: int
    states: int
    host: int
    peak: int | None

    @property
    def rest(self) -> int | None:
        """Activations and temporary buffers; at least 0, since not all gradients may exist at the peak."""
        return None if self.peak is None else max(self.peak - self.weights - self.gradients - self.states, 0)

    @property
    def parts(self) -> dict[str, int | None]:
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimiser states": self.states,
            REST: self.rest,
        }

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {in_words(size)}" for name, size in self.parts.items())
        host = f"; {in_words(self.host)} of states and masters in host memory" if self.host else ""
        return f"peak {in_words(self.peak)} on {self.device}: {parts}{host}"

    def __rich__(self) -> Any:
        """Return the table that rich prints."""
        from rich.table import Table

        table = Table(title=f"Memory of a step on {self.device}", title_justify="left")
        table.add_column("")
        table.add_column("measured", justify="right")
        for name, size in self.parts.items():
            table.add_row(name, in_words(size))
        table.add_section()
        table.add_row("peak", in_words(self.peak))
        if self.host:
            table.add_row("in host memory", in_words(self.host))
        return table


def measure_memory(model: nn.Module, optimizer: Any) -> StepMemory:
    """Return the memory that a step takes; call it after one or more steps. Freed gradients count as well.

    `gradients`: all that are trained, or the largest alone where each is applied within backward.
    """
    trained = [tensor_bytes(p) for p in model.parameters() if p.requires_grad]
    made = max(trained, default=0) if steps_in_backward(optimizer) else sum(trained)
    return _measured(model, optimizer, max(made, live_gradients(model)))


def measure_now(model: nn.Module, optimizer: Any) -> StepMemory:
    """Return the same with the gradients that exist now, as in a step that has failed half-way."""
    return _measured(model, optimizer, live_gradients(model))


def live_gradients(model: nn.Module) -> int:
    return sum(tensor_bytes(p.grad) for p in model.parameters() if p.grad is not None)


def _measured(model: nn.Module, optimizer: Any, gradients: int) -> StepMemory:
    device = next(model.parameters()).device
    of_model = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    states = list(_states(optimizer, of_model))
    there = device_memory(device)
    return StepMemory(
        device=str(device),
        weights=sum(_weight_bytes(x) for x in of_model.values() if x.device.type == device.type),
        gradients=gradients,
        states=sum(tensor_bytes(x) for x in states if x.device.type == device.type),
        host=sum(tensor_bytes(x) for x in states if x.device.type != device.type),
        peak=None if there is None else there.peak,
    )


def _states(optimizer: Any, of_model: Mapping[int, Tensor]) -> Iterator[Tensor]:
    """Yield optimiser states and master weights, without step counters.

    Parameters that are not the model's are masters; so are the masters of weights that are in FP8 only.
    """
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if id(parameter) not in of_model)
    for offloaded in map(offloaded_of, of_model.values()):
        if offloaded is not None:
            yield offloaded.read()


def _weight_bytes(x: Tensor) -> int:
    """Return the bytes of a weight; a Parameter in FP8 only has shape and dtype but no memory of its own."""
    offloaded = offloaded_of(x)
    return tensor_bytes(x if offloaded is None else offloaded.data)


def tensor_bytes(x: Tensor) -> int:
    """Return the bytes of a tensor on this rank; for a low-bit state, those of its inner tensors."""
    x = local(x.detach())
    if not hasattr(x, "__tensor_flatten__"):
        return x.nbytes
    names, _ = x.__tensor_flatten__()
    return sum(tensor_bytes(getattr(x, name)) for name in names)


def in_words(size: int | None) -> str:
    if size is None:
        return NOT_MEASURED
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / MIB:.1f} MiB"
