"""States of the random number generators that a step draws from: dropout, stochastic rounding, LayerDrop."""

import random
from collections.abc import Iterable, Mapping
from typing import Any

import torch


def get_rng_states(devices: Iterable[torch.device]) -> dict[str, Any]:
    """Return the states of Python, of torch on the CPU, which also seeds Octavo's kernels, and of GPUs in `devices`."""
    gpus = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    return {
        "python": random.getstate(),
        "cpu": torch.get_rng_state(),
        "cuda": {index: torch.cuda.get_rng_state(index) for index in gpus},
    }


def set_rng_states(states: Mapping[str, Any]) -> None:
    """Restore saved states. States of absent GPUs are ignored: a CPU draws other numbers anyway."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["cpu"].cpu())
    for index, state in states["cuda"].items():
        if index < torch.cuda.device_count():
            torch.cuda.set_rng_state(state.cpu(), index)
