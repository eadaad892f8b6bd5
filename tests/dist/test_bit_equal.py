"""DDP and FSDP2 compute what the same ranks compute one after another in one process, to the bit."""

import pytest
from dist_cases import KINDS, RECIPES, largest_difference, numbers, plain, simulated, train
from ranks import on_ranks


def both(rank, cases):
    return [train(rank, engine, kind, recipe) for kind, recipe in cases for engine in ("ddp", "fsdp2")]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_equal_simulated_ones(kind):
    cases = [(kind, recipe) for recipe in RECIPES]
    by_rank = on_ranks(2, both, cases)
    start = numbers(plain(kind))
    for place, case in enumerate(cases):
        expected = simulated(*case)
        assert largest_difference(expected, start) > 1e-3  # it has learned
        for actual in by_rank:
            ddp, fsdp2 = actual[2 * place : 2 * place + 2]
            assert largest_difference(ddp, expected) == 0, ("ddp", *case)
            assert largest_difference(fsdp2, expected) == 0, ("fsdp2", *case)
