"""The gated MLP of a frozen base with adapters, against the same in float32 on the dequantised weights."""

import pytest
import torch
from activation_cases import REFERENCES, least_cosine
from bounds import cosine
from torch import nn

from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.groups import put_together
from octavo.nn.mlp_function import gated_mlp
from octavo.numerics.activation import ACTIVATIONS
from octavo.numerics.norm import Norm
from octavo.ops import mlp as ops_mlp
from octavo.ops.adapters import Adapter, Adapters
from octavo.ops.mlp import MLPSpec

K, F, R = 192, 256, 8
NONE = Adapters((), (), ())


def build(granularity, dtype=torch.bfloat16, fp8_products=True):
    torch.manual_seed(0)
    shapes = ((K, F), (K, F), (F, K))
    linears = [FP8FrozenLinear.from_linear(nn.Linear(*s, bias=False, dtype=dtype), granularity) for s in shapes]
    if granularity != "tensor":
        put_together(linears[:2])
    for linear in linears:
        linear.fp8_products = fp8_products
    return linears


def adapters_of(positions, inputs, dtype=torch.float32):
    downs = [nn.Parameter(torch.randn(R, inputs, dtype=dtype) / inputs**0.5) for _ in positions]
    ups = [nn.Parameter(torch.randn(p.last - p.first, R, dtype=dtype) / R**0.5) for p in positions]
    return Adapters(tuple(positions), tuple(downs), tuple(ups))


BOTH = (Adapter(0, F, 2.0), Adapter(F, 2 * F, 0.5))
DOWN = (Adapter(0, K, 1.5),)
CASES = {
    "all": (BOTH, DOWN),
    "gate and up": (BOTH, ()),
    "up": (BOTH[1:], ()),
    "down": ((), DOWN),
    "two on gate": ((BOTH[0], *BOTH), DOWN),
    "none": ((), ()),
}


def run(linears, adapters, last, x, activation="silu", **options):
    gate, up, down = linears
    how = {"adapters": adapters, "adapters_down": last, **options}
    mlp = MLPSpec(gate.spec(x), activation)
    return gated_mlp(x, gate.as_weight(up), down.as_weight(), mlp, gate.states, down.states, **how)


def reference(linears, adapters, last, x, activation="silu"):
    def product(x, weight, mine):
        y = x @ weight.T
        for position, a, b in zip(mine.positions, mine.downs, mine.ups, strict=True):
            low = position.scaling * (x @ a.float().T) @ b.float().T
            y = y + nn.functional.pad(low, (position.first, y.shape[-1] - position.last))
        return y

    gate, up, down = (linear.dequantize(torch.float32) for linear in linears)
    first, second = product(x, torch.cat([gate, up]), adapters).chunk(2, dim=-1)
    return product(REFERENCES[activation].function(first) * second, down, last)


def matrices(*adapters):
    return [m for each in adapters for m in (*each.downs, *each.ups)]


@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("fp8_products", [True, False])
def test_values_and_every_gradient(granularity, case, activation, fp8_products):
    linears = build(granularity, fp8_products=fp8_products)
    positions, positions_down = CASES[case]
    adapters, last = adapters_of(positions, K), adapters_of(positions_down, F)
    x = torch.randn(3, 37, K, dtype=torch.bfloat16, requires_grad=True)
    y = run(linears, adapters, last, x, activation)
    assert y.shape == x.shape and y.dtype == x.dtype
    g = torch.randn_like(y)
    y.backward(g)
    mine = [x.grad, *(m.grad for m in matrices(adapters, last))]
    x_ref = x.detach().float().requires_grad_()
    for m in matrices(adapters, last):
        m.grad = None
    y_ref = reference(linears, adapters, last, x_ref, activation)
    y_ref.backward(g.float())
    assert cosine(y, y_ref) > least_cosine(0.998 if fp8_products else 0.9999, activation)
    # Gate and up are saved in FP8, each off by 2.6 %.
    at_least = least_cosine(0.9975 if fp8_products else 0.999, activation)
    for actual, exact in zip(mine, [x_ref.grad, *(m.grad for m in matrices(adapters, last))], strict=True):
        assert actual.shape == exact.shape and cosine(actual, exact) > at_least


@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize("case", ["all", "none"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("fp8_products", [True, False])
def test_with_a_norm_before_it(granularity, case, residual, fp8_products):
    linears = build(granularity, fp8_products=fp8_products)
    adapters, last = adapters_of(CASES[case][0], K), adapters_of(CASES[case][1], F)
    norm = Norm(torch.rand(K, dtype=torch.bfloat16) + 0.5, 1e-5)
    h = torch.randn(3, 37, K, dtype=torch.bfloat16, requires_grad=True)
    tensors = [h, *matrices(adapters, last)]
    y = run(linears, adapters, last, h, norm=norm, residual=residual)
    g = torch.randn_like(y)
    y.backward(g)
    mine = [m.grad for m in tensors]
    h_ref = h.detach().float().requires_grad_()
    for m in tensors:
        m.grad = None
    x = nn.functional.rms_norm(h_ref, (K,), norm.weight.float(), norm.eps)
    (reference(linears, adapters, last, x) + (h_ref if residual else 0)).backward(g.float())
    for actual, exact in zip(mine, [h_ref.grad, *(m.grad for m in tensors[1:])], strict=True):
        assert cosine(actual, exact) > (0.9975 if fp8_products else 0.999)


@pytest.mark.parametrize("case", ["all", "none"])
def test_in_fp32_nothing_but_the_weights_is_rounded(case):
    linears = build("block", torch.float32, fp8_products=False)
    adapters, last = adapters_of(CASES[case][0], K), adapters_of(CASES[case][1], F)
    norm = Norm((torch.rand(K) + 0.5) * (torch.arange(K) % 5 > 0), 1e-5)  # some are zero
    h = torch.randn(37, K, requires_grad=True)
    tensors = [h, *matrices(adapters, last)]
    y = run(linears, adapters, last, h, norm=norm, residual=True)
    g = torch.randn_like(y)
    mine = torch.autograd.grad(y, tensors, g)
    exact = reference(linears, adapters, last, nn.functional.rms_norm(h, (K,), norm.weight, norm.eps)) + h
    for actual, expected in zip((y, *mine), (exact, *torch.autograd.grad(exact, tensors, g)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


def test_only_what_is_trained_gets_a_gradient_and_keeps_anything():
    linears = build("block")
    adapters, last = adapters_of(BOTH, K), adapters_of(DOWN, F)
    adapters.downs[0].requires_grad_(False)
    last.downs[0].requires_grad_(False)
    x = torch.randn(40, K, dtype=torch.bfloat16)
    run(linears, adapters, last, x).sum().backward()
    assert [m.grad is not None for m in matrices(adapters, last)] == [False, True, True, True, False, True]
    with torch.no_grad():
        assert cosine(run(linears, adapters, last, x), reference(linears, adapters, last, x.float())) > 0.998


def test_nothing_is_kept_in_high_precision_but_what_is_narrow():
    linears = build("channel")
    adapters, last = adapters_of(BOTH, K), adapters_of(DOWN, F)
    x = torch.randn(64, K, dtype=torch.bfloat16, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(linears, adapters, last, x)
    tall = [t for t in saved if t.dim() == 2 and t.shape[0] == 64]
    assert {t.shape[1] for t in tall if t.element_size() == 1} == {K, 2 * F, 2 * F // 128}
    assert all(t.shape[1] <= 2 * R for t in tall if t.element_size() > 1)


@pytest.mark.matrix
@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize("fp8_products", [True, False])
def test_compiled_as_one_graph(granularity, fp8_products):
    linears = build(granularity, fp8_products=fp8_products)
    adapters, last = adapters_of(BOTH, K, torch.bfloat16), adapters_of(DOWN, F, torch.bfloat16)
    x = torch.randn(6, K, dtype=torch.bfloat16, requires_grad=True)
    tensors = [x, *matrices(adapters, last)]

    def step(function):
        for m in tensors:
            m.grad = None
        y = function(linears, adapters, last, x)
        y.float().pow(2).sum().backward()
        return [y, *(m.grad for m in tensors)]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for actual, expected in zip(step(compiled), step(run), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize("fp8_products", [True, False])
def test_backward_in_chunks(granularity, fp8_products, monkeypatch):
    linears = build(granularity, fp8_products=fp8_products)
    adapters, last = adapters_of(BOTH, K), adapters_of(DOWN, F)
    x = torch.randn(100, K, dtype=torch.bfloat16, requires_grad=True)
    tensors = [x, *matrices(adapters, last)]

    def step():
        for m in tensors:
            m.grad = None
        run(linears, adapters, last, x).float().pow(2).sum().backward()
        return [m.grad for m in tensors]

    whole = step()
    monkeypatch.setattr(ops_mlp, "chunk_rows", lambda *_: 32)
    parts = step()
    assert torch.equal(parts[0], whole[0])  # dx is the same, token by token
    for actual, expected in zip(parts[1:], whole[1:], strict=True):
        assert cosine(actual, expected) > 0.99999
