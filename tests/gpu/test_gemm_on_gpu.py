"""FP8 products on tensor cores against the exact product of the same FP8 values: every kernel, scale, format, batch.

Both operands are taken as quantised, so the bound is only about adding up (m_ij the sum of |a_ik · b_jk|):

    fast    each instruction adds 32 products to a sum of about 14 bits:       K/32 · 2^-13 · m
    full    128 products so, then to an FP32 sum:                              (4 · 2^-13 + K · 2^-23) · m
    result  rounded once to `out_dtype`:                                       eps · (m + |bias|)
"""

import pytest
import torch

from octavo.kernels import gemm
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
    *(("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("mx", "mx")),
    *(("1x128", "128x128"), ("1x128", "1x128"), ("128x128", "1x128"), ("128x128", "128x128")),
]
FORMATS = [("E4M3", "E4M3"), ("E5M2", "E4M3"), ("E4M3", "E5M2"), ("E5M2", "E5M2")]
SHAPES = [
    # a, b, batch of the result
    ((256, 640), (384, 640), ()),  # cuBLASLt, with K/128 not a multiple of 4
    ((512, 1024), (512, 1024), ()),
    ((33, 100), (50, 100), ()),  # nothing divides
    ((1, 16), (16, 16), ()),
    ((1, 33), (1, 33), ()),
    ((2, 1, 130, 272), (3, 300, 272), (2, 3)),  # BDH: x · encoder
    ((2, 3, 130, 272), (3, 140, 272), (2, 1)),  # its dx, summed over heads
    ((2, 1, 130, 272), (2, 3, 300, 272), (3,)),  # its dw, summed over the batch
    ((2, 3, 130, 272), (2, 1, 64, 272), (2, 3)),  # scores · x: one right operand for all heads
    ((2, 3, 2, 2, 2, 3, 48), (3, 1, 2, 1, 4, 48), (1, 3, 1, 2, 1)),  # more dimensions than the kernel walks over
    ((300, 96), (140, 96), ()),  # half of the last tile of rows is past the edge, one block along K
]
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def make(shape, kind, format="E4M3"):
    x = 0.1 * torch.randn(shape, device="cuda") * torch.exp(torch.randn(*shape[:-1], 1, device="cuda"))
    return quantize(x, format=format, **KINDS[kind])


def assert_sums_up(y, a, b, batch=(), bias=None, fast=False):
    a_hp, b_hp = a.dequantize().double(), b.dequantize().double()
    k = a_hp.shape[-1]
    exact, magnitudes = (p.sum_to_size(y.shape) for p in (a_hp @ b_hp.mT, a_hp.abs() @ b_hp.abs().mT))
    terms = k * (a_hp @ b_hp.mT).numel() // y.numel()
    accumulation = -(-terms // 32) * 2.0**-13 if fast else 4 * 2.0**-13 + terms * 2.0**-23
    bound = accumulation * magnitudes + torch.finfo(y.dtype).eps * magnitudes
    if bias is not None:
        exact, bound = exact + bias.double(), bound + torch.finfo(y.dtype).eps * bias.double().abs()
    assert y.shape == (*batch, a.data.shape[-2], b.data.shape[-2]) and y.is_contiguous()
    tiny = torch.finfo(y.dtype).smallest_normal
    excess = (y.double() - exact).abs() / (bound + tiny)
    assert excess.max() <= 1, f"{excess.max():.2f} times the bound"


@pytest.mark.parametrize("i", range(len(SHAPES)), ids=lambda i: str(SHAPES[i]))
@pytest.mark.parametrize("kinds", PAIRS, ids=" by ".join)
def test_every_scale_and_batch(kinds, i):
    """Formats, dtypes, bias and accumulation go round; one kernel compiled for many cases keeps this short."""
    a_shape, b_shape, batch = SHAPES[i]
    number = PAIRS.index(kinds)
    formats = FORMATS[0] if i < 2 else FORMATS[number % 4]
    a, b = (make(*operand) for operand in zip((a_shape, b_shape), kinds, formats, strict=True))
    assert gemm.can_multiply(a, b)
    out_dtype, fast = DTYPES[number % 3], number % 2 == 0
    bias = torch.randn(b_shape[-2], device="cuda", dtype=torch.bfloat16) if number % 2 else None
    y = gemm.gemm_nt(a, b, bias=bias, out_dtype=out_dtype, batch=batch, fast=fast)
    assert y.dtype == out_dtype
    assert_sums_up(y, a, b, batch, bias, fast)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("formats", FORMATS, ids=" by ".join)
@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_every_format(kind, formats, fast):
    """E5M2 by E5M2 is Triton's, the others cuBLASLt's."""
    a, b = make((300, 4096), kind, formats[0]), make((528, 4096), kind, formats[1])
    for out_dtype in (torch.bfloat16, torch.float32):
        y = gemm.gemm_nt(a, b, bias=None, out_dtype=out_dtype, batch=(), fast=fast)
        assert_sums_up(y, a, b, fast=fast)


@pytest.mark.parametrize("library", ["cublas", "triton"])
@pytest.mark.parametrize("kinds", [("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128")])
def test_a_long_positive_sum_is_added_up_in_fp32(kinds, library):
    """Where fast accumulation would lose most: the sum is far larger than what is added to it."""
    from octavo.kernels.gemm import triton as gemm_triton

    multiply = gemm.gemm_nt if library == "cublas" else gemm_triton.gemm_nt
    a, b = (quantize(torch.rand(256, 32768, device="cuda"), **KINDS[kind]) for kind in kinds)
    y = multiply(a, b, bias=None, out_dtype=torch.float32, batch=(), fast=False)
    assert_sums_up(y, a, b)


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["tensor", "row", "1x128"])
def test_bias(kind, bias_dtype):
    a, b = make((256, 512), kind), make((256, 512), kind)
    bias = 10 * torch.randn(256, device="cuda", dtype=bias_dtype)
    y = gemm.gemm_nt(a, b, bias=bias, out_dtype=torch.bfloat16, batch=(), fast=False)
    assert_sums_up(y, a, b, bias=bias)


@pytest.mark.parametrize(
    ("a_shape", "b_shape", "batch"),
    [
        ((2, 1, 1664, 128), (2, 2048, 128), (2, 2)),  # s = x · encoder
        ((2, 2, 1664, 256), (2, 2, 2048, 256), (2, 2)),  # scores = q · qᵀ
        ((2, 2, 1664, 512), (2, 1, 1024, 512), (2, 2)),  # a = scores · x
        ((2, 2, 256, 2048), (2, 128, 2048), (2, 1)),  # dx = g · encoderᵀ
        ((2, 1, 128, 256), (2, 2, 2048, 256), (2,)),  # dencoder = xᵀ · g
        ((2, 2, 256, 256), (2, 2, 128, 256), (2, 1)),  # dx = scoresᵀ · g
        ((2, 2, 256, 2048), (2, 128, 2048), (2, 2)),  # da = g · encoder_vᵀ
    ],
)
@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_products_of_bdh(kind, a_shape, b_shape, batch):
    formats = FORMATS[batch == (2, 1)]
    a, b = make(a_shape, kind, formats[0]), make(b_shape, kind, formats[1])
    fast = batch == (2, 2)
    y = gemm.gemm_nt(a, b, bias=None, out_dtype=torch.bfloat16, batch=batch, fast=fast)
    assert_sums_up(y, a, b, batch, fast=fast)
    spec = padded_gemm_nt(a, b, out_dtype=torch.bfloat16, batch=batch)
    assert torch.nn.functional.cosine_similarity(y.flatten().double(), spec.flatten().double(), dim=0) > 0.99999


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [256, 250])
def test_zeros_and_nan_stay_in_their_rows(kind, n):
    x = torch.randn(2, 256, 512, device="cuda")
    x[0, 3] = 0
    x[1, 255, 5] = float("nan")
    a, b = quantize(x, **KINDS[kind]), make((n, 512), kind)
    for left, batch in ((a, (2,)), (Quantized(a.data[1], a.scale[1] if a.scale.dim() else a.scale), ())):
        y = gemm.gemm_nt(left, b, bias=None, out_dtype=torch.bfloat16, batch=batch, fast=True)
        assert y.isnan().sum() == n and y[..., 255, :].isnan().sum() == n
    assert (gemm.gemm_nt(a, b, bias=None, out_dtype=torch.bfloat16, batch=(2,), fast=True)[0, 3] == 0).all()


def test_more_than_2_to_the_31_results():
    rows = 1 << 15
    a, b = make((3, rows, 16), "tensor", "E5M2"), make((3, rows, 16), "tensor", "E5M2")
    cases = (a, b, (3,)), (Quantized(a.data.view(-1, 16), a.scale), Quantized(b.data[2], b.scale), ())
    for left, right, batch in cases:
        y = gemm.gemm_nt(left, right, bias=None, out_dtype=torch.float16, batch=batch, fast=True)
        last = Quantized(a.data[2, -8:], a.scale), Quantized(b.data[2], b.scale)
        assert_sums_up(y.view(-1, rows)[-8:], *last, fast=True)
        del y


def test_nothing_in_nothing_out():
    """Empty operands are the specification's: no kernel takes them."""
    bias = torch.randn(16, device="cuda")
    for m, k in ((0, 32), (5, 0)):
        a, b = (quantize(torch.zeros(rows, k, device="cuda")) for rows in (m, 16))
        y = gemm.gemm_nt(a, b, bias=bias, out_dtype=torch.float32, batch=(), fast=True)
        assert torch.equal(y, bias.expand(m, 16))


@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_an_aligned_product_is_one_kernel_and_no_copies(kind):
    a, b = make((1024, 1024), kind), make((1024, 1024), kind)
    bias = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
    multiply = lambda: gemm.gemm_nt(a, b, bias=bias, out_dtype=torch.bfloat16, batch=(), fast=True)  # noqa: E731
    multiply()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        multiply()
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert names and not [n for n in names if "elementwise" in n or "emcpy" in n], names


def test_nothing_waits_for_the_gpu():
    operands = [(make((2, 256, 512), a), make((2, 256, 512), b)) for a, b in PAIRS]
    for _ in range(2):  # what is compiled in the first round may wait
        for a, b in operands:
            gemm.gemm_nt(a, b, bias=None, out_dtype=torch.float32, batch=(), fast=True)
            gemm.gemm_nt(a, b, bias=None, out_dtype=torch.bfloat16, batch=(2,), fast=True)
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("bug", ["next block's scale", "next rows' scale", "one per cent off"])
def test_planted_bugs_are_caught(bug):
    a, b = make((256, 1024), "1x128"), make((256, 1024), "128x128")
    used = {
        "next block's scale": (a, Quantized(b.data, b.scale.roll(1, dims=1))),
        "next rows' scale": (a, Quantized(b.data, b.scale.roll(1, dims=0))),
        "one per cent off": (Quantized(a.data, a.scale * 1.01), b),
    }[bug]
    y = gemm.gemm_nt(*used, bias=None, out_dtype=torch.float32, batch=(), fast=False)
    with pytest.raises(AssertionError, match="times the bound"):
        assert_sums_up(y, a, b)
