"""Recomputation under `torch.utils.checkpoint` in the contexts of the forward.

Activation checkpointing runs a region again during backward. The recomputation must run under the contexts that were
active around the region in forward, no more and no fewer:

- A context entered around the region is not active in backward: torch leaves all modes before it runs a backward. So
  the first product of a region attaches those contexts to the region's function.
- A context entered inside the region is entered again by the region's own code. It is not attached: the rest of the
  region would be recomputed in FP8.

torch offers no hook for that, but both kinds of region hold their function where the Python stack leads:

- not reentrant: `checkpoint` has a suspended generator `gen`, whose frame has a `recompute_fn`, which has a cell `fn`;
- reentrant: `CheckpointFunction.forward` has a `ctx` with `run_function`.
"""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, Protocol

from torch.utils.checkpoint import CheckpointFunction

_REENTRANT = CheckpointFunction.forward.__code__
_ATTACHED = "octavo_attached"


class Context(Protocol):
    """A context that a recomputation can enter again at the position where the region began in forward."""

    def position(self) -> int: ...

    def at(self, position: int) -> AbstractContextManager[Any]: ...


class Entered(NamedTuple):
    """A context that was entered, and the number of regions around it then."""

    context: Context
    regions: int


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entered: list[Entered] = []  # the contexts active in this thread, outermost first


_THREAD = _Thread()


def enter(context: Context) -> None:
    """Record where `context` is entered."""
    _THREAD.entered.append(Entered(context, len(_regions())))


def leave(context: Context) -> None:
    """Forget where `context` was entered last; nothing if it was entered while compiling."""
    for i in reversed(range(len(_THREAD.entered))):
        if _THREAD.entered[i].context is context:
            del _THREAD.entered[i]
            return


def attach_to_recomputation() -> None:
    """Have every checkpointed region around the caller recomputed in the contexts around that region."""
    for holder, attribute, around in _to_attach(_regions()):
        setattr(holder, attribute, _within(around, getattr(holder, attribute)))


def refuse_compiled_inside() -> None:
    """Raise if products are compiled inside a region without attached contexts.

    They would never be attached, because compiled code runs without calling any context.
    """
    if _to_attach(_regions()):
        raise RuntimeError(
            "fp8_autocast: torch.compile inside torch.utils.checkpoint would be recomputed in high precision. Compile "
            "the function that calls checkpoint (or the whole model), or enter the context inside the compiled function"
        )


def _to_attach(regions: list[tuple[Any, str]]) -> list[tuple[Any, str, list[Context]]]:
    """Return the regions without attached contexts, each with the contexts around it."""
    unattached = []
    for depth, (holder, attribute) in enumerate(regions):
        around = [entered.context for entered in _THREAD.entered if entered.regions <= depth]
        if around and not hasattr(getattr(holder, attribute), _ATTACHED):
            unattached.append((holder, attribute, around))
    return unattached


def _within(contexts: list[Context], function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` to run in these contexts at their present positions."""
    positions = [context.position() for context in contexts]

    def recompute(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for context, position in zip(contexts, positions, strict=True):
                stack.enter_context(context.at(position))
            return function(*args, **kwargs)

    setattr(recompute, _ATTACHED, True)
    return recompute


def _regions() -> list[tuple[Any, str]]:
    """Return the object and the attribute that hold each region's function, outermost first."""
    regions: list[tuple[Any, str]] = []
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code is _REENTRANT:
            regions.append((frame.f_locals["ctx"], "run_function"))
        elif code.co_filename == _REENTRANT.co_filename and "gen" in frame.f_locals:
            # In `checkpoint`; from torch 2.15 on in a function that it calls.
            recompute = frame.f_locals["gen"].gi_frame.f_locals["new_frame"].recompute_fn
            cell = recompute.__closure__[recompute.__code__.co_freevars.index("fn")]
            regions.append((cell, "cell_contents"))
        frame = frame.f_back
    return regions[::-1]
