"""Recomputing under `torch.utils.checkpoint` as the forward ran.

Activation checkpointing runs a region again during backward, when the autocast is no longer active: the products would
come back in high precision. So the first product of a region, in forward, attaches itself to the region's
recomputation. torch offers no hook for that; these are the two places where it keeps the function:

- not reentrant: the pack hook of the region's saved tensors closes over a frame with `recompute_fn`;
- reentrant: `CheckpointFunction.forward` is on the Python stack, and its `ctx` holds `run_function`.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint

_PACK_HOOK = "_checkpoint_hook.__init__.<locals>.pack_hook"
_ATTACHED = "octavo_attached"

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def attach_to_recomputation(owner: object, wrap: Wrap) -> None:
    """If inside a checkpointed region, have its recomputation run as `wrap(function)`; once per region and owner."""
    holder, attribute = _region()
    if holder is None or getattr(holder, _ATTACHED, None) is owner:
        return
    setattr(holder, attribute, wrap(getattr(holder, attribute)))
    setattr(holder, _ATTACHED, owner)


def _region() -> tuple[Any, str]:
    """The object that holds the innermost region's function, and under which name."""
    if torch.is_grad_enabled():
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks and hooks[0].__qualname__ == _PACK_HOOK:
            cells = dict(zip(hooks[0].__code__.co_freevars, hooks[0].__closure__ or (), strict=True))
            return cells["frame"].cell_contents, "recompute_fn"
        return None, ""
    frame: Any = sys._getframe()
    code = checkpoint.CheckpointFunction.forward.__code__
    while frame is not None:
        if frame.f_code is code:
            return frame.f_locals["ctx"], "run_function"
        frame = frame.f_back
    return None, ""
