"""Properties of quantising that hold for all shapes and values (hypothesis)."""

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy_fp8 import NAMES, codes, decode, spread

from octavo.numerics import get_format, quantize
from octavo.numerics.quantize import expand_scale

KINDS = [("tensor", (1, 128)), ("channel", (1, 128)), ("block", (1, 128)), ("block", (128, 128)), ("mx", (1, 128))]
kinds, names = st.sampled_from(KINDS), st.sampled_from(NAMES)
few = settings(max_examples=100, deadline=None, derandomize=True)


@st.composite
def tensors(draw, low=-(2.0**60), high=2.0**60, dtypes=(torch.bfloat16, torch.float16, torch.float32, torch.float64)):
    """One to four dimensions; a few drawn values among many random ones of a drawn magnitude."""
    rows, columns = draw(st.sampled_from([1, 2, 31, 130])), draw(st.sampled_from([1, 31, 32, 33, 127, 129, 140]))
    shape = [*draw(st.lists(st.sampled_from([1, 2]), max_size=2)), rows, columns]
    shape = shape[draw(st.sampled_from([0, 0, 0, len(shape) - 1])) :]
    g = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn(shape, generator=g) * 2.0 ** draw(st.integers(-40, 40))
    drawn = draw(st.lists(st.floats(low, high, width=32, allow_subnormal=True), max_size=8))[: x.numel()]
    x.view(-1)[: len(drawn)] = torch.tensor(drawn, dtype=torch.float32)
    dtype = draw(st.sampled_from(dtypes))
    return x.clamp(-60000, 60000).to(dtype) if dtype == torch.float16 else x.to(dtype)


def scales(q, kind):
    return spread(decode(q.scale), q.data.shape, *kind)


@few
@given(tensors(), names, kinds)
@example(torch.full((1, 33), 2.0**-149), "E4M3", ("channel", (1, 128)))
@example(torch.tensor([[448.0, 0.4999 * 2.0**-9, 2.0**-10]]), "E4M3", ("tensor", (1, 128)))
def test_every_value_is_within_half_a_step(x, name, kind):
    format = get_format(name)
    q = quantize(x, format=name, granularity=kind[0], block=kind[1])
    scale, exact = scales(q, kind), decode(x.float())
    error = np.abs(decode(q.data) * scale - exact)
    # Half a step: 2^-(m+1) of the value if normal, half a subnormal step times the scale below; the FP32 reciprocal and
    # product add two roundings of 2^-24 relative, to the value, and may tip a tie.
    half_step = np.maximum(2.0 ** -(format.mantissa_bits + 1) * np.abs(exact), 0.5 * format.smallest_subnormal * scale)
    assert (error <= half_step + 2.0**-22 * np.abs(exact)).all()


@few
@given(tensors(), names, kinds)
def test_nothing_saturates_and_the_largest_keeps_its_place(x, name, kind):
    format = get_format(name)
    q = quantize(x, format=name, granularity=kind[0], block=kind[1])
    scaled = np.abs(decode(x.float())) / scales(q, kind)
    # 448 · (1 + 2^-22) for two FP32 roundings; the clamp matters only beyond the threshold, 3.5 % above.
    assert scaled.max(initial=0) <= format.max * (1 + 2.0**-22) < format.saturation_threshold
    assert np.isfinite(decode(q.data)).all()


@few
@given(tensors(), names, kinds)
def test_quantising_again_with_the_same_scale_returns_the_same_bytes(x, name, kind):
    options = {"format": name, "granularity": kind[0], "block": kind[1]}
    q = quantize(x, **options)
    again = quantize(q.dequantize(), scale=q.scale, **options)
    lost = (q.dequantize() == 0).numpy() & (decode(q.data) != 0)  # data × scale below 2^-150: FP32 itself underflows
    gradual = np.abs(decode(q.dequantize())) < 2.0**-126  # FP32 subnormals hold fewer bits than the product has
    keep = ~lost & ~gradual | (decode(q.data) == 0)
    negative_zero = codes(q.data) == 0x80
    assert np.array_equal(codes(again.data)[keep & ~negative_zero], codes(q.data)[keep & ~negative_zero])
    assert (decode(again.data)[negative_zero & keep] == 0).all() or "FNUZ" in name


@few
@given(tensors(), names, kinds)
def test_sign_symmetry(x, name, kind):
    options = {"format": name, "granularity": kind[0], "block": kind[1]}
    plus, minus = quantize(x, **options), quantize(-x, **options)
    np.testing.assert_array_equal(decode(plus.scale), decode(minus.scale))
    np.testing.assert_array_equal(decode(plus.data), -decode(minus.data))


@few
@given(
    tensors(low=-(2.0**20), high=2.0**20, dtypes=(torch.bfloat16, torch.float32)), names, kinds, st.integers(-40, 40)
)
def test_powers_of_two_move_the_scale_and_not_the_data(x, name, kind, shift):
    x = torch.where(x.abs() < 2.0**-60, 0, x)  # so that neither amax/FP8_MAX nor x · 2^shift becomes subnormal
    options = {"format": name, "granularity": kind[0], "block": kind[1]}
    plain, shifted = quantize(x, **options), quantize(x * 2.0**shift, **options)
    assert np.array_equal(codes(plain.data), codes(shifted.data))
    amax = np.abs(decode(x)).max(initial=0)
    empty = np.broadcast_to(amax == 0, plain.scale.shape) if kind[0] == "tensor" else decode(plain.scale) == 1.0
    moved = decode(plain.scale) * 2.0**shift
    np.testing.assert_array_equal(
        np.where(empty, decode(plain.scale), moved), np.where(empty, decode(plain.scale), decode(shifted.scale))
    )


@few
@given(tensors(), names, kinds)
def test_groups_do_not_see_each_other(x, name, kind):
    """Permuting the rows permutes data and scales, for every granularity that has one scale per row."""
    if x.dim() < 2 or kind == ("block", (128, 128)):
        return
    options = {"format": name, "granularity": kind[0], "block": kind[1]}
    q, flipped = quantize(x, **options), quantize(x.flip(-2), **options)
    assert np.array_equal(codes(flipped.data), codes(q.data)[..., ::-1, :])
    full = expand_scale(q.scale.float(), x.shape).expand(x.shape)
    assert torch.equal(expand_scale(flipped.scale.float(), x.shape).expand(x.shape), full.flip(-2))
