"""The FP8 GEMM in Triton's interpreter, and which library gets which product, against the specification.

The interpreter multiplies and adds in FP32, so the bound is that of FP32 sums in another order: K · 2^-23 of the sum
of magnitudes. How the tensor cores add up is for tests/gpu.
"""

import pytest
import torch

from octavo.kernels import gemm
from octavo.kernels.gemm import triton as gemm_triton
from octavo.kernels.tuning import HOPPER
from octavo.numerics import Quantized, quantize
from octavo.numerics.gemm import padded_gemm_nt

KINDS = {
    "tensor": {"granularity": "tensor"},
    "row": {"granularity": "channel"},
    "1x128": {"granularity": "block"},
    "128x128": {"granularity": "block", "block": (128, 128)},
    "mx": {"granularity": "mx"},
}
PAIRS = [
    *(("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("mx", "mx"), ("mx", "1x128")),
    *(("1x128", "128x128"), ("1x128", "1x128"), ("128x128", "1x128"), ("128x128", "128x128")),
]
FORMATS = [("E4M3", "E4M3"), ("E5M2", "E4M3"), ("E4M3", "E5M2"), ("E5M2", "E5M2")]
SHAPES = [
    # a, b, batch of the result
    ((5, 48), (7, 48), ()),
    ((1, 16), (1, 16), ()),
    ((130, 272), (260, 272), ()),
    ((2, 1, 5, 48), (3, 7, 48), (2, 3)),  # BDH: x · encoder
    ((2, 3, 5, 272), (3, 7, 272), (2, 1)),  # its dx, summed over heads
    ((2, 1, 5, 48), (2, 3, 7, 48), (3,)),  # its dw, summed over the batch
    ((2, 3, 150, 48), (2, 1, 7, 48), (2, 3)),  # scores · x: one right operand for all heads
    ((2, 3, 5, 48), (3, 7, 48), ()),
    ((2, 3, 2, 2, 2, 3, 48), (3, 1, 2, 1, 4, 48), (1, 3, 1, 2, 1)),  # more dimensions than the kernel walks over
    ((300, 96), (140, 96), ()),  # half of the last tile of rows is past the edge, one block along K
]


def make(shape, kind, format):
    return quantize(torch.randn(shape) * torch.exp(2 * torch.randn(*shape[:-1], 1)), format=format, **KINDS[kind])


def assert_same_product(y, a, b, batch, bias=None):
    exact = padded_gemm_nt(a, b, bias=bias, batch=batch)
    full = a.dequantize().abs() @ b.dequantize().abs().mT
    magnitudes = full.sum_to_size(exact.shape) + (0 if bias is None else bias.float().abs())
    terms = a.data.shape[-1] * full.numel() // exact.numel()
    step = max(terms * 2.0**-23, torch.finfo(y.dtype).eps)  # the interpreter truncates to BF16: a whole step
    assert y.shape == exact.shape and y.is_contiguous()
    assert ((y.float() - exact).abs() <= step * magnitudes + 1e-30).all()


@pytest.mark.matrix
@pytest.mark.parametrize("i", range(len(SHAPES)), ids=lambda i: str(SHAPES[i]))
@pytest.mark.parametrize("kinds", PAIRS, ids=" by ".join)
def test_every_scale_and_batch(kinds, i):
    a_shape, b_shape, batch = SHAPES[i]
    formats = FORMATS[(i + PAIRS.index(kinds)) % len(FORMATS)]
    a, b = (make(*operand) for operand in zip((a_shape, b_shape), kinds, formats, strict=True))
    bias = torch.randn(b_shape[-2]) if i % 2 else None
    y = gemm_triton.gemm_nt(a, b, bias=bias, out_dtype=torch.float32, batch=batch, fast=i < 5)
    assert_same_product(y, a, b, batch, bias)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float32])
def test_dtypes(out_dtype, bias_dtype):
    a, b = quantize(torch.randn(20, 160)), quantize(torch.randn(70, 160))
    bias = None if bias_dtype is None else torch.randn(70, dtype=bias_dtype)
    y = gemm_triton.gemm_nt(a, b, bias=bias, out_dtype=out_dtype, batch=(), fast=False)
    assert y.dtype == out_dtype
    assert_same_product(y, a, b, (), bias)


def test_zeros_and_nan_stay_in_their_rows():
    x = torch.randn(2, 70, 48)
    x[0, 3] = 0
    x[1, 69, 5] = float("nan")
    for kind in KINDS:
        # The interpreter takes the NaN of E4M3 for 480.
        a, b = quantize(x, format="E5M2", **KINDS[kind]), make((66, 48), kind, "E4M3")
        y = gemm_triton.gemm_nt(a, b, bias=None, out_dtype=torch.float32, batch=(2,), fast=True)
        assert (y[0, 3] == 0).all() and y[1, 69].isnan().all()
        assert y.isnan().sum() == 66


def test_rows_past_the_edge_are_not_written(monkeypatch):
    big = torch.full((4096,), 7.0)
    monkeypatch.setattr(torch, "empty", lambda *shape, **_: big[: torch.Size(shape).numel()].view(shape))
    a, b = make((2, 5, 48), "tensor", "E4M3"), make((2, 7, 48), "tensor", "E4M3")
    gemm_triton.gemm_nt(a, b, bias=None, out_dtype=torch.float32, batch=(2,), fast=True)
    assert (big[2 * 5 * 7 :] == 7).all() and (big[: 2 * 5 * 7] != 7).all()


def test_tiny_scales_do_not_underflow_together():
    a, b = (Quantized(make((5, 48), "1x128", "E4M3").data, torch.full((5, 1), s)) for s in (2.0**-100, 2.0**-60))
    y = gemm_triton.gemm_nt(a, b, bias=None, out_dtype=torch.float32, batch=(), fast=False)
    exact = a.data.double() @ b.data.double().mT * 2.0**-160
    assert torch.equal(y != 0, exact.float() != 0)


def test_batches_are_walked_over_by_strides():
    """The products of BDH need no copy: at most two dimensions of either sort, merged where they can be."""
    one = (1, 0, 0)
    b, h = 4, 3
    assert gemm_triton.plan_batches((b, 1), (h,), (b, h)) == ([(b, 1, 0), (h, 0, 1)], [one, one])
    assert gemm_triton.plan_batches((b, h), (h,), (b, 1)) == ([one, (b, h, 0)], [one, (h, 1, 1)])
    assert gemm_triton.plan_batches((b, 1), (b, h), (h,)) == ([one, (h, 0, 1)], [one, (b, 1, h)])
    assert gemm_triton.plan_batches((b, h), (b, h), (b, h)) == ([one, (b * h, 1, 1)], [one, one])
    assert gemm_triton.plan_batches((2, 3, 4, 5, 6), (3, 1, 5, 1), (2, 3, 4, 5, 6)) is None


@pytest.fixture
def calls(monkeypatch):
    """Who was asked: `torch._scaled_mm` takes tensor and row scales on the CPU, too; of blocks we only look."""
    actual = []
    scaled_mm, by_triton = torch._scaled_mm, gemm_triton.gemm_nt
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: (actual.append("cublas"), scaled_mm(*a, **k))[1])
    monkeypatch.setattr(gemm_triton, "gemm_nt", lambda *a, **k: (actual.append("triton"), by_triton(*a, **k))[1])
    small = HOPPER._replace(gemm=HOPPER.gemm._replace(full_gpu=2))
    monkeypatch.setattr(gemm, "tuning_for", lambda _: small)
    return actual


@pytest.mark.matrix
@pytest.mark.parametrize("i", range(len(SHAPES) + 2))
@pytest.mark.parametrize("kinds", PAIRS[::2], ids=" by ".join)
@pytest.mark.usefixtures("calls")
def test_dispatch_gives_the_product(kinds, i):
    a_shape, b_shape, batch = [*SHAPES, ((5, 33), (7, 33), ()), ((3, 5, 33), (1, 16, 33), (3,))][i]
    a, b = make(a_shape, kinds[0], "E4M3"), make(b_shape, kinds[1], "E4M3")
    bias = torch.randn(b_shape[-2]) if i % 2 else None
    assert gemm.can_multiply(a, b)
    y = gemm.gemm_nt(a, b, bias=bias, out_dtype=torch.float32, batch=batch, fast=False)
    assert_same_product(y, a, b, batch, bias)


@pytest.mark.parametrize(
    ("a_shape", "b_shape", "batch", "kind", "expected"),
    [
        ((32, 64), (32, 64), (), "tensor", ["cublas"]),
        ((32, 64), (32, 64), (), "row", ["cublas"]),
        ((32, 64), (30, 64), (), "row", ["triton"]),  # N is not a multiple of 16
        ((3, 32, 64), (32, 64), (3,), "row", ["cublas"]),  # rows
        ((2, 3, 32, 64), (2, 1, 32, 64), (2, 3), "row", ["triton"]),  # 2 of 96 rows: they do not fill a GPU
        ((2, 3, 96, 64), (2, 1, 32, 64), (2, 3), "row", ["cublas", "cublas"]),
        ((2, 1, 160, 64), (3, 32, 64), (2, 3), "tensor", ["cublas"] * 6),
        ((2, 3, 160, 64), (3, 32, 64), (2, 1), "tensor", ["triton"]),  # summed
        ((32, 256), (32, 256), (), "mx", ["triton"]),
        ((32, 96), (32, 96), (), "1x128", ["cublas"]),  # one block is a row
        ((32, 160), (32, 160), (), "1x128", ["triton"]),
        ((2, 32, 256), (2, 32, 256), (2,), "1x128", ["triton"]),
        ((0, 32), (32, 32), (), "tensor", []),
    ],
)
def test_who_is_asked(calls, a_shape, b_shape, batch, kind, expected):
    a, b = make(a_shape, kind, "E4M3"), make(b_shape, kind, "E4M3")
    y = gemm.gemm_nt(a, b, bias=None, out_dtype=torch.bfloat16, batch=batch, fast=True)
    assert calls == expected
    torch.testing.assert_close(y, padded_gemm_nt(a, b, out_dtype=torch.bfloat16, batch=batch), rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("rows", [(1, 128), (1, 1), (128, 1)])
def test_block_scales_are_laid_out_for_cublas(calls, monkeypatch, rows):
    m, n, k = 128, 256, 640
    sizes = {1: "1x128", 128: "128x128"}
    a, b = make((m, k), sizes[rows[0]], "E4M3"), make((n, k), sizes[rows[1]], "E4M3")
    seen = {}

    def scaled_mm(a, b, a_scale, a_recipe, b_scale, b_recipe, *, output_dtype):
        seen.update(zip("ab", ((a_scale, a_recipe), (b_scale, b_recipe)), strict=True))
        return torch.zeros(a.shape[0], b.shape[1], dtype=output_dtype)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    gemm.gemm_nt(a, b, bias=None, out_dtype=torch.bfloat16, batch=(), fast=True)
    assert calls == []
    recipes = {1: torch.nn.functional.ScalingType.BlockWise1x128, 128: torch.nn.functional.ScalingType.BlockWise128x128}
    for name, q, r in (("a", a, rows[0]), ("b", b, rows[1])):
        scale, recipe = seen[name]
        assert recipe == recipes[r]
        if r == 1:
            assert scale.stride() == (1, q.data.shape[0]) and torch.equal(scale, q.scale)
        else:  # K/128 = 5, rounded up to 8
            assert scale.shape == (8, q.data.shape[0] // 128) and scale.stride() == (1, 8)
            assert torch.equal(scale[:5], q.scale.t())


def test_what_is_refused():
    x = torch.randn(32, 256)
    q = quantize(x)
    assert not gemm.can_multiply(quantize(x, format="E4M3_FNUZ"), q)
    assert not gemm.can_multiply(Quantized(q.data, torch.ones(32)), q)
    assert not gemm.can_multiply(Quantized(q.data, torch.ones(32, 3)), q)
    with pytest.raises(ValueError, match="contiguous"):
        gemm.gemm_nt(Quantized(q.data.t(), q.scale), Quantized(q.data.t(), q.scale), **ANYHOW)
    with pytest.raises(ValueError, match="gemm_nt takes"):
        gemm.gemm_nt(q, quantize(torch.randn(32, 240)), **ANYHOW)
    with pytest.raises(ValueError, match="the product has 32 columns"):
        gemm.gemm_nt(q, q, **ANYHOW | {"bias": torch.ones(31)})
    with pytest.raises(ValueError, match=r"batch=\(3,\)"):
        gemm.gemm_nt(quantize(torch.randn(2, 5, 32)), quantize(torch.randn(2, 5, 32)), **ANYHOW | {"batch": (3,)})


ANYHOW = {"bias": None, "out_dtype": torch.float32, "batch": (), "fast": True}
