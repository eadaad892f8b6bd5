"""Bookkeeping of slots on the GPU, to the bit that of the specification."""

import pytest
import torch
from slots_cases import copies, new_slots

from octavo.numerics import slots as spec
from octavo.ops import slots


@pytest.mark.parametrize("count", [1, 5, 64, 300])
def test_as_specified(count):
    for _ in range(2):  # compiled, then launched directly
        begin, end = new_slots(count)
        on_gpu = copies(begin, "cuda")
        for found, expected in zip(slots.begin_step(*on_gpu), spec.begin_step(*begin), strict=True):
            assert found.dtype == expected.dtype and torch.equal(found.cpu(), expected)
        on_gpu = copies(end, "cuda")
        spec.end_step_(*end)
        slots.end_step_(*on_gpu)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(on_gpu, end, strict=True))
