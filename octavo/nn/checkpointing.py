"""Recomputing under `torch.utils.checkpoint` as the forward ran.

Activation checkpointing runs a region again during backward, when the autocast is no longer active: the products would
come back in high precision. So the first product of a region, in forward, attaches itself to the region's
recomputation. torch offers no hook for that, but both kinds of region keep the function where the Python stack leads:

- not reentrant: `checkpoint` holds a suspended generator `gen`, and that a frame with `recompute_fn`;
- reentrant: `CheckpointFunction.forward` holds a `ctx` with `run_function`.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint

_FILE = checkpoint.CheckpointFunction.forward.__code__.co_filename
_ATTACHED = "octavo_attached"

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def attach_to_recomputation(owner: object, wrap: Wrap) -> None:
    """Have every checkpointed region around the caller recompute as `wrap(function)`; once per region and owner."""
    for holder, attribute in _regions():
        if getattr(holder, _ATTACHED, None) is not owner:
            setattr(holder, attribute, wrap(getattr(holder, attribute)))
            setattr(holder, _ATTACHED, owner)


def _regions() -> Iterator[tuple[Any, str]]:
    """What holds the function of each region in forward, and under which name; innermost first."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == _FILE:
            if "gen" in frame.f_locals:  # in `checkpoint`; from torch 2.15 on in a function that it calls
                yield frame.f_locals["gen"].gi_frame.f_locals["new_frame"], "recompute_fn"
            elif frame.f_code.co_name == "forward":
                yield frame.f_locals["ctx"], "run_function"
        frame = frame.f_back
