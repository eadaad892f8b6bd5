"""Launches of the kernels that decoding needs, for `launches.py`: attention over a cache, products of few tokens,
drawing a token, bookkeeping of slots."""

import itertools
from collections.abc import Callable, Iterator

import torch

from octavo.kernels import decode, decode_store, few_tokens, sampling, slots, tuning
from octavo.numerics import E4M3, E5M2, Quantized
from octavo.numerics.activation import ACTIVATIONS
from octavo.numerics.decode import KVCache
from octavo.numerics.few_tokens import Low
from octavo.numerics.norm import Norm
from octavo.numerics.rotary import Heads

Launch = tuple[str, Callable[[], object]]


def _cache(dtype: torch.dtype, places: int, positions: int, heads: int, width: int, *, bytes: bool) -> KVCache:
    shape = (places, positions, heads, width)
    if bytes:
        return KVCache(*(torch.zeros(shape, dtype=torch.uint8) for _ in range(2)), *torch.ones(2, *shape[:3]).unbind())
    return KVCache(*(torch.zeros(shape, dtype=dtype) for _ in range(2)))


def decode_launches(dtype: torch.dtype) -> Iterator[Launch]:
    few, whole = torch.zeros(8, dtype=torch.int32), tuning.HOPPER.decode._replace(least=4096)
    many = tuning.HOPPER.decode._replace(programs=400)
    for bytes in (False, True):
        for h, g, d in ((32, 8, 128), (3, 3, 80)) if dtype == torch.bfloat16 else ((32, 8, 128),):
            prefix, suffix = (_cache(dtype, n, p, g, d, bytes=bytes) for n, p in ((2, 128), (8, 512)))
            q, name = torch.zeros(8, h, d, dtype=dtype), f"{d} {'bytes' if bytes else 'plain'}"
            lengths, table = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
            usual = (q, prefix, lengths, few, suffix, few, 0.1)
            yield f"decode {name} shared", lambda given=usual, t=table: decode.decode_attention(*given, None, None, t)
            yield f"decode {name} alone", lambda given=usual: decode.decode_attention(*given, tile=many)
            yield (
                f"decode {name} window and softcap",
                lambda given=usual, t=table: decode.decode_attention(*given, 64, 30.0, t),
            )
            yield f"decode {name} whole", lambda given=usual: decode.decode_attention(*given, tile=whole)
            kv, heads = torch.zeros(8, g, d, dtype=dtype), Heads(h, g, d)
            yield f"decode store {name}", lambda kv=kv, s=suffix: decode_store.store(kv, kv, s, few, few)
            qkv, cos = torch.zeros(8, heads.features, dtype=dtype), torch.zeros(8, d, dtype=dtype)
            plain = Norm(torch.zeros(d, dtype=dtype), 1e-5)
            for norms in (None, (plain, plain)):
                yield (
                    f"decode rotary and store {name}{'' if norms is None else ' norms'}",
                    lambda x=qkv, c=cos, h=heads, n=norms, s=suffix: decode_store.rotary_and_store(
                        x, c, c, h, n, s, few, few
                    ),
                )
        # The widest heads, whose tiles are made to fit shared memory.
        caches = [_cache(dtype, n, p, 1, 256, bytes=bytes) for n, p in ((2, 128), (8, 512))]
        given = (torch.zeros(8, 2, 256, dtype=dtype), caches[0], few[:2], few, caches[1], few, 0.1)
        yield f"decode 256 {'bytes' if bytes else 'plain'}", lambda given=given: decode.decode_attention(*given)


def sampling_launches(dtype: torch.dtype) -> Iterator[Launch]:
    if dtype != torch.bfloat16:  # logits are in FP32 whatever the model is in
        return
    one, seed = torch.ones(()), torch.zeros(1, dtype=torch.int64)
    for shape in ((64, 128_256), (3, 5001)):
        logits = torch.zeros(shape)
        for greedy in (False, True):
            name = f"sampling {shape}{' greedy' if greedy else ''}"
            yield name, lambda x=logits, g=greedy: sampling.sample(x, one, seed, g)
    ints, rows = torch.zeros(64, dtype=torch.int32), torch.zeros(64, 512)
    flags, tokens = torch.zeros(64, dtype=torch.bool), torch.zeros(64, dtype=torch.int64)
    yield "slots begin step", lambda: slots.begin_step(flags, ints, ints, ints)
    yield (
        "slots end step",
        lambda: slots.end_step_(rows.long(), rows, tokens, ints, flags, tokens, rows[0, :64], flags, ints),
    )


def few_token_launches(dtype: torch.dtype) -> Iterator[Launch]:
    if dtype == torch.float32:
        return

    def weight(n: int, k: int, granularity: str, format: torch.dtype = E4M3.dtype) -> Quantized:
        scales = {"tensor": (), "channel": (n, 1), "block": (-(-n // 128), -(-k // 128))}
        return Quantized(torch.zeros(n, k, dtype=format), torch.ones(scales[granularity]))

    def adapters(count: int, n: int, k: int, of: torch.dtype = dtype) -> list[Low]:
        size = n // count
        pairs = [(torch.zeros(32, k, dtype=of), torch.zeros(size, 32, dtype=of)) for _ in range(count)]
        return [Low(i * size, (i + 1) * size, 1.0, *pair) for i, pair in enumerate(pairs)]

    for m in (1, 16, 32, 64, 128) if dtype == torch.bfloat16 else (1, 16):
        x = torch.zeros(m, 1024, dtype=dtype)
        for granularity in ("block", "channel", "tensor"):
            yield (
                f"few tokens {m} {granularity}",
                lambda x=x, g=granularity: few_tokens.linear(x, weight(1536, 1024, g), adapters(3, 1536, 1024)),
            )
    x, odd = torch.zeros(5, 256, dtype=dtype), torch.zeros(5, 144, dtype=dtype)
    plain, bias, residual = (
        Norm(torch.zeros(256, dtype=dtype), 1e-5),
        torch.zeros(256),
        torch.zeros(5, 256, dtype=dtype),
    )
    yield (
        "few tokens E5M2, adapters in FP32, norm, bias, residual",
        lambda: few_tokens.linear(
            x,
            weight(256, 256, "channel", E5M2.dtype),
            adapters(1, 256, 256, torch.float32),
            bias=bias,
            residual=residual,
            norm=plain,
        ),
    )
    one, added = odd[:1], {"bias": torch.zeros(130), "residual": torch.zeros(1, 130, dtype=dtype)}
    for granularity in ("block", "channel"):
        yield (
            f"few tokens, one at edges {granularity}",
            lambda g=granularity: few_tokens.linear(one, weight(130, 144, g), adapters(1, 130, 144), **added),
        )
    yield "few tokens, one without adapters", lambda: few_tokens.linear(one, weight(130, 144, "block"))
    yield "few tokens at edges", lambda: few_tokens.linear(odd, weight(130, 144, "block"), adapters(1, 130, 144))
    for activation, m in itertools.product(ACTIVATIONS, (1, 5)):
        yield (
            f"few tokens gated {activation} {m}",
            lambda a=activation, m=m: few_tokens.gated_mlp(
                x[:m],
                weight(1024, 256, "block"),
                weight(256, 512, "block"),
                a,
                adapters(2, 1024, 256),
                adapters(1, 256, 512),
                residual=residual[:m],
                norm=plain,
            ),
        )
    many = torch.zeros(100, 256, dtype=dtype)
    yield (
        "few tokens gated, tiles of tokens",
        lambda: few_tokens.gated_mlp(
            many,
            weight(1024, 256, "channel"),
            weight(256, 512, "channel"),
            "silu",
            adapters(2, 1024, 256),
            adapters(1, 256, 512),
        ),
    )
