"""`weights_only`: products of frozen linears with inputs as they are, within a block."""

import threading

import pytest
import torch
from torch import nn

from octavo.decoders.products import gated_mlp as decoder_mlp
from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.linear import FP8Linear, weights_only

GRANULARITIES = ("block", "channel", "tensor")


def frozen(inputs=256, outputs=128, granularity="block"):
    torch.manual_seed(0)
    return FP8FrozenLinear.from_linear(nn.Linear(inputs, outputs), granularity)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_inputs_are_taken_as_they_are(granularity):
    linear, x = frozen(granularity=granularity), torch.randn(5, 256)
    exact = nn.functional.linear(x, linear.dequantize(torch.float32), linear.bias)
    before = linear(x)
    with weights_only():
        assert linear.spec(x).x is None and linear.spec(x).g is None
        within = linear(x)
    torch.testing.assert_close(within, exact, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before, exact, rtol=1e-4, atol=1e-4)
    assert torch.equal(linear(x), before) and linear.spec(x).x is not None


def test_gradients_are_those_of_the_dequantised_weight():
    linear, x = frozen(), torch.randn(5, 256, requires_grad=True)
    with weights_only():
        y = linear(x)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad, torch.ones_like(y) @ linear.dequantize(torch.float32), rtol=1e-5, atol=1e-5)


def test_trained_linears_keep_their_products():
    linear, x = FP8Linear(256, 128), torch.randn(5, 256)
    expected = linear(x)
    with weights_only():
        assert linear.spec(x).x is not None and torch.equal(linear(x), expected)


def test_blocks_nest_and_end_with_an_error():
    linear, x = frozen(), torch.randn(2, 256)
    with weights_only():
        with weights_only():
            pass
        assert linear.spec(x).x is None
    with pytest.raises(ValueError, match="features"), weights_only():
        linear(torch.randn(2, 255))
    assert linear.spec(x).x is not None


def test_other_threads_do_not_notice():
    linear, x, seen = frozen(), torch.randn(2, 256), []
    with weights_only():
        thread = threading.Thread(target=lambda: seen.append(linear.spec(x).x))
        thread.start()
        thread.join()
        assert linear.spec(x).x is None
    assert seen[0] is not None


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_gated_mlp_as_one_function(granularity):
    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = frozen(128, 256, granularity), frozen(128, 256, granularity)
            self.down_proj, self.act_fn = frozen(256, 128, granularity), nn.SiLU()
            for linear in (self.gate_proj, self.up_proj, self.down_proj):
                linear.bias = None

    mlp, x = MLP(), torch.randn(3, 128)
    gate, up, down = (linear.dequantize(torch.float32) for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    exact = (nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    with weights_only(), torch.no_grad():
        y = decoder_mlp(mlp, x)
        if y is None:  # one scale for all of each weight: linears one by one
            assert granularity == "tensor"
            y = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    torch.testing.assert_close(y, exact, rtol=1e-5, atol=1e-5)


def test_compiled_within_the_block():
    linear, x = frozen(), torch.randn(4, 256)
    torch._dynamo.reset()
    with weights_only(), torch.no_grad():
        expected = linear(x)
        actual = torch.compile(linear, fullgraph=True, backend="eager")(x)
    assert torch.equal(actual, expected)
