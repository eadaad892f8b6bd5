"""Few tokens by frozen linears without gradients: which calls reach the kernels, and that others do not."""

import pytest
import torch
from torch import nn

from octavo.kernels import few_tokens as kernels
from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.groups import put_together
from octavo.nn.linear import weights_only
from octavo.nn.linear_function import linear, linear_and_input
from octavo.nn.mlp_function import gated_mlp
from octavo.numerics.norm import Norm
from octavo.ops import few_tokens as ops
from octavo.ops.adapters import NO_ADAPTERS, Adapter, Adapters
from octavo.ops.mlp import MLPSpec

BF16 = torch.bfloat16
WIDTH, FEATURES = 128, 256


@pytest.fixture
def calls(monkeypatch):
    """Have the operators choose the kernels, which are interpreted, as on a GPU; what is computed by them."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU (tests/gpu)")
    found = []
    monkeypatch.setattr(ops, "has_fp8_tensor_cores", lambda _: True)
    for name in ("linear", "gated_mlp"):
        honest = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *a, honest=honest, name=name, **k: (found.append(name), honest(*a, **k))[1]
        )
    return found


def frozen(inputs, outputs, granularity="block", bias=False):
    return FP8FrozenLinear.from_linear(nn.Linear(inputs, outputs, bias=bias, dtype=BF16), granularity)


def adapters_of(inputs, *spans):
    positions = tuple(Adapter(first, last, 0.5) for first, last in spans)
    downs = tuple(nn.Parameter(torch.randn(8, inputs) / inputs**0.5) for _ in spans)
    return Adapters(positions, downs, tuple(nn.Parameter(torch.randn(last - first, 8)) for first, last in spans))


def assert_alike(actual, expected):
    """Off by what a weight rounded to BF16 is, and by some roundings of the result."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert (actual.float() - expected.float()).norm() < 2.0**-7 * expected.float().norm()


@pytest.mark.parametrize("granularity", ["block", "channel", "tensor"])
@torch.no_grad()
def test_a_linear_alone(calls, granularity):
    layer, x = frozen(WIDTH, 96, granularity, bias=True), torch.randn(2, 3, WIDTH).to(BF16)
    layer(x)
    assert not calls  # its inputs are in FP8
    with weights_only():
        y = layer(x)
    assert calls == ["linear"]
    assert_alike(y, nn.functional.linear(x, layer.dequantize(BF16), layer.bias))


def test_not_where_gradients_may_be_wanted_nor_with_many_tokens(calls):
    layer = frozen(WIDTH, 96)
    with weights_only():
        layer(torch.randn(3, WIDTH).to(BF16))
        with torch.no_grad():
            layer(torch.randn(129, WIDTH).to(BF16))
            layer(torch.randn(3, WIDTH))
            layer.config = layer.config.replace(emulate=True)
            layer(torch.randn(3, WIDTH).to(BF16))
    assert not calls


@torch.no_grad()
def test_a_group_after_a_norm(calls):
    members = [frozen(WIDTH, size) for size in (128, 128)]
    h, norm = torch.randn(5, WIDTH).to(BF16), Norm(torch.rand(WIDTH).to(BF16), 1e-5)
    adapters = adapters_of(WIDTH, (0, 128), (128, 256))
    with weights_only():
        spec = members[0].spec(h)
        apart = linear(h, members[0].as_weight(members[1]), spec, members[0].states, norm=norm, adapters=adapters)
        assert not calls  # two buffers: one product would take a copy
        put_together(members)
        weight = members[0].as_weight(members[1])
        together, same = linear_and_input(h, weight, spec, members[0].states, norm=norm, adapters=adapters)
    assert calls == ["linear"] and same is h
    assert_alike(together, apart)


@pytest.mark.parametrize("adapted", [False, True])
@torch.no_grad()
def test_a_gated_mlp(calls, adapted):
    gate, up, down = frozen(WIDTH, FEATURES), frozen(WIDTH, FEATURES), frozen(FEATURES, WIDTH)
    put_together([gate, up])
    h, norm = torch.randn(5, WIDTH).to(BF16), Norm(torch.rand(WIDTH).to(BF16), 1e-5)
    both, last = NO_ADAPTERS, NO_ADAPTERS
    if adapted:
        both, last = adapters_of(WIDTH, (0, FEATURES), (FEATURES, 2 * FEATURES)), adapters_of(FEATURES, (0, WIDTH))

    def run(spec):
        return gated_mlp(
            h, gate.as_weight(up), down.as_weight(), MLPSpec(spec, "silu"), gate.states, down.states, norm=norm,
            adapters=both, adapters_down=last, residual=True,
        )  # fmt: skip

    with weights_only():
        few = run(gate.spec(h))
        assert calls == ["gated_mlp"]
        gate.config = gate.config.replace(emulate=True)
        assert_alike(few, run(gate.spec(h)))
    assert calls == ["gated_mlp"]
