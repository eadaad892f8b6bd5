"""Adapters beside a weight frozen in FP8, against the same in float32 on the dequantised weight."""

import pytest
import torch
from bounds import cosine
from torch import nn

from octavo import FP8Linear
from octavo.nn.frozen import FROZEN_GRANULARITIES, FP8FrozenLinear, quantize_weight
from octavo.nn.groups import put_together
from octavo.nn.linear_function import linear, linear_and_input
from octavo.numerics.norm import Norm
from octavo.ops.adapters import Adapter, Adapters

K, N, R = 300, 320, 8
PARTS = [Adapter(0, 192, 2.0), Adapter(256, 320, 0.5)]  # outputs 192 to 256 have none


def build(granularity, dtype=torch.bfloat16):
    torch.manual_seed(0)
    frozen = FP8FrozenLinear.from_linear(nn.Linear(K, N, dtype=dtype), granularity)
    matrices = [
        (nn.Parameter(torch.randn(R, K) / K**0.5), nn.Parameter(torch.randn(part.last - part.first, R) / R**0.5))
        for part in PARTS
    ]
    return frozen, matrices


def run(frozen, matrices, x, **options):
    adapters = Adapters(tuple(PARTS), *zip(*matrices, strict=True))
    how = {"bias": frozen.bias, "adapters": adapters, **options}
    return linear(x, frozen.as_weight(), frozen.spec(x), frozen.states, **how)


def reference(frozen, matrices, x):
    y = x.float() @ frozen.dequantize(torch.float32).T + frozen.bias.float()
    pieces = [y[..., :192], y[..., 192:256], y[..., 256:]]
    for i, (part, (a, b)) in zip((0, 2), zip(PARTS, matrices, strict=True), strict=True):
        pieces[i] = pieces[i] + part.scaling * (x.float() @ a.T) @ b.T
    return torch.cat(pieces, dim=-1)


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fp8_products", [True, False])
def test_values_and_every_gradient(granularity, dtype, fp8_products):
    frozen, matrices = build(granularity, dtype)
    frozen.fp8_products = fp8_products
    at_least = 0.9975 if fp8_products else 0.99997 if dtype == torch.bfloat16 else 0.999999
    x = torch.randn(3, 37, K, dtype=dtype, requires_grad=True)
    y = run(frozen, matrices, x)
    g = torch.randn_like(y)
    y.backward(g)
    mine = [x.grad, *(m.grad for pair in matrices for m in pair)]
    assert all(m.grad.dtype == torch.float32 for pair in matrices for m in pair) and x.grad.dtype == dtype

    x_ref = x.detach().float().requires_grad_()
    for pair in matrices:
        for m in pair:
            m.grad = None
    y_ref = reference(frozen, matrices, x_ref)
    y_ref.backward(g.float())
    assert cosine(y, y_ref) > max(0.999, at_least)
    for actual, exact in zip(mine, [x_ref.grad, *(m.grad for pair in matrices for m in pair)], strict=True):
        assert cosine(actual, exact) > at_least


def test_x_is_not_kept_in_high_precision():
    frozen, matrices = build("block")
    x = torch.randn(64, K, dtype=torch.bfloat16, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(frozen, matrices, x)
    assert not any(t.shape == x.shape and t.element_size() > 1 for t in saved)
    assert any(t.shape == x.shape and t.element_size() == 1 for t in saved)


def check_side_by_side(parts):
    """In high precision they give, as one, what each gives by what it dequantises to."""
    for part in parts:
        part.fp8_products = False
    x = torch.randn(5, K)
    first, *others = parts
    y = linear(x, first.as_weight(*others), first.spec(x), first.states)
    torch.testing.assert_close(y, torch.cat([x @ part.dequantize(torch.float32).T for part in parts], dim=1))


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
def test_weights_side_by_side_in_high_precision(granularity):
    """Of any size: they are dequantised one by one where their scales are not those of one weight."""
    torch.manual_seed(0)
    parts = [FP8FrozenLinear.from_linear(nn.Linear(K, n, bias=False), granularity) for n in (192, 128)]
    check_side_by_side(parts)


@pytest.mark.parametrize("other", [("block", "E5M2"), ("channel", "E4M3")])
def test_weights_of_two_kinds_in_high_precision(other):
    """Side by side in memory, and still each by its own format and its own scales."""
    torch.manual_seed(0)
    parts = [FP8FrozenLinear.from_linear(nn.Linear(K, 128, bias=False), "block") for _ in range(2)]
    put_together(parts)
    parts[1].granularity = other[0]
    parts[1].set_weight(quantize_weight(torch.randn(128, K), *other))
    check_side_by_side(parts)


def test_a_norm_with_weights_that_are_zero():
    """In high precision what went into it is saved, so nothing has to be divided by them."""
    frozen, matrices = build("channel", torch.float32)
    frozen.fp8_products = False
    norm = Norm((torch.rand(K) + 0.5) * (torch.arange(K) % 5 > 0), 1e-6)
    h = torch.randn(7, K, requires_grad=True)
    g = torch.randn(7, N)
    run(frozen, matrices, h, norm=norm).backward(g)
    actual, h.grad = h.grad, None
    reference(frozen, matrices, nn.functional.rms_norm(h, (K,), norm.weight, norm.eps)).backward(g)
    torch.testing.assert_close(actual, h.grad, rtol=1e-4, atol=1e-5)


def test_a_gradient_past_the_norm_is_added():
    frozen, matrices = build("channel", torch.bfloat16)
    norm = Norm((torch.rand(K) + 0.5).to(torch.bfloat16), 1e-6)
    h, g = torch.randn(7, K).to(torch.bfloat16).requires_grad_(), torch.randn(7, N).to(torch.bfloat16)
    past = torch.randn(7, K).to(torch.bfloat16)
    run(frozen, matrices, h, norm=norm).backward(g)
    alone, h.grad = h.grad, None
    how = {"bias": frozen.bias, "adapters": Adapters(tuple(PARTS), *zip(*matrices, strict=True)), "norm": norm}
    y, same = linear_and_input(h, frozen.as_weight(), frozen.spec(h), frozen.states, **how)
    torch.autograd.backward([y, same], [g, past])
    assert torch.equal(h.grad, alone + past)
    h.grad = None
    _, same = linear_and_input(h, frozen.as_weight(), frozen.spec(h), frozen.states, **how)
    same.backward(past)
    assert torch.equal(h.grad, past)


def test_frozen_adapters_keep_nothing_and_get_nothing():
    frozen, matrices = build("channel")
    for a, b in matrices:
        a.requires_grad_(False)
        b.requires_grad_(False)
    x = torch.randn(5, K, dtype=torch.bfloat16, requires_grad=True)
    run(frozen, matrices, x).sum().backward()
    assert x.grad is not None and all(m.grad is None for pair in matrices for m in pair)


@pytest.mark.matrix
@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
@pytest.mark.parametrize("fp8_products", [True, False])
def test_compiled_as_one_graph(granularity, fp8_products):
    frozen, matrices = build(granularity)
    frozen.fp8_products = fp8_products
    x = torch.randn(6, K, dtype=torch.bfloat16, requires_grad=True)

    def step(function):
        for m in [x, *(m for pair in matrices for m in pair)]:
            m.grad = None
        y = function(frozen, matrices, x)
        y.float().pow(2).sum().backward()
        return [y, x.grad, *(m.grad for pair in matrices for m in pair)]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for actual, expected in zip(step(compiled), step(run), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("fp8_products", [True, False])
def test_under_autocast_and_without_gradients(fp8_products):
    frozen, matrices = build("block", torch.float32)
    frozen.fp8_products = fp8_products
    x = torch.randn(4, K, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(frozen, matrices, x)
        assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    with torch.no_grad():
        assert cosine(run(frozen, matrices, x), reference(frozen, matrices, x)) > 0.999


@pytest.mark.parametrize(
    ("recipe", "normed"),  # a norm joins trained weights per tensor only
    [
        *((recipe, False) for recipe in ("delayed", "current", "channel", "block", "mx")),
        ("delayed", True),
        ("current", True),
    ],
)
def test_adapters_over_a_trained_weight(recipe, normed):
    """Outputs and every gradient, the weight's too, at any granularity: x is saved so that it serves dA and dw."""
    torch.manual_seed(0)
    layer = FP8Linear(K, N, config=recipe)
    matrices = [nn.Parameter(torch.randn(shape) / shape[1] ** 0.5) for shape in ((R, K), (R, K), (192, R), (64, R))]
    adapters = Adapters(tuple(PARTS), tuple(matrices[:2]), tuple(matrices[2:]))
    norm = Norm(nn.Parameter(torch.rand(K) + 0.5), 1e-6) if normed else None
    x, residual = (torch.randn(3, 37, size, requires_grad=True) for size in (K, N))
    leaves = [x, residual, layer.weight, layer.bias, *matrices, *([norm.weight] if norm else [])]
    how = {"bias": layer.bias, "norm": norm, "adapters": adapters, "residual": residual}
    y = linear(x, layer.as_weight(), layer.spec(x), layer.states, **how)
    g = torch.randn_like(y)
    actual = torch.autograd.grad(y, leaves, g)

    h = x if norm is None else nn.functional.rms_norm(x, (K,), norm.weight, norm.eps)
    expected = nn.functional.linear(h, layer.weight, layer.bias) + residual
    for part, a, b in zip(PARTS, adapters.downs, adapters.ups, strict=True):
        added = part.scaling * (h @ a.T) @ b.T
        expected = expected + nn.functional.pad(added, (part.first, N - part.last))
    assert cosine(y, expected) > 0.999
    for one, other in zip(actual, torch.autograd.grad(expected, leaves, g), strict=True):
        assert cosine(one, other) > 0.995
