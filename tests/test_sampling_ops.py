"""The operator that draws tokens: schema, fakes and dispatch by opcheck; what it refuses."""

import pytest
import torch
from torch.library import opcheck

from octavo.numerics import sampling as spec
from octavo.ops import sampling

ONE, SEED = torch.ones(()), torch.tensor([3])


def test_opcheck():
    for greedy in (False, True):
        opcheck(torch.ops.octavo.sample, (torch.randn(3, 50), ONE, SEED, greedy))


def test_the_specification_runs_on_a_cpu():
    logits = torch.randn(5, 40)
    assert not sampling.has_kernel(logits)
    for greedy in (False, True):
        found, expected = sampling.sample(logits, ONE, SEED, greedy=greedy), spec.sample(logits, ONE, SEED, greedy)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((torch.zeros(3), ONE, SEED), r"logits \(3,\) in torch.float32: give \[rows, vocabulary\]"),
        ((torch.zeros(3, 0), ONE, SEED), r"logits \(3, 0\)"),
        ((torch.zeros(3, 4, dtype=torch.bfloat16), ONE, SEED), r"in torch.bfloat16"),
        ((torch.zeros(3, 4), torch.ones(3), SEED), r"temperature \(3,\)"),
        ((torch.zeros(3, 4), ONE.double(), SEED), r"temperature \(\) in torch.float64"),
        ((torch.zeros(3, 4), ONE, SEED.int()), r"seed \(1,\) in torch.int32: give one of torch.int64"),
        ((torch.zeros(3, 4), ONE, SEED.expand(2)), r"seed \(2,\)"),
    ],
)
def test_refused(given, message):
    with pytest.raises(ValueError, match=message):
        sampling.sample(*given)
