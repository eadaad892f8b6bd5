"""Values that ranks tell each other besides tensors, and whether something went wrong on one of them.

Values go through host memory, over gloo, also where tensors go over NCCL: no GPU waits for them. Every function here is
collective: all ranks call it, in the same order. With one process it returns at once.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import distributed

from octavo.nn.sharded import ranks

PATIENCE = timedelta(minutes=30)  # one rank may write or read large files while the others wait
_groups: dict[int, Any] = {}  # by the identity of the default group


def rank() -> int:
    """The number of this rank; 0 where there is no process group."""
    return distributed.get_rank() if ranks() > 1 else 0


def host_group() -> Any:
    """The group of all ranks that exchanges data through host memory; None where there is one process."""
    if ranks() == 1:
        return None
    default = distributed.group.WORLD
    if id(default) not in _groups:
        _groups.clear()  # a process has one default group at a time
        _groups[id(default)] = distributed.new_group(backend="gloo", timeout=PATIENCE)
    return _groups[id(default)]


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
def all_or_none(kind: type[Exception] = OSError) -> Iterator[None]:
    """Raise on every rank, at the end of the block, if the block raised an error of a kind on one: none goes on alone.

    The rank with the error raises it; the others raise `OtherRankFailed`.
    """
    mine: Exception | None = None
    try:
        yield
    except kind as error:
        mine = error
    errors = from_all(None if mine is None else str(mine))
    if mine is not None:
        raise mine
    for number, words in enumerate(errors):
        if words is not None:
            raise OtherRankFailed(f"rank {number}: {words}")
