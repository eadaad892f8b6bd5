"""Decode attention by the specification against a softmax over all keys in FP64; and what is stored."""

import pytest
import torch
from decode_cases import ints, new_cache, new_decode, reference
from norm_cases import angles, new_norm

from octavo.numerics import rotary
from octavo.numerics.decode import decode_attention, rotary_and_store, store
from octavo.numerics.formats import E4M3
from octavo.numerics.quantize import dequantize
from octavo.numerics.rotary import Heads

# Scores of up to 100 have an error of 100 · 2^-24 and more in FP32, and shares as much, relatively.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize("bytes", [False, True], ids=["plain", "bytes"])
@pytest.mark.parametrize("window", [None, 1, 20, 35, 71, 1000])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_one_softmax_over_prompt_and_own_tokens(window, softcap, bytes):
    made = new_decode(bytes=bytes)
    actual = decode_attention(*made[:-1], 0.3, window, softcap, made.slots_of_group)
    torch.testing.assert_close(actual, reference(made, 0.3, window, softcap).float(), **TOLERANCE)
    assert not actual[1].any()  # the empty slot


@pytest.mark.parametrize("heads", [(4, 4, 80), (8, 1, 128), (6, 2, 64), (1, 1, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_and_dtypes(heads, dtype):
    made = new_decode(heads=heads, dtype=dtype)
    actual = decode_attention(*made[:-1], 0.3)
    assert actual.dtype == dtype
    expected = reference(made, 0.3).float()
    step = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=1e-4 + step, atol=1e-5)


def test_no_slots_and_all_slots_empty():
    made = new_decode()
    nothing = made._replace(q=made.q[:0], group_of=made.group_of[:0], suffix_lengths=made.suffix_lengths[:0])
    assert decode_attention(*nothing[:-1], 0.3).shape == (0, 4, 64)
    made.suffix_lengths.zero_()
    assert not decode_attention(*made[:-1], 0.3).any()


def test_what_is_not_finite_stays_where_it_is_seen():
    made = new_decode()
    made.q[0, 1, 3] = torch.nan
    made.suffix.keys[2, 64, 1, 0] = torch.nan
    made.prefix.values[0, 4, 0, 5] = torch.nan
    actual = decode_attention(*made[:-1], 0.3)
    assert actual[0, 1].isnan().all() and not actual[0, 0].isnan().any()
    assert actual[2, 2:].isnan().all() and actual[2, :2].isnan().sum() == 2
    assert not actual[3:].isnan().any() and not actual[1].any()


@pytest.mark.parametrize("bytes", [False, True], ids=["plain", "bytes"])
def test_store_writes_where_it_is_told(bytes):
    k, v = torch.randn(2, 4, 2, 16)
    k[0], k[1] = 0, k[1] * 1000  # each token has its own scale
    cache = new_cache(3, 5, 2, 16, torch.float32, bytes=bytes)
    store(k, v, cache, ints(2, 0, -1, 1), ints(4, 0, 3, -1))
    for x, data, scales in ((k, cache.keys, cache.key_scales), (v, cache.values, cache.value_scales)):
        for token, where in ((0, (2, 4)), (1, (0, 0))):
            if scales is None:
                assert torch.equal(data[where], x[token])
                continue
            amax = x[token].abs().amax(-1)
            assert torch.equal(scales[where], torch.where(amax > 0, amax / E4M3.max, 1.0))
            actual = dequantize(data[where].view(E4M3.dtype), scales[where].unsqueeze(-1))
            # Half a step of three bits of mantissa, or half of the smallest.
            bound = torch.maximum(x[token].abs() * 2.0**-4, scales[where].unsqueeze(-1) * 2.0**-10)
            assert ((actual - x[token]).abs() <= bound).all()
        written = (data == data) if scales is None else (scales == scales)
        assert written.flatten(2).any(-1).sum() == 2  # the others were left out


def test_an_outlier_leaves_other_tokens_as_they_are():
    """With a scale per tensor, tokens beside one that is 10,000 times larger would be zero."""
    k = torch.randn(2, 1, 16)
    alone, beside = (new_cache(1, 2, 1, 16, torch.float32, bytes=True) for _ in range(2))
    store(k[:1], k[:1], alone, ints(0), ints(0))
    k[1] *= 1e4
    store(k, k, beside, ints(0, 0), ints(0, 1))
    assert all(torch.equal(x[0, 0], y[0, 0]) for x, y in zip(alone, beside, strict=True))


@pytest.mark.parametrize("shifted", [None, False, True])
def test_rotary_and_store(shifted):
    heads = Heads(4, 2, 16)
    norms = None if shifted is None else tuple(new_norm(16, torch.float32, shifted=shifted) for _ in range(2))
    qkv, (cos, sin) = torch.randn(3, heads.features), angles(3, 16, torch.float32)
    cache = new_cache(3, 5, 2, 16, torch.float32, bytes=False)
    q = rotary_and_store(qkv, cos, sin, heads, norms, cache, ints(0, 1, 2), ints(3, 0, -1))
    expected = rotary.rotary(qkv, cos, sin, heads, norms)
    assert torch.equal(q, expected[0])
    assert torch.equal(cache.keys[0, 3], expected[1][0]) and torch.equal(cache.values[1, 0], expected[2][1])
    assert cache.keys[2].isnan().all()
