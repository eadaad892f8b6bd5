"""Collectives whose names differ between the versions of torch."""

from typing import Any

from torch import Tensor, distributed


def all_gather(everyone: Tensor, mine: Tensor, group: Any = None) -> None:
    """Fill `everyone[world · R, …]` with `mine[R, …]` of each rank, in the order of ranks."""
    # Named `all_gather_single` since torch 2.13, which warns of the name that torch 2.11 has.
    gather: Any = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
    gather(everyone, mine, group=group)
