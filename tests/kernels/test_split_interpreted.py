"""The kernels that split FP32 into halves and join them, in Triton's interpreter: the spec's bits."""

import pytest
import torch

from octavo.kernels import split as kernel
from octavo.numerics import split as spec


@pytest.mark.parametrize("shape", [(2048,), (33, 129), (1,)])
def test_the_bits_of_the_spec(shape):
    x = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32).view(torch.float32)
    x.view(-1)[:2] = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)[: x.numel()]
    wanted, actual = ([torch.empty(shape, dtype=torch.bfloat16) for _ in range(2)] for _ in range(2))
    spec.split(x, *wanted)
    assert kernel.can_split(*actual)
    kernel.split(x, *actual)
    for one, other in zip(actual, wanted, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))
    assert torch.equal(kernel.join(*actual).view(torch.int32), spec.join(*wanted).view(torch.int32))


def test_what_it_leaves_to_others():
    high, low = torch.zeros(4, 6, dtype=torch.bfloat16), torch.zeros(4, 6, dtype=torch.bfloat16)
    assert not kernel.can_split(high.t(), low.t()) and not kernel.can_split(high[:0], low[:0])


@pytest.mark.parametrize("written", [0.0, -0.0, float("inf"), 1.0])
def test_weights_that_somebody_else_writes(written):
    high = torch.full((4096,), written, dtype=torch.bfloat16)
    low = torch.randint(-(2**15), 2**15, (4096,), dtype=torch.int16).view(torch.bfloat16)
    actual = kernel.join(high, low)
    assert torch.equal(actual.view(torch.int32), spec.join(high, low).view(torch.int32)) and not actual.isnan().any()
