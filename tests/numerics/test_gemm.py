"""The FP8 product against float64 numpy of the same operands, within the bound of FP32 accumulation.

Bound. FP8 × FP8 is exact in FP32 (at most 8 significant bits). Scaling operands or the result, K products, K − 1
additions in any order and a bias are fewer than K + 6 roundings of u = 2^-24 on any path, so

    |y − exact| <= (K + 6) u / (1 − (K + 6) u) · (Σ_k |a_k| |b_k| + |bias|).
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_fp8 import KINDS, NAMES, decode, spread

import octavo.numerics.gemm as gemm
from octavo.numerics import Quantized, gemm_nt, padded_gemm_nt, quantize

SETTINGS = settings(max_examples=80, deadline=None, derandomize=True)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def value(q, kind):
    options = KINDS[kind]
    return decode(q.data) * spread(
        decode(q.scale), q.data.shape, options["granularity"], options.get("block", (1, 128))
    )


def within_bound(y, a, b, bias=0.0, count=None):
    """`y` against a[..., M, K] · b[..., N, K]ᵀ (float64 arrays), `count` terms to a sum."""
    roundings = ((count or a.shape[-1]) + 6) * 2.0**-24
    exact = a @ np.swapaxes(b, -1, -2) + bias
    size = np.abs(a) @ np.swapaxes(np.abs(b), -1, -2) + np.abs(bias)
    assert y.shape == exact.shape
    return bool((np.abs(decode(y) - exact) <= roundings / (1 - roundings) * size).all())


def pair(kind_a, kind_b, m=33, n=48, k=272, formats=("E4M3", "E4M3"), batch_a=(), batch_b=()):
    a = quantize(randn(*batch_a, m, k, seed=1) * 3, format=formats[0], **KINDS[kind_a])
    b = quantize(randn(*batch_b, n, k, seed=2) / 5, format=formats[1], **KINDS[kind_b])
    return a, b


@pytest.mark.parametrize("kind_a", KINDS)
@pytest.mark.parametrize("kind_b", KINDS)
def test_every_granularity_by_every_other(kind_a, kind_b):
    a, b = pair(kind_a, kind_b)
    assert within_bound(gemm_nt(a, b), value(a, kind_a), value(b, kind_b))
    bias = randn(48, seed=3)
    assert within_bound(gemm_nt(a, b, bias=bias), value(a, kind_a), value(b, kind_b), decode(bias))


@pytest.mark.parametrize("first", NAMES)
@pytest.mark.parametrize("second", NAMES)
def test_every_format_by_every_other(first, second):
    for kind in ("tensor", "block 1x128"):
        a, b = pair(kind, kind, formats=(first, second))
        assert within_bound(gemm_nt(a, b), value(a, kind), value(b, kind))


def test_wrong_scale_and_wrong_transpose_are_caught():
    """Planted bugs, on square operands so that every shape still fits."""
    a, b = pair("channel", "channel", m=64, n=64, k=64)
    va, vb = value(a, "channel"), value(b, "channel")
    assert within_bound(gemm_nt(a, b), va, vb)
    assert not within_bound(gemm_nt(a, Quantized(b.data.mT.contiguous(), b.scale)), va, vb)
    assert not within_bound(gemm_nt(a, Quantized(b.data, b.scale.flip(0))), va, vb)
    assert not within_bound(gemm_nt(Quantized(a.data, a.scale * (1 + 2.0**-12)), b), va, vb)
    assert not within_bound(gemm_nt(b, a), va, vb)
    assert not within_bound(gemm_nt(a, b).bfloat16(), va, vb)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_broadcast(kind):
    for batch_a, batch_b in (((3,), (3,)), ((2, 3), (3,)), ((), (4,)), ((2, 1), (1, 3)), ((5, 1, 2), (2,))):
        a, b = pair(kind, kind, m=17, n=16, k=48, batch_a=batch_a, batch_b=batch_b)
        assert within_bound(gemm_nt(a, b), value(a, kind), value(b, kind))


SUMS = [
    # batch of a, batch of b, batch of the result
    ((3,), (3,), ()),
    ((2, 3), (2, 3), (3,)),
    ((2, 3), (2, 3), (2, 1)),
    ((2, 3), (2, 3), ()),
    ((2, 3), (3,), (3,)),
    ((2, 3), (3,), (1, 3)),
    ((2, 1), (1, 3), (2, 1)),
    ((2, 1), (1, 3), (1, 1)),
    ((4, 2, 3), (2, 1), (2, 1)),
    ((4, 2, 3), (4, 2, 3), (4, 1, 3)),
    ((2, 3), (2, 3), (2, 3)),
    ((1, 3), (1, 3), (3,)),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch_a", "batch_b", "batch"), SUMS)
def test_batch_names_what_is_summed(kind, batch_a, batch_b, batch):
    a, b = pair(kind, kind, m=5, n=16, k=48, batch_a=batch_a, batch_b=batch_b)
    va, vb = value(a, kind), value(b, kind)
    y = gemm_nt(a, b, batch=batch)
    assert y.shape == (*batch, 5, 16)
    full = np.broadcast_shapes(batch_a, batch_b)
    target = (1,) * (len(full) - len(batch)) + batch
    axes = tuple(i for i, (f, t) in enumerate(zip(full, target, strict=True)) if f != t)
    products = np.swapaxes(vb, -1, -2)
    exact = (va @ products).sum(axes).reshape(y.shape)
    size = (np.abs(va) @ np.abs(products)).sum(axes).reshape(y.shape)
    terms = 48 * int(np.prod([full[i] for i in axes]))
    assert (np.abs(decode(y) - exact) <= (terms + 6) * 2.0**-24 * 1.001 * size).all()


@pytest.mark.parametrize("batch", [(5,), (1,), (3, 3)])
def test_a_batch_that_does_not_fit_is_refused(batch):
    shape = (16, 16) if batch == (1,) else (3, 16, 16)
    with pytest.raises(ValueError, match="batch"):
        gemm_nt(quantize(torch.ones(shape)), quantize(torch.ones(shape)), batch=batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_result_is_rounded_once(kind, dtype):
    a, b = pair(kind, kind)
    bias = randn(48).to(dtype)
    assert torch.equal(gemm_nt(a, b, bias=bias, out_dtype=dtype), gemm_nt(a, b, bias=bias).to(dtype))


@pytest.mark.parametrize(
    ("m", "n", "k", "message"),
    [
        (16, 16, 24, r"multiples of 16; got K=24, N=16 \(padded_gemm_nt pads\)"),
        (16, 17, 32, r"multiples of 16; got K=32, N=17 \(padded_gemm_nt pads\)"),
    ],
)
def test_the_rules_of_the_gpu_on_sizes(m, n, k, message):
    with pytest.raises(ValueError, match=message):
        gemm_nt(quantize(randn(m, k)), quantize(randn(n, k)))
    assert gemm_nt(quantize(randn(3, 32)), quantize(randn(16, 32))).shape == (3, 16)  # any M


def test_the_rules_of_the_gpu_on_layout_and_shape():
    a = quantize(randn(32, 32))
    transposed = Quantized(a.data.mT, a.scale)
    for operands in ((transposed, a), (a, transposed)):
        with pytest.raises(ValueError, match="contiguous along K"):
            gemm_nt(*operands)
    for bad in (quantize(randn(32, 48)), quantize(randn(32))):
        with pytest.raises(ValueError, match=r"\[..., M, K\] and \[..., N, K\]; got"):
            gemm_nt(a, bad)


sizes = st.integers(1, 70)


@SETTINGS
@given(sizes, sizes, st.integers(1, 300), st.sampled_from(list(KINDS)), st.sampled_from(list(KINDS)), st.booleans())
def test_padding_takes_any_size_and_shows_nowhere(m, n, k, kind_a, kind_b, with_bias):
    a, b = pair(kind_a, kind_b, m=m, n=n, k=k)
    bias = randn(n, seed=3) if with_bias else None
    y = padded_gemm_nt(a, b, bias=bias)
    assert y.is_contiguous()
    assert within_bound(y, value(a, kind_a), value(b, kind_b), decode(bias) if with_bias else 0.0)


@SETTINGS
@given(sizes, st.integers(1, 140), sizes, st.sampled_from(list(KINDS)), st.sampled_from([(), (2,), (2, 1), (2, 3)]))
def test_padding_batches_and_sums(m, n, k, kind, batch):
    a, b = pair(kind, kind, m=m, n=n, k=k, batch_a=(2, 3), batch_b=(3,))
    if batch == (2,):
        batch = (3,)
    y = padded_gemm_nt(a, b, batch=batch)
    assert y.shape == (*batch, m, n)
    exact = value(a, kind) @ np.swapaxes(value(b, kind), -1, -2)
    size = np.abs(value(a, kind)) @ np.abs(np.swapaxes(value(b, kind), -1, -2))
    axes = {(): (0, 1), (3,): (0,), (2, 1): (1,), (2, 3): ()}[batch]
    bound = (6 * k + 6) * 2.0**-24 * 1.001 * size.sum(axes)
    assert (np.abs(decode(y).reshape(bound.shape) - exact.sum(axes)) <= bound).all()


@pytest.mark.parametrize("shapes", [((0, 32), (16, 32)), ((4, 0), (16, 0)), ((4, 32), (0, 32)), ((2, 0, 5), (2, 3, 5))])
@pytest.mark.parametrize("kind", KINDS)
def test_empty_operands(shapes, kind):
    a, b = (quantize(torch.zeros(shape), **KINDS[kind]) for shape in shapes)
    y = padded_gemm_nt(a, b)
    assert y.shape == (*shapes[0][:-1], shapes[1][-2]) and (y == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_non_finite_values_reach_their_rows_and_columns_only(name):
    x, w = randn(5, 40), randn(7, 40)
    x[2, 3], w[6, 1] = float("inf"), float("nan")
    for kind in KINDS:
        y = padded_gemm_nt(quantize(x, format=name, **KINDS[kind]), quantize(w, format=name, **KINDS[kind]))
        expected = np.zeros((5, 7), bool)
        expected[2], expected[:, 6] = True, True
        assert np.array_equal(~np.isfinite(decode(y)), expected)


def test_nothing_reads_uninitialised_memory(monkeypatch):
    """With every `torch.empty` filled with NaN, results stay the same bits."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    cases = [(kind, *pair(kind, kind, m=5, n=33, k=50, batch_a=(2, 3), batch_b=(3,))) for kind in KINDS]
    plain = [padded_gemm_nt(a, b, bias=randn(33), batch=(3,)) for _, a, b in cases]
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()  # the poison works
        for (kind, a, b), y in zip(cases, plain, strict=True):
            a_again, b_again = pair(kind, kind, m=5, n=33, k=50, batch_a=(2, 3), batch_b=(3,))
            assert torch.equal(a_again.dequantize(), a.dequantize()) and torch.equal(
                b_again.dequantize(), b.dequantize()
            )
            assert torch.equal(padded_gemm_nt(a_again, b_again, bias=randn(33), batch=(3,)), y)
    finally:
        torch.use_deterministic_algorithms(False)


def test_alignment_is_the_gpus():
    assert gemm.ALIGNMENT == 16
