"""Scales in the state that Accelerate saves: `fp8_scaling_0.pt` of the first model, `…_1.pt` of the second.

Each rank has scales of its own, and so a file of its own: the first `fp8_scaling_0.pt`, the second
`fp8_scaling_0.rank1.pt`. A state that is loaded on another number of ranks gives all of them one scaling state: the
larger of each number.
"""

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.dist.checkpoint import merged
from octavo.dist.together import rank
from octavo.nn.linear import LinearInFP8
from octavo.nn.sharded import ranks


def save_with_state(accelerator: Any, model: nn.Module, file: str) -> None:
    """Save and load scales with `save_state` and `load_state`.

    Not by `register_for_checkpointing`: that fails on states saved without FP8.
    """
    managers = list(dict.fromkeys(module.scaling for module in model.modules() if isinstance(module, LinearInFP8)))

    def save(_models: Any, _weights: Any, folder: str) -> None:
        torch.save([manager.state_dict() for manager in managers], _of_rank(folder, file, rank()))
        if rank() == 0:
            _of_rank(folder, file, ranks()).unlink(missing_ok=True)  # the end of an earlier save by more ranks

    def load(_models: Any, folder: str) -> None:
        numbers = itertools.takewhile(lambda number: _of_rank(folder, file, number).exists(), itertools.count())
        saved = [torch.load(_of_rank(folder, file, n), map_location="cpu", weights_only=True) for n in numbers]
        for i, manager in enumerate(managers if saved else []):
            states = [state[i] for state in saved]
            manager.load_state_dict(states[rank()] if len(states) == ranks() else merged(states))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _of_rank(folder: str, file: str, number: int) -> Path:
    """The file of a rank: `fp8_scaling_0.pt` of the first, `fp8_scaling_0.rank1.pt` of the second."""
    return Path(folder) / (f"{file.removesuffix('.pt')}.rank{number}.pt" if number else file)
