"""Explanation of an out-of-memory error: what took the memory, and what would take less.

Present memory is measured (`step_memory.py`). Savings are estimates: exact for states and gradients, whose sizes are
known; for activations, shares of the memory beside weights, gradients and states.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.linear import FP8Linear
from octavo.nn.sharded import local
from octavo.optim.host_states import AHEAD
from octavo.optim.in_backward import steps_in_backward
from octavo.optim.split_masters import has_master
from octavo.optim.step_memory import StepMemory, device_memory, in_words, measure_now, tensor_bytes

# Shares of activations, by `octavo plan 8b`: 26.2 GiB in FP8; 15.3 with gate and up in FP8; 2.2 with checkpointing.
FP8_ACTIVATIONS = 0.4
CHECKPOINTING = 0.9
LOW_BIT = {"adamw8bit": 2 * (1 + 4 / 256), "adamw4bit": 2 * (1 / 2 + 4 / 128)}  # bytes of states per trained parameter
SMALLEST = 0.01  # share of the memory in use below which a saving is not listed
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

# Instructions in the caller's terms, by the names of `savings`.
Ways = Mapping[str, str]


@contextmanager
def explained(
    model: nn.Module, optimizer: Any, ways: Callable[[], Ways], last_checkpoint: Callable[[], str]
) -> Iterator[None]:
    """Add an explanation to an out-of-memory error, which callers that retry a smaller batch still recognise."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(explain(error, model, optimizer, ways(), last_checkpoint()))
        raise


def explain(error: BaseException, model: nn.Module, optimizer: Any, ways: Ways, last_checkpoint: str = "") -> str:
    """Return a few lines about the memory and what would take less. `last_checkpoint`: a sentence about it."""
    memory = measure_now(model, optimizer)
    there = device_memory(next(model.parameters()).device)
    asked = _asked_for(error)
    missing = 0 if there is None or asked is None else max(asked - there.free, 0)
    headline = "out of GPU memory"
    if asked is not None:
        headline += f": {in_words(asked)} more were asked for"
    if there is not None:
        headline += f", {in_words(there.free)} of {in_words(there.total)} were free"
    users = ", ".join(f"{name} {in_words(size)}" for name, size in memory.parts.items())
    lines = [headline, f"  what took it: {users}"]
    taken = memory.peak if memory.peak is not None else memory.weights + memory.gradients + memory.states
    saved = savings(model, optimizer, memory)
    offered = {name: size for name, size in saved.items() if name in ways and (size is None or size > SMALLEST * taken)}
    lines += ["  what would take less:"] * bool(offered)
    for name, size in sorted(offered.items(), key=lambda item: -(item[1] or 0)):
        less = "less" if size is None else f"about {in_words(size)} less"
        enough = " (alone not enough)" if size is not None and size < missing else ""
        lines.append(f"    {less}: {ways[name]}{enough}")
    if last_checkpoint:
        lines.append(f"  {last_checkpoint}")
    return "\n".join(lines)


def savings(model: nn.Module, optimizer: Any, memory: StepMemory) -> dict[str, int | None]:
    """Return the bytes that each measure would save; None where activations are not measured.

    Measures in use already are left out. States that AdamW creates only in its first step count, too.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # unwrap Accelerate's
    trained = [p for p in model.parameters() if p.requires_grad]
    numbers, gradients = sum(map(_elements, trained)), sum(tensor_bytes(p) for p in trained)
    largest = max(map(_elements, trained), default=0)
    halves = sum(_elements(p) for p in trained if has_master(optimizer, p))  # each with a low half, and FP32 moments
    to_come = 2 * gradients + (2 + 4) * halves if isinstance(optimizer, torch.optim.Adam) else 0
    states = max(memory.states, to_come)

    def share(fraction: float) -> int | None:
        return None if memory.rest is None else round(fraction * memory.rest)

    bytes_saved = {"batch": share(0.5)}
    if _can_keep_fp8(model):
        bytes_saved["activations"] = share(FP8_ACTIVATIONS)
    if getattr(model, "supports_gradient_checkpointing", False) and not getattr(model, "is_gradient_checkpointing", 0):
        bytes_saved["checkpointing"] = share(CHECKPOINTING)
    if not steps_in_backward(optimizer):
        bytes_saved["release"] = gradients - max((tensor_bytes(p) for p in trained), default=0)
    if not memory.host and numbers:
        bytes_saved |= {name: round(states - 2 * halves - numbers * each) for name, each in LOW_BIT.items()}
        bytes_saved["offload"] = round(states * max(1 - (1 + AHEAD) * largest / numbers, 0))
    return bytes_saved


def _elements(p: Tensor) -> int:
    """Return the number of elements that this rank holds."""
    return local(p.detach()).numel()


def _can_keep_fp8(model: nn.Module) -> bool:
    """Return True if gated MLPs run in FP8 and save gate and up in BF16."""
    linears = ((name, m) for name, m in model.named_modules() if isinstance(m, FP8Linear))
    return any(name.endswith("gate_proj") and linear.config.activations == "bf16" for name, linear in linears)


def _asked_for(error: BaseException) -> int | None:
    """Read the size of the failed allocation from torch's message."""
    match = re.search(r"Tried to allocate ([\d.]+) (bytes|[KMGT]iB)", str(error))
    return round(float(match[1]) * UNITS[match[2]]) if match else None
