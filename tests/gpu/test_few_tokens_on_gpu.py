"""Products of few tokens by FP8 weights on a GPU: the kernels against their specification, and whole layers."""

import pytest
import torch
from torch import nn

from octavo.kernels import few_tokens as kernel
from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.groups import put_together
from octavo.nn.linear import weights_only
from octavo.nn.linear_function import linear
from octavo.nn.mlp_function import gated_mlp
from octavo.numerics import Quantized
from octavo.numerics import few_tokens as spec
from octavo.numerics.activation import ACTIVATIONS
from octavo.numerics.few_tokens import Low
from octavo.numerics.norm import Norm
from octavo.numerics.quantize import quantize
from octavo.ops.adapters import Adapter, Adapters
from octavo.ops.mlp import MLPSpec

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda").to(dtype)


def weight_of(n, k, granularity="block", format="E4M3"):
    return quantize(randn(n, k) / k**0.5, format=format, granularity=granularity, block=(128, 128))


def low(first, last, k, rank=32, dtype=BF16, scaling=0.5):
    return Low(first, last, scaling, (randn(rank, k) / k**0.5).to(dtype), randn(last - first, rank, dtype=dtype))


def assert_near(actual, expected):
    """Sums in another order, one rounding more, and t rounded to either side: units in the last place, seldom more."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    unit = torch.finfo(actual.dtype).eps
    difference = (actual.double() - expected.double()).abs()
    assert difference.norm() <= unit * expected.double().norm()
    assert (difference <= 4 * unit * expected.double().abs().max()).all()


@pytest.mark.parametrize("granularity", ["block", "channel", "tensor"])
@pytest.mark.parametrize("m", [1, 3, 16, 17, 33, 64, 65, 128])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (1000, 1040), (130, 144)])
def test_linear(m, n, k, granularity):
    x, weight, residual, bias = randn(m, k, dtype=BF16), weight_of(n, k, granularity), randn(m, n, dtype=BF16), randn(n)
    third = n // 3
    adapters = [low(0, third, k), low(third, 2 * third, k, rank=8), low(2 * third, n, k, rank=20)]
    assert kernel.can_multiply(x, weight, adapters)
    for lows, more in (([], {}), (adapters, {"residual": residual, "bias": bias})):
        y = kernel.linear(x, weight, lows, **more)
        assert_near(y, spec.linear(x, weight, lows, **more))
        for _ in range(3):
            assert torch.equal(kernel.linear(x, weight, lows, **more), y)


@pytest.mark.parametrize("format", ["E4M3", "E5M2"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("of_adapters", [BF16, torch.float32])
@pytest.mark.parametrize("m", [1, 20])
def test_formats_and_dtypes(m, format, dtype, of_adapters):
    x, weight = randn(m, 512, dtype=dtype), weight_of(384, 512, "block", format)
    adapters = [low(0, 384, 512, dtype=dtype if of_adapters == BF16 else of_adapters)]
    norm = Norm((torch.rand(512, device="cuda") + 0.5).to(dtype), 1e-5)
    assert_near(kernel.linear(x, weight, adapters, norm=norm), spec.linear(x, weight, adapters, norm=norm))


@pytest.mark.parametrize("m", [2, 64])
def test_every_byte(m):
    """NaN and infinity among them; the interpreter has other instructions."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        every = torch.arange(256, dtype=torch.uint8, device="cuda").view(dtype)
        weight = Quantized(
            every[:, None].view(torch.uint8).repeat(1, 256).view(dtype), torch.ones(256, 1, device="cuda")
        )
        x = torch.zeros(m, 256, dtype=BF16, device="cuda")
        x[0, 0], x[1, 255] = 1, 1  # of an even and of an odd column
        actual, finite = kernel.linear(x, weight), every.float().isfinite()
        assert torch.equal(actual[:2, finite].float(), every.float()[finite].repeat(2, 1))
        assert actual[:, ~finite].isnan().all() and actual[:, finite].isfinite().all()
        torch.testing.assert_close(
            kernel.linear(x[:1].contiguous(), weight), actual[:1], rtol=0, atol=0, equal_nan=True
        )


def test_nan_stays_in_its_row():
    x, weight = randn(64, 4096, dtype=BF16), weight_of(4096, 4096)
    weight.data.view(torch.uint8)[77, 1001] = 0x7F
    x[5, 9] = float("nan")
    adapters = [low(0, 4096, 4096)]
    y = kernel.linear(x, weight, adapters)
    expected = torch.zeros_like(y, dtype=torch.bool)
    expected[5], expected[:, 77] = True, True
    assert torch.equal(y.isnan(), expected)
    for row in (5, 6):
        assert torch.equal(kernel.linear(x[row : row + 1], weight, adapters).isnan(), expected[row : row + 1])


@pytest.mark.parametrize("granularity", ["block", "channel"])
def test_rows_of_any_magnitude(granularity):
    """Each row against float64, of which every result is rounded to BF16 once."""
    x, weight = randn(6, 4096), weight_of(512, 4096, granularity)
    x *= torch.tensor([1e36, 1e-30, 2e-35, 1.0, 1e10, 0.0], device="cuda")[:, None]
    x[3] *= 2.0 ** torch.randint(-40, 40, (4096,), device="cuda")
    x = x.to(BF16)
    y, exact = kernel.linear(x, weight).double(), x.double() @ weight.dequantize(torch.float32).double().t()
    assert ((y - exact).norm(dim=1) <= 2.0**-8 * exact.norm(dim=1)).all()
    assert not y[5].any()


@pytest.mark.parametrize("m", [1, 64, 128])
def test_programs_that_wait_for_each_other(m):
    """Parts of K and adapters, again and again in a graph, with the memory of counters in use by others between."""
    k, n = 4096, 1024
    x, weight, adapters = randn(m, k, dtype=BF16), weight_of(n, k), [low(0, n // 2, k), low(n // 2, n, k)]
    norm = Norm(torch.ones(k, dtype=BF16, device="cuda"), 1e-5)
    gate_up, down = weight_of(2 * n, k), weight_of(k, n)
    expected = kernel.linear(x, weight, adapters), kernel.gated_mlp(x, gate_up, down, "silu", residual=x, norm=norm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            y = kernel.linear(x, weight, adapters)
            torch.full([8 * 4096], 77, dtype=torch.int32, device="cuda")
            h = kernel.gated_mlp(x, gate_up, down, "silu", residual=x, norm=norm)
    for _ in range(50):
        graph.replay()
        assert torch.equal(y, expected[0]) and torch.equal(h, expected[1])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("m", [1, 16, 50, 65, 128])
@pytest.mark.parametrize(("f", "k"), [(14336, 4096), (384, 144)])
def test_gated_mlp(m, f, k, activation):
    x, norm = randn(m, k, dtype=BF16), Norm((torch.rand(k, device="cuda") + 0.5).to(BF16), 1e-5)
    gate_up, down = weight_of(2 * f, k), weight_of(k, f)
    lows = [low(0, f, k, scaling=0.1), low(f, 2 * f, k, scaling=0.1)], [low(0, k, f, scaling=0.1)]
    for more in ({}, {"residual": x, "norm": norm}):
        y = kernel.gated_mlp(x, gate_up, down, activation, *lows, **more)
        assert_near(y, spec.gated_mlp(x, gate_up, down, activation, *lows, **more))
        assert torch.equal(kernel.gated_mlp(x, gate_up, down, activation, *lows, **more), y)


@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize("tokens", [1, 8])
@torch.no_grad()
def test_layers_in_a_graph(tokens, granularity):
    """As decoding calls them: a norm and a group, a norm and an MLP, in a CUDA graph; against the same call eagerly."""
    k, f = 1024, 2048
    shapes = ((k, f), (k, f), (f, k))
    gate, up, down = (
        FP8FrozenLinear.from_linear(nn.Linear(*s, bias=False, dtype=BF16, device="cuda"), granularity) for s in shapes
    )
    put_together([gate, up])
    positions = (Adapter(0, f, 2.0), Adapter(f, 2 * f, 0.5))
    downs, ups = tuple(randn(16, k) / k**0.5 for _ in range(2)), tuple(randn(f, 16) for _ in range(2))
    adapters, h = Adapters(positions, downs, ups), randn(tokens, 1, k, dtype=BF16)
    norm = Norm((torch.rand(k, device="cuda") + 0.5).to(BF16), 1e-5)

    def run(x):
        qkv = linear(x, gate.as_weight(up), gate.spec(x), gate.states, norm=norm, adapters=adapters)
        how = MLPSpec(gate.spec(x), "silu")
        return qkv, gated_mlp(
            x, gate.as_weight(up), down.as_weight(), how, gate.states, down.states, norm=norm, adapters=adapters,
            residual=True,
        )  # fmt: skip

    with weights_only():
        expected = [y.clone() for y in run(h)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = run(h)
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    many = h.repeat(256 // tokens, 1, 1)
    with weights_only():
        assert len(many) > spec.MOST_TOKENS
        for few, by_dequantised in zip(actual, run(many), strict=True):
            difference = few.double() - by_dequantised[: len(few)].double()
            assert difference.norm() < 2.0**-7 * few.double().norm()
