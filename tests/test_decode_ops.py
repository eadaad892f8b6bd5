"""The operators of decode attention: schema, fakes and dispatch by opcheck; what they refuse."""

import pytest
import torch
from decode_cases import ints, new_cache, new_decode
from norm_cases import angles, new_norm
from torch.library import opcheck

from octavo.numerics import decode as spec
from octavo.numerics.rotary import Heads
from octavo.ops import decode

HEADS = Heads(4, 2, 64)


@pytest.mark.parametrize("bytes", [False, True], ids=["plain", "bytes"])
def test_opcheck(bytes):
    made = new_decode(bytes=bytes)
    given = (made.q, *made.prefix, made.prefix_lengths, made.group_of, *made.suffix, made.suffix_lengths)
    for table in (made.slots_of_group, None):
        opcheck(torch.ops.octavo.decode_attention, (*given, 0.3, 20, 0.0, table), test_utils=OPCHECK)
    cache = [None if x is None else x.nan_to_num(1.0) for x in made.suffix]  # NaN is not equal to itself
    k, v = torch.randn(2, 3, 2, 64)
    where = ints(0, 1, 2), ints(4, 0, -1)
    opcheck(torch.ops.octavo.decode_store, (k, v, *cache, *where))
    cos, sin = angles(3, 64, torch.float32)
    for weights in ([], [new_norm(64, torch.float32, shifted=False).weight] * 2):
        numbers = (weights, list(HEADS), 1e-5, False)
        opcheck(torch.ops.octavo.rotary_and_store, (torch.randn(3, HEADS.features), cos, sin, *numbers, *cache, *where))


OPCHECK = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step(compiled):
    """Stores, and attends to what was stored."""
    made = new_decode()
    qkv, (cos, sin) = torch.randn(6, HEADS.features), angles(6, 64, torch.float32)
    slots, positions = torch.arange(6, dtype=torch.int32), made.suffix_lengths - 1

    def step(qkv, suffix):
        q = decode.rotary_and_store(qkv, cos, sin, HEADS, None, suffix, slots, positions)
        return decode.decode_attention(
            q, made.prefix, made.prefix_lengths, made.group_of, suffix, made.suffix_lengths, 0.3
        )

    mine, theirs = (spec.KVCache(*(None if x is None else x.clone() for x in made.suffix)) for _ in range(2))
    actual = (torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step)(qkv, mine)
    q = spec.rotary_and_store(qkv, cos, sin, HEADS, None, theirs, slots, positions)
    expected = spec.decode_attention(
        q, made.prefix, made.prefix_lengths, made.group_of, theirs, made.suffix_lengths, 0.3
    )
    assert torch.equal(actual, expected)
    torch.testing.assert_close(mine.keys, theirs.keys, rtol=0, atol=0, equal_nan=True)


def test_what_is_refused():
    made = new_decode()
    k = torch.randn(2, 2, 64)
    call = decode.decode_attention
    with pytest.raises(ValueError, match="window=0"):
        call(*made[:-1], 0.3, 0)
    with pytest.raises(ValueError, match="softcap=-1"):
        call(*made[:-1], 0.3, None, -1.0)
    with pytest.raises(ValueError, match=r"suffix_lengths.*6 of torch.int32"):
        call(*made._replace(suffix_lengths=made.suffix_lengths.long())[:-1], 0.3)
    with pytest.raises(ValueError, match="slots_of_group"):
        call(*made[:-1], 0.3, slots_of_group=made.slots_of_group[:1])
    with pytest.raises(ValueError, match="multiple"):
        call(*made._replace(q=made.q[:, :3])[:-1], 0.3)
    with pytest.raises(ValueError, match="same format"):
        call(*made._replace(prefix=new_cache(3, 40, 2, 64, torch.float32, bytes=True))[:-1], 0.3)
    with pytest.raises(ValueError, match="both scales"):
        call(
            *made._replace(suffix=new_cache(6, 9, 2, 64, torch.float32, bytes=True)._replace(key_scales=None))[:-1], 0.3
        )
    with pytest.raises(ValueError, match="one for each token and head"):
        bytes = new_cache(6, 9, 2, 64, torch.float32, bytes=True)
        decode.store(k, k, bytes._replace(key_scales=torch.ones(())), ints(0, 1), ints(0, 0))
    with pytest.raises(ValueError, match=r"\[T, 2, 64\]"):
        decode.store(k[:, :1], k[:, :1], made.suffix, ints(0, 1), ints(0, 0))
    with pytest.raises(ValueError, match="positions"):
        decode.store(k, k, made.suffix, ints(0, 1), ints(0))
    norms = (new_norm(64, torch.float32, shifted=False), new_norm(64, torch.float32, shifted=True))
    with pytest.raises(ValueError, match="norms"):
        cos, sin = angles(2, 64, torch.float32)
        qkv = torch.randn(2, HEADS.features)
        decode.rotary_and_store(qkv, cos, sin, HEADS, norms, made.suffix, ints(0, 1), ints(0, 0))
