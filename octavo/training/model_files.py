"""The weights of a model as one file: safetensors, or `torch.save`'s format if the name ends in `.pt` or `.pth`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.dist.whole import cut, has_shards

_PICKLED = (".pt", ".pth")


class Gathered(nn.Module):
    """A model that consists of its state dict alone, gathered from ranks."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        self._state = state

    def state_dict(self, *_args: Any, **_kwargs: Any) -> Any:
        return dict(self._state)


def write_model(model: nn.Module, path: Path) -> None:
    """Write the weights of a model; the file appears under its name only when it is complete."""
    temporary = path.with_name(path.name + ".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in _PICKLED:
        torch.save(model.state_dict(), temporary)
    else:
        from safetensors.torch import save_model

        save_model(model, str(temporary))
    temporary.replace(path)


def read_model(model: nn.Module, path: Path) -> None:
    """Read weights into a model's own Parameters: of a sharded one, into this rank's shards."""
    if path.suffix in _PICKLED:
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(cut(state, model) if has_shards(model) else state)
    elif has_shards(model):
        from safetensors.torch import load_file

        model.load_state_dict(cut(load_file(path), model))
    else:
        from safetensors.torch import load_model

        load_model(model, str(path))
