"""Frozen linears as one product: slices of one buffer, the same numbers as one by one."""

import copy

import pytest
import torch
from torch import nn

from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.frozen_group import put_together, why_no_group
from octavo.numerics.quantize import Quantized
from octavo.ops.weight import are_neighbours, joined


def build(granularity, outputs=(256, 128, 128), k=192, bias=False):
    torch.manual_seed(0)
    linears = [nn.Linear(k, n, bias=bias, dtype=torch.bfloat16) for n in outputs]
    return [FP8FrozenLinear.from_linear(linear, granularity) for linear in linears]


@pytest.mark.parametrize("granularity", ["block", "channel"])
def test_each_weight_is_a_slice(granularity):
    members = build(granularity)
    before = [member.dequantize(torch.float32) for member in members]
    assert not are_neighbours([m.weight.data for m in members])
    put_together(members)
    assert all(torch.equal(m.dequantize(torch.float32), w) for m, w in zip(members, before, strict=True))
    weights = [m.quantized for m in members]
    whole = Quantized(joined([w.data for w in weights]), joined([w.scale for w in weights]))
    assert torch.equal(whole.dequantize(), torch.cat(before))
    assert whole.data.data_ptr() == members[0].weight.data_ptr()  # nothing was copied
    put_together(members)
    assert whole.data.data_ptr() == members[0].weight.data_ptr()

    parted = [m.quantized for m in copy.deepcopy(members)]  # as after a move to another device
    assert not are_neighbours([w.data for w in parted])
    assert torch.equal(joined([w.data for w in parted]).view(torch.uint8), whole.data.view(torch.uint8))
    other = nn.ModuleList(build(granularity))
    other.load_state_dict(nn.ModuleList(members).state_dict())
    assert all(torch.equal(m.dequantize(torch.float32), w) for m, w in zip(other, before, strict=True))


def test_who_cannot_be_in_a_group():
    assert not why_no_group(build("block")) and not why_no_group(build("channel", (7, 9)))
    assert "straddle" in why_no_group(build("block", (192, 128)))
    assert "scale of its own" in why_no_group(build("tensor"))
    assert "quantised differently" in why_no_group([build("block")[0], build("channel")[0]])
    assert "bias" in why_no_group([build("channel")[0], build("channel", bias=True)[0]])
