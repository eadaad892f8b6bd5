"""Quantising a second time, in numpy and ml_dtypes: what the tests hold `octavo.numerics` against.

Written from the equations alone and in another way (explicit loops over blocks, `frexp` for powers of two), so
that a mistake in one is not a mistake in the other. float32 arithmetic in numpy is IEEE: each line rounds once.
"""

import math

import ml_dtypes
import numpy as np
import torch

ML_DTYPES = {
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E4M3_FNUZ": ml_dtypes.float8_e4m3fnuz,
    "E5M2_FNUZ": ml_dtypes.float8_e5m2fnuz,
}
NAMES = tuple(ML_DTYPES)
TORCH_DTYPES = {
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
    torch.float8_e5m2fnuz: ml_dtypes.float8_e5m2fnuz,
    torch.float8_e8m0fnu: ml_dtypes.float8_e8m0fnu,
}
SMALLEST_SCALE = np.float32(2.0**-126)


def codes(t):
    return t.contiguous().view(torch.uint8).numpy()


def decode(t):
    """Any tensor as float64 values; eight-bit ones through ml_dtypes, not through torch."""
    if t.dtype in TORCH_DTYPES:
        return codes(t).view(TORCH_DTYPES[t.dtype]).astype(np.float64)
    return t.detach().double().numpy()


def largest(name):
    return np.float32(ml_dtypes.finfo(ML_DTYPES[name]).max)


def grid(name):
    """All finite values of a format, ascending, zero once."""
    values = np.arange(256, dtype=np.uint8).view(ML_DTYPES[name]).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def round_nearest(v, name):
    """float32 to FP8 values, saturating here (ml_dtypes does not); NaN for anything non-finite."""
    v = np.asarray(v, np.float32)
    clipped = np.clip(v, -largest(name), largest(name))
    return np.where(np.isfinite(v), clipped, np.float32(np.nan)).astype(ML_DTYPES[name])


def same(t, expected):
    """Bit for bit, except that one NaN is as good as another."""
    nan = np.isnan(expected.astype(np.float32))
    assert t.shape == expected.shape
    return np.array_equal(codes(t)[~nan], expected.view(np.uint8)[~nan]) and bool(np.isnan(decode(t)[nan]).all())


def block_shape(granularity, block, shape):
    return {"tensor": shape, "channel": (1, shape[1]), "block": block, "mx": (1, 32)}[granularity]


def scale_of(amax, name, margin=1.0):
    """amax / FP8_MAX × margin."""
    if amax == 0:
        return np.float32(1)
    return max(np.float32(np.float32(amax / largest(name)) * np.float32(margin)), SMALLEST_SCALE)


def mx_scale_of(amax, name, rule):
    """A power of two: the smallest with amax <= FP8_MAX × scale, or OCP's 2^(⌊log2 amax⌋ − ⌊log2 FP8_MAX⌋)."""
    if amax == 0:
        return np.float32(1)
    (mantissa, exponent), (top_mantissa, top_exponent) = math.frexp(amax), math.frexp(largest(name))
    exponent = exponent - top_exponent + (rule == "up" and mantissa > top_mantissa)
    return np.float32(2.0 ** max(exponent, -126))


def quantize(x, name, granularity, *, block=(1, 128), margin=1.0, rule="up"):
    """FP8 values and FP32 scales (per group) of an array of one, two or more dimensions."""
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.asarray(x).astype(np.float32)
        if granularity == "tensor":
            return _quantize_matrix(x.reshape(1, -1), name, "tensor", block, margin, rule, x.shape)
        matrices = x.reshape(-1, *(x.shape[-2:] if x.ndim > 1 else (1, *x.shape)))
        data, scales = zip(
            *(_quantize_matrix(m, name, granularity, block, margin, rule, m.shape) for m in matrices), strict=True
        )
        lead, groups = x.shape[:-2], scales[0].shape if x.ndim > 1 else scales[0].shape[1:]
        return np.stack(data).reshape(x.shape), np.stack(scales).reshape(*lead, *groups)


def _quantize_matrix(x, name, granularity, block, margin, rule, shape):
    rows, columns = block_shape(granularity, block, x.shape)
    scales = np.empty((-(-x.shape[0] // rows), -(-x.shape[1] // columns)), np.float32)
    data = np.empty(x.shape, ML_DTYPES[name])
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            finite = np.abs(x[at][np.isfinite(x[at])])
            amax = finite.max(initial=np.float32(0))
            scale = mx_scale_of(amax, name, rule) if granularity == "mx" else scale_of(amax, name, margin)
            scales[i, j] = scale
            data[at] = round_nearest(x[at] * (np.float32(1) / scale), name)
    return data.reshape(shape), scales.reshape(()) if granularity == "tensor" else scales


def spread(scale, shape, granularity, block=(1, 128)):
    """One scale per element."""
    if granularity == "tensor":
        return np.broadcast_to(scale, shape)
    rows, columns = block_shape(granularity, block, shape[-2:] if len(shape) > 1 else (1, *shape))
    if len(shape) > 1:
        scale = np.repeat(scale, rows, axis=-2)[..., : shape[-2], :]
    return np.repeat(scale, columns, axis=-1)[..., : shape[-1]]


# Every granularity with its options, as keywords of `octavo.numerics.quantize`.
KINDS = {
    "tensor": {"granularity": "tensor"},
    "channel": {"granularity": "channel"},
    "block 1x128": {"granularity": "block", "block": (1, 128)},
    "block 128x128": {"granularity": "block", "block": (128, 128)},
    "mx up": {"granularity": "mx", "mx_rule": "up"},
    "mx floor": {"granularity": "mx", "mx_rule": "floor"},
}


def quantize_kind(x, name, kind):
    """`quantize` of a torch tensor by one of KINDS."""
    options = {("rule" if k == "mx_rule" else k): v for k, v in KINDS[kind].items()}
    return quantize(decode(x), name, options.pop("granularity"), **options)


def sample(*shape, seed=0):
    """Normal values whose magnitude varies by a factor of a thousand along every dimension, some exactly zero."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g)
    for dim in range(len(shape)):
        sizes = [shape[dim] if d == dim else 1 for d in range(len(shape))]
        x = x * 2.0 ** torch.empty(sizes).uniform_(-5, 5, generator=g)
    return x * (torch.rand(*shape, generator=g) > 0.1)
