"""Values that ranks tell each other besides tensors, and whether something went wrong on one of them.

Values go through host memory, over gloo, also where tensors go over NCCL: no GPU waits for them. Every function here is
collective: all ranks call it, in the same order. With one process it returns at once.
"""

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import distributed

from octavo.nn.sharded import ranks

PATIENCE = timedelta(minutes=30)  # one rank may write or read large files while the others wait
# The default group and that of `host_group`, weakly: torch holds them until `destroy_process_group()`. A group that is
# held beyond that has threads to the very end, and its process is aborted there (4 of 24 runs of two ranks on gloo).
_groups: "tuple[weakref.ref[Any], weakref.ref[Any]] | None" = None


def rank() -> int:
    """The number of this rank; 0 where there is no process group."""
    return distributed.get_rank() if ranks() > 1 else 0


def host_group() -> Any:
    """The group of all ranks that exchanges data through host memory; None where there is one process."""
    global _groups
    if ranks() == 1:
        return None
    default = distributed.group.WORLD
    known, host = (None, None) if _groups is None else (reference() for reference in _groups)
    if host is None or known is not default:
        host = distributed.new_group(backend="gloo", timeout=PATIENCE)
        _groups = weakref.ref(default), weakref.ref(host)
    return host


def from_all(value: Any) -> list[Any]:
    """The values of all ranks, by rank, on each of them."""
    if ranks() == 1:
        return [value]
    values = [None] * ranks()
    distributed.all_gather_object(values, value, group=host_group())
    return values


def from_first(value: Any) -> Any:
    """The value of rank 0, on every rank."""
    if ranks() == 1:
        return value
    values = [value]
    distributed.broadcast_object_list(values, src=0, group=host_group())
    return values[0]


@contextmanager
def one_process_is_meant() -> Iterator[None]:
    """Region in which torch.distributed.checkpoint does not warn that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class OtherRankFailed(OSError):
    """Another rank could not do its part; the message has its error."""


@contextmanager
def all_or_none() -> Iterator[None]:
    """Raise on every rank, at the end of the block, if the block raised on one: so that none goes on alone.

    The rank with the error raises it; the others raise `OtherRankFailed`.
    """
    mine: BaseException | None = None
    try:
        yield
    except BaseException as error:  # also an interrupt: the others wait for this rank
        mine = error
    errors = from_all(None if mine is None else str(mine) or type(mine).__name__)
    if mine is not None:
        raise mine
    for number, words in enumerate(errors):
        if words is not None:
            raise OtherRankFailed(f"rank {number}: {words}")
