"""The transposing kernel in Triton's interpreter: every byte in its place."""

import pytest
import torch

from octavo.kernels.quantize import transpose as kernel

SHAPES = [(128, 64), (128, 66), (130, 64), (130, 66), (2, 2), (256, 576), (4, 300), (126, 190)]


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_byte(shape, dtype):
    """Also where one side alone is a whole number of tiles."""
    data = torch.randint(256, shape, dtype=torch.uint8).view(dtype)
    assert kernel.can_transpose(data)
    actual = kernel.transpose(data)
    assert actual.dtype == dtype and actual.is_contiguous()
    assert torch.equal(actual.view(torch.uint8), data.view(torch.uint8).t())


def test_what_it_leaves_to_others():
    data = torch.zeros(4, 6, dtype=torch.uint8)
    assert not kernel.can_transpose(data[:3]) and not kernel.can_transpose(data.t())
