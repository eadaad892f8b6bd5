"""The kernels of decode attention in Triton's interpreter against the specification."""

import pytest
import torch
from decode_cases import bound, ints, new_cache, new_decode
from norm_cases import angles, new_norm

from octavo.kernels import decode as kernels
from octavo.kernels import decode_store as store_kernels
from octavo.kernels.tuning import DecodeTile
from octavo.numerics import decode as spec
from octavo.numerics.rotary import Heads

SMALL = DecodeTile(16, warps=4, stages=1, programs=40, least=16)  # many parts
WHOLE = DecodeTile(32, warps=4, stages=1, programs=1, least=512)


def assert_as_specified(made, *args, tile, shared):
    table = made.slots_of_group if shared else None
    actual = kernels.decode_attention(*made[:-1], *args, slots_of_group=table, tile=tile)
    expected = spec.decode_attention(*made[:-1], *args)
    assert actual.dtype == expected.dtype and torch.equal(actual.isnan(), expected.isnan())
    error = (actual.float() - expected.float()).abs()
    assert ((error <= bound(made, expected, args[0])) | expected.isnan()).all()
    return actual


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("bytes", [False, True], ids=["plain", "bytes"])
@pytest.mark.parametrize("window, softcap", [(None, None), (20, None), (None, 5.0), (35, 5.0), (1, None)])
@pytest.mark.parametrize("tile, shared", [(SMALL, True), (SMALL, False), (WHOLE, True), (WHOLE, False)])
def test_attention(tile, shared, window, softcap, bytes):
    """Scattered slots of a group, an empty slot, one without a prompt, an empty prompt, windows over the seam."""
    made = new_decode(bytes=bytes)
    actual = assert_as_specified(made, 0.3, window, softcap, tile=tile, shared=shared)
    assert not actual.isnan().any() and not actual[1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bytes", [False, True], ids=["plain", "bytes"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("heads", [(4, 4, 80), (8, 1, 128), (6, 2, 64), (2, 1, 256), (1, 1, 6)])
def test_heads(heads, shared, bytes, dtype):
    made = new_decode(heads=heads, dtype=dtype, bytes=bytes)
    assert_as_specified(made, heads[2] ** -0.5, tile=SMALL, shared=shared)


@pytest.mark.parametrize("bytes", [False, True], ids=["plain", "bytes"])
@pytest.mark.parametrize("rows", [64, 16])
def test_more_rows_than_one_product_has(rows, bytes):
    """Nine slots of one group with eight heads each: two programs for the group, or five."""
    made = new_decode(
        prefix=(21, 5), suffix=(3,) * 9 + (0,), groups=(0,) * 9 + (1,), heads=(8, 1, 16), bytes=bytes,
        dtype=torch.bfloat16,
    )  # fmt: skip
    assert_as_specified(made, 0.3, tile=SMALL._replace(rows=rows), shared=True)


def test_groups_of_one():
    made = new_decode(prefix=(7, 30), suffix=(4, 5), groups=(1, 0))
    assert_as_specified(made, 0.3, tile=SMALL, shared=True)
    assert_as_specified(made._replace(slots_of_group=ints(1, 0).unsqueeze(1)), 0.3, tile=SMALL, shared=True)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tile", [SMALL, WHOLE])
def test_what_is_not_finite_stays_where_it_is_seen(tile, shared):
    made = new_decode()
    made.q[0, 1, 3] = torch.nan  # one head
    made.suffix.keys[2, 64, 1, 0] = torch.nan  # two heads of one slot
    made.prefix.values[0, 4, 0, 5] = torch.nan  # one feature of two heads, in the slot of group 0 that is not empty
    actual = assert_as_specified(made, 0.3, tile=tile, shared=shared)
    assert actual[0, 1].isnan().all() and not actual[0, 0].isnan().any()
    assert actual[2, 2:].isnan().all() and actual[2, :2].isnan().sum() == 2
    assert not actual[3:].isnan().any()


def test_scores_that_are_huge():
    """Beyond what exp2 can hold: the merge subtracts the largest log-sum-exp."""
    for shared in (True, False):
        assert_as_specified(new_decode(), 3.0, tile=SMALL, shared=shared)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("size", [2.0**-80, 2.0**-20, 2.0**17, 2.0**60])
def test_bytes_of_any_size(size, shared):
    """Beyond FP16, in which products are: q against keys, values, and values of a few tokens against all others."""
    made = new_decode(dtype=torch.bfloat16, bytes=True)
    for cache in (made.prefix, made.suffix):
        cache.key_scales.div_(size)
        cache.value_scales.mul_(size)
    made.q.mul_(size)
    made.q[:, 1] *= 2.0**-8  # rows have powers of their own
    made.q[4, 2] = 0
    actual = assert_as_specified(made, 0.125, tile=SMALL, shared=shared)
    made.suffix.value_scales[:, ::3] *= 2.0**-12
    assert_as_specified(made, 0.125, tile=SMALL, shared=shared)
    made.suffix.value_scales[:, 1::3] = 0.0
    assert not assert_as_specified(made, 0.125, tile=WHOLE, shared=shared).isnan().any()
    assert actual.abs().max() > size / 8


def test_one_token_alone_is_its_value():
    made = new_decode(prefix=(0,), suffix=(1, 1), groups=(0, -1), dtype=torch.bfloat16)
    for shared in (True, False):
        actual = kernels.decode_attention(
            *made[:-1], 0.3, slots_of_group=made.slots_of_group if shared else None, tile=SMALL
        )
        assert torch.equal(actual, made.suffix.values[:, 0].repeat_interleave(2, dim=1))


def test_what_has_no_kernel():
    made = new_decode()
    assert kernels.can_decode(made.q, made.prefix, made.suffix)
    assert not kernels.can_decode(made.q.bfloat16(), made.prefix, made.suffix)
    assert not kernels.can_decode(made.q.double(), made.prefix, made.suffix)
    turned = made.suffix._replace(keys=made.suffix.keys.mT.contiguous().mT)
    assert not kernels.can_decode(made.q, made.prefix, turned)
    assert store_kernels.can_store(64, torch.float32, made.suffix)
    assert not store_kernels.can_store(63, torch.float32, made.suffix)
    assert not store_kernels.can_store(64, torch.float32, turned)


def same_bits(actual, expected):
    return all(x is y is None or bool(alike(x, y).all()) for x, y in zip(actual, expected, strict=True))


def alike(x, y):
    return (x == y) | ((x != x) & (y != y))


PLACES, POSITIONS = (3, 0, 1, -1, 3, 2), (0, 6, 2, 1, 4, -1)


@pytest.mark.parametrize("bytes", [False, True], ids=["plain", "bytes"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [64, 80, 6])
def test_store(width, dtype, bytes):
    k, v = torch.randn(2, 6, 2, width).to(dtype) * 3
    k[0], v[1, 0, 3], v[2, 1, 2] = 0, torch.nan, torch.inf
    k[2] *= 2.0**-10 if dtype == torch.float16 else 1e-36  # the scale would fall below the smallest
    k[2] = torch.where(k[2].abs() < 2.0**-126, 0, k[2])  # the interpreter does not know BF16's subnormal numbers
    k[4] *= 2.0**13 if dtype == torch.float16 else 1e37
    v = v.transpose(0, 1).contiguous().transpose(0, 1)
    caches = [new_cache(4, 7, 2, width, dtype, bytes=bytes) for _ in range(2)]
    store_kernels.store(k, v, caches[0], ints(*PLACES), ints(*POSITIONS))
    spec.store(k, v, caches[1], ints(*PLACES), ints(*POSITIONS))
    assert same_bits(*caches)
    untouched = new_cache(4, 7, 2, width, dtype, bytes=bytes)
    assert alike(caches[0].keys[2], untouched.keys[2]).all()


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("bytes", [False, True], ids=["plain", "bytes"])
@pytest.mark.parametrize("normed", [None, False, True], ids=["no norms", "norms", "shifted"])
@pytest.mark.parametrize("heads", [Heads(4, 2, 64), Heads(2, 2, 80)], ids=str)
def test_rotary_and_store(heads, normed, bytes):
    dtype = torch.bfloat16
    norms = None if normed is None else tuple(new_norm(heads.width, dtype, shifted=normed) for _ in range(2))
    qkv, (cos, sin) = torch.randn(6, heads.features).to(dtype), angles(6, heads.width, dtype)
    caches = [new_cache(4, 7, heads.kv, heads.width, dtype, bytes=bytes) for _ in range(2)]
    where = ints(*PLACES), ints(*POSITIONS)
    q = store_kernels.rotary_and_store(qkv, cos, sin, heads, norms, caches[0], *where)
    expected = spec.rotary_and_store(qkv, cos, sin, heads, norms, caches[1], *where)
    if norms is None:
        assert torch.equal(q, expected) and same_bits(*caches)
        return
    # 1 / rms differs in its last bit, and by it single elements, by one step of BF16 or of E4M3.
    torch.testing.assert_close(q, expected, rtol=0.01, atol=0.02)
    for mine, wanted in zip(caches[0], caches[1], strict=True):
        if mine is not None:
            assert alike(mine, wanted).float().mean() > 0.99
