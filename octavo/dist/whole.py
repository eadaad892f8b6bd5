"""The whole of what ranks hold in shards, and the shards of what is whole: of one tensor, or of a model's state.

Gathering is collective: all ranks call it, in the same order. Of a model, one tensor at a time is whole on each rank,
and rank 0 alone keeps them, in host memory. Cutting needs no other rank.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo.dist.together import rank
from octavo.nn.frozen import SCALE_NAME, FP8FrozenLinear
from octavo.nn.sharded import is_sharded, local, place_of, placed_like


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor, on every rank; a tensor that is whole as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    mine = local(tensor.detach()).to(tensor.device_mesh.device_type)  # CPUOffloadPolicy keeps it in host memory
    if mine.element_size() > 1:
        return _gathered(mine, tensor)
    # As bytes: gloo knows no FP8.
    return _gathered(mine.view(torch.uint8), tensor).view(mine.dtype)


def _gathered(mine: Tensor, like: Tensor) -> Tensor:
    sharded = placed_like(mine, like)
    assert isinstance(sharded, DTensor)
    return sharded.full_tensor()


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor distributed as `like`, which has its size; on the device of `like`."""
    if not isinstance(like, DTensor):
        return tensor
    return placed_like(tensor.reshape(like.shape)[place_of(like)].to(local(like.detach()).device, copy=True), like)


def has_shards(model: nn.Module) -> bool:
    return any(map(is_sharded, model.parameters()))


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model with shards: whole tensors in host memory on rank 0, nothing on the others.

    Parameters with two names (a tied head) are gathered once, and share their memory.
    """
    first_names = _first_names(model)
    kept: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        first = first_names.get(name, name)
        gathered = None if first != name else _alone(whole(tensor)).cpu()
        if rank() == 0:
            kept[name] = kept[first] if gathered is None else gathered
    for name, module in model.named_modules():
        key = f"{name}.{SCALE_NAME}" if name else SCALE_NAME
        if isinstance(module, FP8FrozenLinear) and module.granularity == "tensor" and key in kept:
            kept[key] = kept[key].reshape(())  # as the state dict of a whole one shows it
    return kept


def cut(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's shards of a state dict of whole tensors, in which a tied head may have one of its names."""
    first_names = _first_names(model)
    by_first = {first_names.get(name, name): tensor for name, tensor in state.items()}
    shards: dict[str, Tensor] = {}
    for name, mine in model.state_dict().items():
        tensor = state.get(name, by_first.get(first_names.get(name, name)))
        if tensor is None:
            continue  # load_state_dict says that it is missing
        fits = tensor.shape == mine.shape or tensor.numel() == mine.numel() == 1  # a scale for a whole weight is 0-d
        shards[name] = part_of(tensor, mine) if fits else tensor
    return shards | {name: tensor for name, tensor in state.items() if name not in shards}


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor in memory of its own: what was gathered from uneven shards lies in memory with padding."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _first_names(model: nn.Module) -> dict[str, str]:
    """The first of the names of each parameter, by each of them."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
