"""A layer is rehearsed only where nobody would notice: a hook must not see values that mean nothing."""

import pytest
from decoder_cases import build
from torch import nn

from octavo import convert_to_fp8
from octavo.decoders.rehearsal import may_rehearse


class Counting(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


WATCHED = {
    "hook on a linear": lambda layer: layer.mlp.up_proj.register_forward_hook(lambda *_: None),
    "hook on a norm": lambda layer: layer.input_layernorm.register_forward_pre_hook(lambda *_: None),
    "hook on a weight": lambda layer: layer.self_attn.q_proj.weight.register_hook(lambda g: g),
    "module of its own": lambda layer: setattr(layer.mlp, "act_fn", Counting(layer.mlp.act_fn)),
}


@pytest.mark.parametrize("name", WATCHED)
def test_a_layer_that_somebody_watches_is_not_rehearsed(name):
    model = build()
    convert_to_fp8(model)
    layer, other = model.model.layers[:2]
    assert may_rehearse(layer)
    WATCHED[name](layer)
    assert not may_rehearse(layer) and may_rehearse(other)
