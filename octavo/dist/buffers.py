"""Buffers that each rank has for itself: running statistics of a BatchNorm under FSDP2, say, which shards none of them.

A checkpoint holds each tensor once. Where ranks have different values of it, every rank's own are kept beside.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from octavo.dist.together import from_all, from_first, rank
from octavo.nn.sharded import is_sharded, ranks


def of_each_rank(model: nn.Module, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the buffers in a model's state that differ between ranks: this rank's, and those of rank 0.

    Collective.
    """
    if ranks() == 1:
        return {}, {}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    whole = {name: x for name, x in state.items() if name not in parameters and not is_sharded(x)}
    everyone = from_all({name: _digest(x) for name, x in whole.items()})
    differ = [name for name, digest in everyone[0].items() if any(other.get(name) != digest for other in everyone)]
    own = {name: whole[name].detach().cpu() for name in differ if name in whole}
    return own, from_first(own if rank() == 0 else None)


def _digest(tensor: Tensor) -> bytes:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().tobytes()).digest()
