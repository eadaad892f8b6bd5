"""The kernels of slots in Triton's interpreter, and the operators, against the specification."""

import pytest
import torch
from slots_cases import copies, ints, new_slots
from torch.library import opcheck

import octavo.ops.slots  # noqa: F401, registers the operators
from octavo.kernels import slots as kernels
from octavo.numerics import slots as spec


@pytest.mark.parametrize("slots", [1, 5, 128, 300])
def test_as_specified(slots):
    begin, end = new_slots(slots)
    before = copies(begin)
    for found, expected in zip(kernels.begin_step(*begin), spec.begin_step(*begin), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(begin, before, strict=True))
    expected = copies(end)
    spec.end_step_(*expected)
    kernels.end_step_(*end)
    for found, wanted in zip(end, expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_step():
    """Active, empty, one that stops, one that is full; prompts of 10 and 20 tokens."""
    active, lengths = torch.tensor([True, False, True, True]), ints([0, 2, 1, 1])
    positions, places, where, seen = spec.begin_step(active, lengths, ints([1, 0, 0, -1]), ints([10, 20]))
    assert positions.tolist() == [20, 0, 11, 11] and positions.dtype == torch.int64
    assert places.tolist() == [0, -1, 2, 3] and where.tolist() == [0, 2, 1, 1] and seen.tolist() == [1, 0, 2, 2]
    tokens, logprobs = torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, 4)
    newest, token = torch.tensor([4, 5, 6, 7]), torch.tensor([1, 2, 3, 1])
    stops = torch.tensor([False, False, False, True, False, False, False, False])
    logprob, limits = torch.tensor([-1.0, -2.0, -3.0, -4.0]), ints([4, 4, 4, 3])
    spec.end_step_(tokens, logprobs, newest, lengths, active, token, logprob, stops, limits)
    assert tokens.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 3, 0], [0, 0, 1, 0]]
    assert logprobs[2].tolist() == [0.0, 0.0, -3.0, 0.0] and not logprobs[1].any()
    assert newest.tolist() == [1, 5, 3, 1] and lengths.tolist() == [1, 2, 2, 2]
    assert active.tolist() == [True, False, False, False]


def test_opcheck():
    begin, end = new_slots(6)
    opcheck(torch.ops.octavo.begin_step, begin)
    opcheck(torch.ops.octavo.end_step_, end)
