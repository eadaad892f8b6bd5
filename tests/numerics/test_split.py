"""FP32 in two halves: nothing is lost, and the upper one is the value in BF16."""

import math

import pytest
import torch

from octavo.numerics import split as spec

SPECIAL = [0.0, -0.0, 1.0, -1.0, 3.4028234663852886e38, -3.4028234663852886e38, math.inf, -math.inf, 1e-45, -1e-45]


def values(shape=(65, 33)):
    bits = torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    x = bits.view(torch.float32)
    x = torch.where(x.isnan(), 1.5, x)
    x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return x


def halves_of(x):
    high, low = (torch.empty_like(x, dtype=torch.bfloat16) for _ in range(2))
    spec.split(x, high, low)
    return high, low


@pytest.mark.parametrize("layout", [lambda x: x, lambda x: x.t()], ids=["rows", "columns"])
def test_nothing_is_lost(layout):
    x = layout(values())
    high, low = halves_of(x)
    assert torch.equal(spec.join(high, low).view(torch.int32), x.view(torch.int32))
    torch.testing.assert_close(high.float(), x.bfloat16().float(), rtol=2**-7, atol=0)
    assert (high != x.bfloat16()).float().mean() < 1e-2  # ties, and they are few


def test_nan_stays_nan():
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001], dtype=torch.int32)
    high, low = halves_of(bits.view(torch.float32))
    assert high.isnan().all() and spec.join(high, low).isnan().all()


def test_a_weight_that_was_written_stays_what_it_is():
    """With the lower half of before, it joins to what rounds to it."""
    x = torch.randn(64, 64)
    _, low = halves_of(x)
    written = torch.randn(64, 64).bfloat16()
    joined = spec.join(written, low)
    torch.testing.assert_close(joined, written.float(), rtol=2**-8, atol=0)
    assert torch.equal(halves_of(joined)[0], written)
    assert torch.equal(spec.join(written, spec.new_low(written)), written.float())


@pytest.mark.parametrize(
    "x", [values(), values().t(), torch.tensor(0.3), torch.linspace(-1, 1, 7)], ids=["rows", "columns", "0-d", "1-d"]
)
def test_states_on_their_way_to_a_file(x):
    high, low = spec.views(x)
    assert high.shape == low.shape == x.shape and high.dtype == torch.bfloat16
    copies = [half.to("cpu", torch.bfloat16, copy=True) for half in (high, low)]
    assert torch.equal(spec.join_views(*copies).view(torch.int32), x.view(torch.int32).contiguous())
    if x.dim() and x.stride(-1) == 1:
        assert high.untyped_storage().data_ptr() == low.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("written", [0.0, -0.0, math.inf, -math.inf, 1.0, -3e38, 1e-40])
def test_weights_that_somebody_else_writes_count_as_they_are(written):
    """With whatever low half the weight had before."""
    high = torch.full((2**16,), written, dtype=torch.bfloat16)
    low = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = spec.join(high, low)
    assert not x.isnan().any() and (x.signbit() == high.signbit()).all()
    away = (halves_of(x)[0].view(torch.int16).int() - high.view(torch.int16).int()).abs()
    assert away.max() <= 1  # half a step, which rounds to this one or to its neighbour
