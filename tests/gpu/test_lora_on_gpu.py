"""Frozen FP8 linears with adapters on a GPU: their kernels against the specification, and whole layers."""

import pytest
import torch
from kernel_cases import (
    CONFIGS,
    adapter_gradients,
    assert_nan_alike,
    assert_nearly_same,
    assert_same_bits,
    low_rank,
    new_state,
    sample,
    unusual,
    with_low_rank,
    with_nan,
)
from torch import nn

from octavo.kernels import quantize as kernel
from octavo.kernels.adapters import gradients as adapting
from octavo.kernels.adapters import outputs as adding
from octavo.kernels.gated import low_rank as gated_low_rank
from octavo.kernels.quantize import dequantize as dequantizing
from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.groups import put_together
from octavo.nn.linear_function import linear as fp8_linear
from octavo.nn.mlp_function import gated_mlp
from octavo.numerics.activation import ACTIVATIONS, dequantize_gate_up, gated, gated_backward, save_gate_up
from octavo.numerics.formats import E4M3
from octavo.numerics.norm import Norm
from octavo.numerics.operand import quantize_operand
from octavo.numerics.quantize import Quantized, quantize
from octavo.ops.adapters import Adapter, Adapters
from octavo.ops.mlp import MLPSpec

BF16 = torch.bfloat16
WIDTHS = [64, 300, 1000, 4096, 6144, 14336, 28672, 32768]


def cosine(a, b):
    return nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["channel", "little margin"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float16])
def test_whole_rows(width, name, dtype):
    for operand in ("x", "g"):
        recipe = getattr(CONFIGS[name].recipe, operand)
        for x in (
            sample(130, width, device="cuda").clamp(-6e4, 6e4).to(dtype),
            *unusual(9, width, dtype=dtype, device="cuda").values(),
        ):
            mine, theirs = new_state(device="cuda"), new_state(device="cuda")
            assert_same_bits(kernel.quantize_operand(x, mine, recipe), quantize_operand(x, theirs, recipe))
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)
            factor = torch.rand(width, device="cuda") + 0.01
            actual = kernel.quantize_folded(x, factor, mine, recipe)
            assert_same_bits([actual], quantize_operand((x.float() * factor).to(dtype), theirs, recipe))


def test_many_rows_of_a_wide_matrix():
    recipe = CONFIGS["channel"].recipe.x
    for shape in ((8192, 4096), (4096, 14336), (2048, 28672), (8192, 6144)):
        x = sample(*shape, dtype=BF16, device="cuda")
        view = torch.cat([x, x], dim=1)[:, : shape[1]]  # rows apart
        expected = quantize_operand(x, new_state(device="cuda"), recipe)
        for each in (x, view):
            assert_same_bits(kernel.quantize_operand(each, new_state(device="cuda"), recipe), expected)


@pytest.mark.parametrize("shape", [(64, 128), (33, 300), (8192, 4096), (200, 260)])
@pytest.mark.parametrize(
    ("granularity", "block"), [("tensor", (1, 128)), ("channel", (1, 128)), ("block", (1, 128)), ("block", (128, 128))]
)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_dequantize(shape, granularity, block, dtype):
    x = quantize(sample(*shape, device="cuda"), format=E4M3, granularity=granularity, block=block)
    assert dequantizing.can_dequantize(x, dtype)
    assert torch.equal(dequantizing.dequantize(x, dtype), x.dequantize(dtype))


def low(*shape, **options):
    return gated_low_rank.Low(*low_rank(*shape, **options, device="cuda"))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("m", "f", "rank"), [(64, 128, 8), (100, 1536, 16), (2048, 14336, 32), (64, 256, 100), (64, 256, 0)]
)
def test_gated_with_adapters(m, f, rank, activation):
    gate_up = (2 * torch.randn(m, 2 * f, device="cuda")).to(BF16)
    gate, up = (low(m, f, rank, s) if rank else None for s in (0.5, 2.0))
    halves = torch.cat([with_low_rank(gate_up[:, :f], gate), with_low_rank(gate_up[:, f:], up)], dim=1)
    expected = gated(halves, activation)
    saved = Quantized(
        torch.empty(m, 2 * f, dtype=E4M3.dtype, device="cuda"),
        torch.empty(m, 2 * f // 128, dtype=torch.uint8, device="cuda"),
    )
    for _ in range(3):
        h = gated_low_rank.gated(gate_up, gate, up, activation, saved)
        assert cosine(h, expected) > 0.99999 and (h != expected).float().mean() < 0.03
        wanted = save_gate_up(halves)
        assert (saved.scale != wanted.scale).float().mean() < 1e-3  # an amax at a power of two may fall either way
        same = saved._replace(
            data=torch.where(
                (saved.scale == wanted.scale).repeat_interleave(128, 1), saved.data.float(), wanted.data.float()
            ).to(E4M3.dtype),
            scale=saved.scale.float(),
        )
        assert_nearly_same(same, wanted._replace(scale=same.scale), share=0.02)
    assert torch.equal(gated_low_rank.gated(gate_up, gate, up, activation, None), h)

    dh = torch.randn(m, f, device="cuda").to(BF16)
    product = low(m, f, rank, 1.0, transposed=False) if rank else None
    factor = torch.rand(2 * f, device="cuda") + 0.1
    again = dh.clone()
    d = gated_low_rank.gated_backward(again, saved, product, activation, factor=factor, h=True)
    gate_up_hp = dequantize_gate_up(saved)
    expected = gated_backward(with_low_rank(dh, product, transposed=False), gate_up_hp, activation) * factor
    assert cosine(d, expected) > 0.99999 and cosine(again, gated(gate_up_hp, activation)) > 0.99999


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_with_adapters_keeps_nan(activation):
    gate_up, dh = with_nan(64, 256, device="cuda")
    expected = gated(gate_up, activation), gated_backward(dh, gate_up, activation)
    in_fp8 = Quantized(
        torch.empty(64, 512, dtype=E4M3.dtype, device="cuda"), torch.empty(64, 4, dtype=torch.uint8, device="cuda")
    )
    assert_nan_alike(gated_low_rank.gated(gate_up, None, None, activation, in_fp8), expected[0])
    factor = torch.ones(512, device="cuda")
    gradient = gated_low_rank.gated_backward(dh, in_fp8, None, activation, factor=factor, h=True)
    assert_nan_alike(gradient, expected[1])
    assert_nan_alike(dh, expected[0])  # h takes its place


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize(
    ("m", "spans", "rank"),
    [
        (8192, [(0, 4096), (4096, 1024), (5120, 1024)], 32),
        (4096, [(0, 14336), (14336, 14336)], 16),
        (2048, [(0, 2048), (4096, 1024)], 64),  # nothing in between
        (130, [(0, 300)], 8),
        (37, [(0, 64), (64, 200)], 20),
    ],
)
def test_gradients_of_adapters(m, spans, rank, fold):
    spans = [(first, size, 0.5 + i) for i, (first, size) in enumerate(spans)]
    width = sum(spans[-1][:2])
    g, t = (torch.randn(m, n, device="cuda").to(BF16) for n in (width, rank * len(spans)))
    ups = [torch.randn(size, rank, device="cuda").to(BF16) for _, size, _ in spans]
    factor = torch.rand(width, device="cuda") + 0.5 if fold else None
    assert adapting.can_multiply(g, ups)
    expected = adapter_gradients(g, t, ups, spans, factor)
    for times in range(3):
        u, d = (torch.zeros_like(each) for each in expected)
        for _ in range(times + 1):
            adapting.add_gradients(g, t, ups, spans, factor, u, d)
        for actual, exact in zip((u, d), expected, strict=True):
            assert (actual / (times + 1) - exact).norm() < 4e-3 * exact.norm()
    adapting.add_gradients(g, t, ups, spans, factor, torch.zeros_like(u), None)

    residual = torch.randn_like(g) if len(spans) == 1 else None
    expected = g.float() if residual is None else g.float() + residual
    for i, ((first, size, scaling), up) in enumerate(zip(spans, ups, strict=True)):
        expected[:, first : first + size] += scaling * t[:, i * rank : (i + 1) * rank].float() @ up.float().T
    assert adding.can_add(g, ups, spans, residual, transposed=True)
    for left in (t, t.float()):
        y = g.clone()
        adding.add_outputs(y, left, ups, spans, residual, transposed=True)
        assert (y - expected).norm() < 4e-3 * expected.norm()


@pytest.mark.parametrize(("m", "k", "ranks"), [(8192, 4096, 96), (4096, 4096, 64), (100, 200, 24)])
def test_down_projections_of_gradients(m, k, ranks):
    dx, u, a = (torch.randn(*shape, device="cuda").to(BF16) for shape in ((m, k), (m, ranks), (ranks, k)))
    expected = dx.float() + u.float() @ a.float()
    adding.add_outputs(dx, u, [a], [(0, k, 1.0)], None, transposed=False)
    assert (dx - expected).norm() < 4e-3 * expected.norm()


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize(("m", "k", "ranks"), [(8192, 4096, 96), (4096, 14336, 32), (130, 300, 256), (37, 200, 8)])
def test_down_from_saved_x(m, k, ranks, granularity):
    x = quantize(torch.randn(m, k, device="cuda"), format=E4M3, granularity=granularity, block=(1, 128))
    u, d = torch.randn(m, ranks, device="cuda").to(BF16), torch.zeros(ranks, k, device="cuda")
    assert adapting.can_multiply_saved(x, u, BF16)
    expected = u.float().T @ x.dequantize(torch.float32)
    for times, left in enumerate((u, u.float(), u)):
        adapting.add_down(left, x, d, BF16)
        assert (d / (times + 1) - expected).norm() < 4e-3 * expected.norm()


def adapters_of(positions, inputs, rank=32):
    downs = [nn.Parameter(torch.randn(rank, inputs, device="cuda", dtype=BF16) / inputs**0.5) for _ in positions]
    ups = [nn.Parameter(torch.randn(p.last - p.first, rank, device="cuda", dtype=BF16) / rank**0.5) for p in positions]
    return Adapters(tuple(positions), tuple(downs), tuple(ups))


def matrices(*adapters):
    return [m for each in adapters for m in (*each.downs, *each.ups)]


def product(x, weight, mine):
    y = x @ weight.T
    for position, a, b in zip(mine.positions, mine.downs, mine.ups, strict=True):
        part = position.scaling * (x @ a.float().T) @ b.float().T
        y = y + nn.functional.pad(part, (position.first, y.shape[-1] - position.last))
    return y


def compare(run, reference, x, tensors, bound=0.9975):
    y = run(x)
    g = torch.randn_like(y)
    y.backward(g)
    mine = [x.grad, *(m.grad for m in tensors)]
    x_ref = x.detach().float().requires_grad_()
    for m in tensors:
        m.grad = None
    expected = reference(x_ref)
    expected.backward(g.float())
    assert cosine(y, expected) > 0.998
    for actual, exact in zip(mine, [x_ref.grad, *(m.grad for m in tensors)], strict=True):
        assert cosine(actual, exact) > bound
    for m in (x, *tensors):
        m.grad = None


@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize("tokens", [256, 100])
@pytest.mark.parametrize("compiled", [False, True])
def test_linears_and_mlp(granularity, tokens, compiled):
    torch.manual_seed(0)
    torch._dynamo.reset()
    k, f = 1024, 2048
    shapes = ((k, f), (k, f), (f, k))
    gate, up, down = linears = [
        FP8FrozenLinear.from_linear(nn.Linear(*s, bias=False, dtype=BF16, device="cuda"), granularity) for s in shapes
    ]
    put_together([gate, up])
    both = adapters_of((Adapter(0, f, 2.0), Adapter(f, 2 * f, 0.5)), k)
    last = adapters_of((Adapter(0, k, 1.0),), f)
    weights_hp = [linear.dequantize(torch.float32) for linear in linears]

    def group(x, **options):
        return fp8_linear(x, gate.as_weight(up), gate.spec(x), gate.states, adapters=both, **options)

    def mlp(x, **options):
        weights, how = (gate.as_weight(up), down.as_weight()), MLPSpec(gate.spec(x), "silu")
        adapters = {"adapters": both, "adapters_down": last}
        return gated_mlp(x, *weights, how, gate.states, down.states, **adapters, **options)

    def linear(x):
        return product(x, torch.cat(weights_hp[:2]), both)

    def reference(x):
        first, second = linear(x).chunk(2, dim=-1)
        return product(nn.functional.silu(first) * second, weights_hp[2], last)

    wrap = torch.compile(fullgraph=True) if compiled else lambda function: function
    x = torch.randn(tokens, k, device="cuda", dtype=BF16, requires_grad=True)
    compare(wrap(group), linear, x, matrices(both))
    compare(wrap(lambda x: group(x, x_is_saved=True)), linear, x, matrices(both))
    compare(wrap(mlp), reference, x, matrices(both, last))

    norm = Norm(torch.rand(k, device="cuda", dtype=BF16) + 0.5, 1e-5)

    def normed(x):
        return nn.functional.rms_norm(x, (k,), norm.weight.float(), norm.eps)

    compare(wrap(lambda x: group(x, norm=norm)), lambda x: linear(normed(x)), x, matrices(both))
    compare(
        wrap(lambda x: mlp(x, norm=norm, residual=True)), lambda x: x + reference(normed(x)), x, matrices(both, last)
    )
    compare(wrap(lambda x: group(x, residual=group(x))), lambda x: 2 * linear(x), x, matrices(both))
