"""Weights that backward reads again must be those that forward read.

Autograd compares the versions of what a function saves. Frozen weights are not saved: what moves saved tensors
elsewhere, to host memory say, would move all of the base. So their versions are compared here.

An engine may free a Parameter between forward and backward by putting an empty tensor in its place, as DeepSpeed's
ZeRO-3 does: a view from forward would then keep the memory. So the Parameter is kept, and backward views it again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def versions_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """How often each has been written to. Nothing while compiling: compiled code has autograd save the weights."""
    if torch.compiler.is_compiling() or any(tensor.is_inference() for tensor in tensors):
        return ()
    return tuple(tensor._version for tensor in tensors)


def viewed(sources: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """The values of frozen Parameters now, as these dtypes. (Stored as bytes: `nn/frozen.py`.)"""
    seen = [source.detach().view(dtype) for source, dtype in zip(sources, dtypes, strict=True)]
    return [x.reshape(()) if x.dim() == 1 else x for x in seen]  # a scale for a whole weight


def check_versions(tensors: Sequence[Tensor], versions: tuple[int, ...]) -> None:
    """Raise what autograd raises, if one of them has been written to since."""
    for tensor, version in zip(tensors, versions, strict=False):
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"weight {list(tensor.shape)} in {tensor.dtype} is at version {tensor._version}; expected version "
                f"{version} instead. Fill it (load_state_dict, merge_adapter) after backward"
            )
