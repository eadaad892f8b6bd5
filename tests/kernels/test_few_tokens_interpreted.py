"""Products of few tokens by FP8 weights: the kernels in Triton's interpreter against their specification."""

import math
from functools import partial

import pytest
import torch
from kernel_cases import assert_nan_alike

from octavo.kernels import few_tokens as kernel
from octavo.kernels.tuning import HOPPER
from octavo.numerics import Quantized
from octavo.numerics import few_tokens as spec
from octavo.numerics.activation import ACTIVATIONS
from octavo.numerics.few_tokens import Low
from octavo.numerics.norm import Norm
from octavo.numerics.quantize import quantize

BF16 = torch.bfloat16


def weight_of(n, k, granularity="block", format="E4M3"):
    return quantize(torch.randn(n, k) / k**0.5, format=format, granularity=granularity, block=(128, 128))


def low(first, last, k, rank=8, dtype=BF16, scaling=0.5):
    return Low(
        first, last, scaling, (torch.randn(rank, k) / k**0.5).to(dtype), torch.randn(last - first, rank).to(dtype)
    )


def assert_near(actual, expected, *added, steps=1.0, share=0.5):
    """To the bit, but for the order of a sum: that may move a result by a unit in the last place of the largest."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    largest = max(float(x.float().abs().max()) for x in (expected, *added))
    unit = torch.finfo(actual.dtype).eps * 2.0 ** math.floor(math.log2(max(largest, 1e-30)))
    assert (actual.float() - expected.float()).abs().max() <= steps * unit
    assert (actual != expected).float().mean() < share


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("granularity", ["block", "channel", "tensor"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 200, 144), (3, 130, 400), (17, 64, 256), (64, 257, 128), (65, 129, 272)])
def test_linear(m, n, k, granularity):
    x, weight = torch.randn(m, k).to(BF16), weight_of(n, k, granularity)
    assert kernel.can_multiply(x, weight, [])
    assert_near(kernel.linear(x, weight), spec.linear(x, weight))


def test_as_many_tokens_as_there_can_be():
    x, weight = torch.randn(128, 144).to(BF16), weight_of(130, 144)
    assert_near(kernel.linear(x, weight), spec.linear(x, weight))


@pytest.mark.parametrize("format", ["E4M3", "E5M2"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_formats_and_dtypes(format, dtype):
    x, weight = torch.randn(5, 256).to(dtype), weight_of(70, 256, "channel", format)
    assert_near(kernel.linear(x, weight), spec.linear(x, weight))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(
    "spans",
    [
        [(0, 200)],
        [(0, 64), (64, 136), (136, 200)],
        [(16, 80)],  # nothing on either side
        [(0, 200), (30, 90)],  # two on the same outputs
    ],
)
def test_adapters_bias_and_residual(spans, dtype):
    x, weight = torch.randn(6, 272).to(BF16), weight_of(200, 272)
    adapters = [
        low(*span, 272, rank, dtype, 0.5 + i) for i, (span, rank) in enumerate(zip(spans, (8, 20, 3), strict=False))
    ]
    bias, residual = torch.randn(200).to(BF16), torch.randn(6, 200).to(BF16)
    assert kernel.can_multiply(x, weight, adapters)
    for added in ({}, {"bias": bias}, {"residual": residual}, {"bias": bias, "residual": residual}):
        expected = spec.linear(x, weight, adapters, **added)
        assert_near(kernel.linear(x, weight, adapters, **added), expected, spec.linear(x, weight), *added.values())


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("k", [144, 256])
def test_after_a_norm(k, shifted):
    h, weight, norm = 3 * torch.randn(5, k).to(BF16), weight_of(100, k), Norm(torch.rand(k).to(BF16), 1e-5, shifted)
    adapters = [low(0, 100, k)]
    # 1 / rms may differ in its last bit, which may move an x by a unit of its own.
    expected = spec.linear(h, weight, adapters, norm=norm)
    assert_near(kernel.linear(h, weight, adapters, norm=norm), expected, steps=2.0)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_parts_of_the_columns(parts, monkeypatch):
    monkeypatch.setattr(kernel, "parts_of", lambda *_: parts)
    monkeypatch.setattr(kernel, "_LAUNCHES", type(kernel._LAUNCHES)())
    x, weight = torch.randn(4, 656).to(BF16), weight_of(96, 656)
    adapters, residual = [low(0, 96, 656)], torch.randn(4, 96).to(BF16)
    expected = spec.linear(x, weight, adapters, residual=residual)
    assert_near(kernel.linear(x, weight, adapters, residual=residual), expected, spec.linear(x, weight), residual)
    gate_up, down = weight_of(256, 656), weight_of(656, 128)
    lows = [low(0, 256, 656)], [low(0, 656, 128)]
    expected = spec.gated_mlp(x, gate_up, down, "silu", *lows)
    assert_near(kernel.gated_mlp(x, gate_up, down, "silu", *lows), expected, steps=2.0, share=0.8)


@pytest.mark.parametrize(("tokens", "parts"), [(70, 1), (128, 3)])
def test_several_tiles_of_tokens(tokens, parts, monkeypatch):
    """More than 64 tokens of gate and up: the first 64, and the rest."""
    assert HOPPER.few_tokens.gated[128].tokens == 64
    if parts > 1:
        monkeypatch.setattr(kernel, "parts_of", lambda *_: parts)
    monkeypatch.setattr(kernel, "_LAUNCHES", type(kernel._LAUNCHES)())
    x, norm = torch.randn(tokens, 400).to(BF16), Norm(torch.rand(400).to(BF16), 1e-5)
    gate_up, down = weight_of(2 * 256, 400), weight_of(130, 256)
    lows = [low(0, 256, 400), low(256, 512, 400)], [low(0, 130, 256)]
    residual = torch.randn(tokens, 130).to(BF16)
    more = {"residual": residual, "norm": norm}
    expected = spec.gated_mlp(x, gate_up, down, "silu", *lows, **more)
    assert_near(kernel.gated_mlp(x, gate_up, down, "silu", *lows, **more), expected, steps=2.0, share=0.8)


@pytest.mark.parametrize("rows", [16, 64, 128])
def test_tiles_of_outputs(rows, monkeypatch):
    tiles = HOPPER.few_tokens
    products = {tokens: tile._replace(n=rows) for tokens, tile in tiles.products.items()}
    monkeypatch.setattr(kernel, "tuning_for", lambda _: HOPPER._replace(few_tokens=tiles._replace(products=products)))
    monkeypatch.setattr(kernel, "_LAUNCHES", type(kernel._LAUNCHES)())
    for granularity in ("block", "channel"):
        x, weight = torch.randn(4, 256).to(BF16), weight_of(384, 256, granularity)
        assert_near(kernel.linear(x, weight), spec.linear(x, weight))


def rows_of_all_magnitudes(k):
    """Huge, tiny, too tiny for their power, mixed over 80 binades, one large among small, and zeros."""
    x = torch.randn(7, k)
    x[0] *= 1e37
    x[1] *= 1e-30
    x[2] *= 2e-35
    x[3] *= 2.0 ** torch.randint(-40, 40, (k,))
    x[4, 1:] *= 2.0**-20
    x[5] = 0
    return x.to(BF16)


@pytest.mark.parametrize("granularity", ["block", "channel"])
def test_rows_of_any_magnitude(granularity):
    """Within the bound of the specification's module, against float64."""
    x, weight, adapters = rows_of_all_magnitudes(272), weight_of(130, 272, granularity), [low(0, 60, 272)]
    adapters = [adapters[0]._replace(scaling=2.0**-8)]
    w = weight.dequantize(torch.float32).double()
    for lows in ([], adapters):
        y, wide = kernel.linear(x, weight, lows).double(), x.double()
        exact, high, extra = wide @ w.t(), wide.abs() @ w.abs().t(), torch.zeros(len(x), len(w), dtype=torch.float64)
        for first, last, scaling, down, up in lows:
            a, b = down.double(), up.double()
            exact[:, first:last] += scaling * wide @ a.t() @ b.t()
            extra[:, first:last] += scaling * wide.abs() @ a.abs().t() @ b.abs().t()
        lost = 2.0**-39 * wide.abs().amax(dim=1, keepdim=True) * w.abs().sum(dim=1)
        lost[2] = 2.0**-151 * w.abs().sum(dim=1)
        smallest = 2.0**-126  # below that, the interpreter does not round to BF16 as it should
        sizes = 2.0**-8 * (exact.abs() + extra) + smallest * (1 + sum(low.up.abs().sum() for low in lows))
        assert ((y - exact).abs() <= lost + 272 * 2.0**-24 * (high + extra) + 1.01 * sizes).all()
        assert not y[5].any()


def test_hidden_features_of_any_magnitude():
    """h has a power of two for each token and 64 features: here they differ by 2⁶⁰."""
    x, down = torch.randn(3, 128).to(BF16), weight_of(96, 256, "channel")
    gate_up = weight_of(512, 128, "channel")
    size = torch.ones(512, 1)
    size[:256:2] *= 2.0**30  # even features
    size[128:256] *= 2.0**-30
    gate_up = Quantized(gate_up.data, gate_up.scale * size)
    for only in (slice(0, 128, 2), slice(1, 128, 2), slice(128, 256, 2), slice(129, 256, 2)):
        data = torch.zeros(96, 256).to(torch.float8_e4m3fn)
        data[:, only] = down.data[:, only]
        one = Quantized(data, down.scale)
        actual, expected = (each.gated_mlp(x, gate_up, one, "silu") for each in (kernel, spec))
        assert expected.any()
        assert_near(actual, expected, steps=2.0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("m", "f", "k", "granularity"), [(5, 384, 144, "block"), (17, 208, 256, "channel")])
def test_gated_mlp(m, f, k, granularity, activation):
    x, norm = torch.randn(m, k).to(BF16), Norm(torch.rand(k).to(BF16) + 0.5, 1e-5)
    gate_up, down = weight_of(2 * f, k, granularity), weight_of(k, f, granularity)
    adapters, adapters_down = [low(0, f, k), low(f, 2 * f, k, rank=5)], [low(0, k, f)]
    assert kernel.can_gate(x, gate_up, down, adapters, adapters_down, norm=norm)
    for lows in ((adapters, adapters_down), ([], []), (adapters[1:], [])):
        for more in ({}, {"residual": x, "norm": norm}):
            expected = spec.gated_mlp(x, gate_up, down, activation, *lows, **more)
            actual = kernel.gated_mlp(x, gate_up, down, activation, *lows, **more)
            # Roundings of gate, up and h, each of half a unit, are averaged by the sum over F.
            assert_near(actual, expected, x, steps=2.0, share=0.8)


@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize(("format", "byte"), [("E4M3", 0x7F), ("E4M3", 0xFF), ("E5M2", 0x7E), ("E5M2", 0x7C)])
def test_what_is_not_finite_stays_so(format, byte, granularity):
    x, weight = torch.randn(3, 144).to(BF16), weight_of(130, 144, granularity, format)
    weight.data.view(torch.uint8)[7, 100], weight.data.view(torch.uint8)[129, 141] = byte, byte
    actual, expected = kernel.linear(x, weight), spec.linear(x, weight)
    assert torch.equal(actual.isnan(), expected.isnan()) and torch.equal(actual.isinf(), expected.isinf())
    assert not expected.isfinite().all() and expected[:, :7].isfinite().all()


def test_a_token_that_is_not_finite_leaves_others_alone():
    x, weight, adapters = torch.randn(5, 144).to(BF16), weight_of(130, 144), [low(0, 50, 144)]
    x[1, 3], x[3, 7] = math.nan, math.inf
    x[3, 8:] *= 1e30
    assert_nan_alike(kernel.linear(x, weight, adapters), spec.linear(x, weight, adapters))


def test_infinite_projections_reach_their_outputs_only():
    x, weight, adapter = torch.randn(2, 128).to(BF16), weight_of(130, 128), low(0, 50, 128)
    adapter.down[0] = 1e38
    actual = kernel.linear(x.abs(), weight, [adapter])
    assert not actual[:, :50].isfinite().all() and actual[:, 50:].isfinite().all()


def test_zeros():
    weight = Quantized(torch.zeros(100, 256).to(torch.float8_e4m3fn), torch.ones(1, 2))
    assert not kernel.linear(torch.randn(3, 256).to(BF16), weight).any()
    assert not kernel.linear(torch.zeros(3, 256, dtype=BF16), weight_of(100, 256)).any()


def test_every_byte():
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        every = torch.arange(256, dtype=torch.uint8).view(dtype)
        weight = Quantized(every[:, None].repeat(1, 16).contiguous(), torch.ones(256, 1))
        x = torch.zeros(2, 16, dtype=BF16)
        x[0, 0], x[1, 15] = 1, 1  # of an even and of an odd column
        actual, finite = kernel.linear(x, weight), every.float().isfinite()
        assert torch.equal(actual[:, finite].float(), every.float()[finite].repeat(2, 1))
        assert torch.equal(actual.isnan(), every.float().isfinite().logical_not().repeat(2, 1))  # 0 × ∞ is NaN


def test_counters_begin_at_zero(monkeypatch):
    """Whatever is in the memory that they are given: without that, programs would not wait, or wait for ever."""
    monkeypatch.setattr(kernel, "parts_of", lambda *_: 3)
    monkeypatch.setattr(kernel, "_LAUNCHES", type(kernel._LAUNCHES)())
    x, gate_up, down = torch.randn(3, 400).to(BF16), weight_of(256, 400), weight_of(70, 128)
    launches, given = kernel.mlp_launches(x, gate_up, down, "silu", [], [], None, None)
    expected = kernel.gated_mlp(x, gate_up, down, "silu")
    assert any(dtype == torch.int32 for _, _, dtype in launches._made)
    launches._made = [
        (partial(torch.full, fill_value=7) if dtype == torch.int32 else make, shape, dtype)
        for make, shape, dtype in launches._made
    ]
    assert torch.equal(launches.run(*given)[0], expected)


def test_twice_the_same_bits():
    x, weight, adapters = torch.randn(9, 656).to(BF16), weight_of(130, 656), [low(0, 130, 656)]
    assert torch.equal(kernel.linear(x, weight, adapters), kernel.linear(x, weight, adapters))


def test_what_they_leave_to_others():
    x, weight = torch.randn(3, 256).to(BF16), weight_of(64, 256)
    assert kernel.can_multiply(x, weight, [])
    assert not kernel.can_multiply(x.float(), weight, [])
    assert not kernel.can_multiply(torch.zeros(129, 256, dtype=BF16), weight, [])
    assert not kernel.can_multiply(x[:0], weight, [])
    assert not kernel.can_multiply(x, weight_of(64, 200), [])  # rows that are not whole 16 bytes
    assert not kernel.can_multiply(x, weight, [low(0, 64, 256)] * 4)
    assert not kernel.can_multiply(x, weight, [low(0, 64, 256, rank=129)])
    assert not kernel.can_multiply(x, weight, [low(0, 64, 256), low(0, 64, 256, dtype=torch.float32)])
    by_row = quantize(torch.randn(64, 256), granularity="block", block=(1, 128))
    assert not kernel.can_multiply(x, by_row, [])
    assert not kernel.can_gate(x, weight, weight_of(64, 48), [], [], norm=None)
    for granularity, f, taken in (("block", 128, True), ("block", 144, False), ("channel", 144, True)):
        halves = weight_of(2 * f, 256, granularity), weight_of(256, f, granularity)
        assert kernel.can_gate(x, *halves, [], [], norm=None) is taken


def test_parts_fill_the_gpu():
    tiles = HOPPER.few_tokens
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (2048, 512), (128, 128)):
        for m in (1, 16, 64, 128):
            tile = tiles.products[kernel.tile_of_tokens(m)]
            parts = kernel.parts_of(-(-n // tile.n), k // 128, m, 132 * tile.programs, tiles)
            assert 1 <= parts <= min(k // 128, tiles.most_parts)
            if n * k >= 2**24:
                assert -(-n // tile.n) * parts >= 90
