"""Decode attention and its cache on the GPU against the specification; launched twice, and from a CUDA graph."""

import pytest
import torch
from decode_cases import bound, ints, new_cache, new_decode
from norm_cases import angles, new_norm

from octavo.numerics import decode as spec
from octavo.numerics.decode import KVCache
from octavo.numerics.rotary import Heads
from octavo.ops import decode

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OF_AN_8B = {
    "prefix": (128, 77, 0, 128),
    "suffix": tuple(range(0, 512, 16)),
    "groups": tuple(i * 7 % 4 for i in range(32)),
    "positions": (128, 512),
    "heads": (32, 8, 128),
}


def assert_close(actual, expected, made, scaling):
    assert torch.equal(actual.isnan(), expected.isnan())
    error = (actual.float() - expected.float()).abs()
    assert ((error <= bound(made, expected, scaling)) | expected.isnan()).all()


@pytest.mark.parametrize("bytes", [False, True], ids=["plain", "bytes"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("window, softcap", [(None, None), (20, None), (None, 5.0), (35, 5.0)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("heads", [(4, 4, 80), (8, 1, 128), (6, 2, 64), (2, 1, 256), None])
def test_attention(heads, dtype, window, softcap, shared, bytes):
    shape = OF_AN_8B if heads is None else {"heads": heads}
    made = new_decode(dtype=dtype, bytes=bytes, **shape).to("cuda")
    table = made.slots_of_group if shared else None
    expected = spec.decode_attention(*made[:-1], 0.1, window, softcap)
    first, second = (decode.decode_attention(*made[:-1], 0.1, window, softcap, table) for _ in range(2))
    assert_close(first, expected, made, 0.1)
    assert torch.equal(first, second) and not first[made.suffix_lengths == 0].any()


@pytest.mark.parametrize("bytes", [False, True], ids=["plain", "bytes"])
@pytest.mark.parametrize("shared", [True, False])
def test_lengths_change_under_a_graph(shared, bytes):
    made = new_decode(dtype=BF16, bytes=bytes, **OF_AN_8B).to("cuda")
    table = made.slots_of_group if shared else None
    decode.decode_attention(*made[:-1], 0.1, slots_of_group=table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode.decode_attention(*made[:-1], 0.1, slots_of_group=table)
    for less in (0, 100, 511):
        made.suffix_lengths.sub_(less).clamp_(min=0)
        graph.replay()
        assert_close(out, spec.decode_attention(*made[:-1], 0.1), made, 0.1)


@pytest.mark.parametrize("size", [2.0**-80, 2.0**-20, 2.0**17, 2.0**60])
def test_bytes_of_any_size(size):
    """Beyond FP16, in which products are."""
    made = new_decode(dtype=BF16, bytes=True, **OF_AN_8B).to("cuda")
    for cache in (made.prefix, made.suffix):
        cache.key_scales.div_(size)
        cache.value_scales.mul_(size)
    made.q.mul_(size)
    made.suffix.value_scales[:, ::3] *= 2.0**-12
    made.suffix.value_scales[:, 1::3] = 0.0
    for table in (made.slots_of_group, None):
        actual = decode.decode_attention(*made[:-1], 0.1, slots_of_group=table)
        assert_close(actual, spec.decode_attention(*made[:-1], 0.1), made, 0.1)


def test_a_graph_in_which_a_copy_comes_first():
    """A launch that may begin early, after what is no kernel; then one after the other, each needing the one before."""
    made = new_decode(dtype=BF16, **OF_AN_8B).to("cuda")
    heads, places = Heads(32, 8, 128), torch.arange(32, dtype=torch.int32, device="cuda")
    qkv = torch.randn(32, heads.features, device="cuda").to(BF16)
    (cos, sin), given = angles(32, 128, BF16, "cuda"), torch.empty_like(qkv)

    def step(module, cache, lengths):
        q = module.rotary_and_store(given, cos, sin, heads, None, cache, places, lengths - 1)
        return module.decode_attention(q, *made[1:4], cache, lengths, 0.1)

    caches = [KVCache(made.suffix.keys.clone(), made.suffix.values.clone()) for _ in range(2)]
    given.copy_(qkv)
    step(decode, caches[0], made.suffix_lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given.copy_(qkv)
        out = step(decode, caches[0], made.suffix_lengths)
    for _ in range(3):
        qkv.normal_()
        graph.replay()
        expected = step(spec, caches[1], made.suffix_lengths)
        assert_close(out, expected, made, 0.1)


def test_what_is_not_finite_stays_where_it_is_seen():
    made = new_decode(dtype=BF16).to("cuda")
    made.q[0, 1, 3] = made.suffix.keys[2, 64, 1, 0] = made.prefix.values[0, 4, 0, 5] = torch.nan
    for table in (made.slots_of_group, None):
        actual = decode.decode_attention(*made[:-1], 0.3, slots_of_group=table)
        assert_close(actual, spec.decode_attention(*made[:-1], 0.3), made, 0.3)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_bytes_that_are_nan(dtype):
    """Here only: Triton's interpreter takes NaN in E4M3 for 480."""
    made = new_decode(dtype=dtype, bytes=True).to("cuda")
    made.q[0, 1, 3] = torch.nan
    made.suffix.keys[2, 64, 1, 0], made.prefix.values[0, 4, 0, 5], made.suffix.values[5, 3, 1, 6] = 0x7F, 0xFF, 0x7F
    for table in (made.slots_of_group, None):
        actual = decode.decode_attention(*made[:-1], 0.3, slots_of_group=table)
        assert_close(actual, spec.decode_attention(*made[:-1], 0.3), made, 0.3)


@pytest.mark.parametrize("bytes", [False, True], ids=["plain", "bytes"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("width", [64, 80, 128, 256])
def test_store(width, dtype, bytes):
    tokens = 50
    places, positions = torch.randperm(64)[:tokens].int().cuda(), torch.randint(-1, 7, (tokens,)).int().cuda()
    k, v = (torch.randn(2, tokens, 2, width) * 10 ** torch.randn(tokens, 1, 1)).to(dtype).cuda()
    k[0], v[1, 0, 3], v[2, 1, 2] = 0, torch.nan, torch.inf
    for _ in range(2):
        caches = [_on_gpu(new_cache(64, 7, 2, width, dtype, bytes=bytes)) for _ in range(2)]
        decode.store(k, v, caches[0], places, positions)
        spec.store(k, v, caches[1], places, positions)
        assert all(_alike(*pair).all() for pair in zip(*caches, strict=True) if pair[0] is not None)


@pytest.mark.parametrize("bytes", [False, True], ids=["plain", "bytes"])
@pytest.mark.parametrize("normed", [None, False, True], ids=["no norms", "norms", "shifted"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(2, 2, 80)], ids=str)
def test_rotary_and_store(heads, normed, bytes, dtype):
    norms = None if normed is None else tuple(new_norm(heads.width, dtype, shifted=normed, device="cuda") for _ in "qk")
    places = ints(*range(64)).cuda()
    positions = places % 8 - 1
    cos, sin = angles(64, heads.width, dtype, "cuda")
    for _ in range(2):
        qkv = torch.randn(64, heads.features, device="cuda").to(dtype)
        caches = [_on_gpu(new_cache(64, 7, heads.kv, heads.width, dtype, bytes=bytes)) for _ in range(2)]
        q = decode.rotary_and_store(qkv, cos, sin, heads, norms, caches[0], places, positions)
        expected = spec.rotary_and_store(qkv, cos, sin, heads, norms, caches[1], places, positions)
        pairs = [(q, expected), *((x, y) for x, y in zip(*caches, strict=True) if x is not None)]
        for x, y in pairs:
            # 1 / rms differs in its last bit, and by it single elements, by one step.
            assert _alike(x, y).float().mean() >= (1.0 if norms is None else 0.99)


def _on_gpu(cache):
    return KVCache(*(None if x is None else x.cuda() for x in cache))


def _alike(x, y):
    return (x == y) | ((x != x) & (y != y))
