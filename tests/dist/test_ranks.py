"""The harness itself: results by rank, errors with their traceback, no hang."""

import pytest
import torch
from ranks import NoAnswer, RankFailed, on_ranks
from torch import distributed


def total(rank, offset):
    value = torch.tensor([float(rank + offset)])
    distributed.all_reduce(value)
    return rank, value.item()


def fail_on_one(rank):
    if rank == 1:
        raise ValueError("rank one is unwell")
    distributed.barrier()


def hang_on_one(rank):
    if rank == 0:
        distributed.barrier()


def test_results_come_by_rank():
    assert on_ranks(2, total, 1) == [(0, 3.0), (1, 3.0)]


def test_an_error_fails_with_its_traceback():
    with pytest.raises(RankFailed, match="rank one is unwell"):
        on_ranks(2, fail_on_one)


def test_a_rank_that_waits_for_ever_is_found():
    with pytest.raises((NoAnswer, RankFailed), match="rank 0"):
        on_ranks(2, hang_on_one, limit=5)
