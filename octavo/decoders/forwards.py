"""The forwards of fused modules: attention, MLP, norm, and a decoder layer with norms joined to what follows them.

A forward takes the module, the forward of its original class, and the arguments of the call. It returns what the
original would, and calls it where the fused products cannot be used.

    attention   q, k and v share one quantised input and one GEMM; one kernel takes them apart, with the norms of heads
                and the rotation by position
    mlp         gate and up share one GEMM; activation and quantising are one kernel, forward and backward
    layer       a norm is computed with the product that follows it, so that its input need not be saved for backward
                (`numerics/norm.py`), where that product saves its input in FP8; elsewhere with the addition before it.
                On a frozen base, the residual stream is added where an output is computed
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.decoders import decoding
from octavo.decoders.attention import NAME, attention_of
from octavo.decoders.classes import is_fused
from octavo.decoders.dense import dense_group
from octavo.decoders.gathering import around
from octavo.decoders.hooks import is_hooked
from octavo.decoders.match import GATE_UP, HEAD_NORMS, ORIGINAL, QKV, base_of, is_of_family, is_plain_norm, norm_of
from octavo.decoders.products import (
    Names,
    adds_residual,
    gated_mlp,
    gated_mlp_as,
    is_trained,
    linear_group,
    linear_group_after_norm,
    one_function,
    one_product,
)
from octavo.decoders.rehearsal import needs_rehearsal, rehearse
from octavo.dist.parallel import outputs_of
from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.linear import LinearInFP8
from octavo.nn.norm import rms_norm
from octavo.nn.rotary import rotary
from octavo.nn.sharded import plain_class
from octavo.numerics import FP8TrainingConfig
from octavo.numerics.config import Recipe
from octavo.numerics.norm import Norm
from octavo.numerics.rotary import Heads, Norms


class _Rotation(NamedTuple):
    """The rotation of q and k by position, `cos` and `sin[B, S, D]`, and norms of their heads before it."""

    cos: Tensor
    sin: Tensor
    heads: Heads
    norms: Norms | None


class _Precomputed:
    """An attention module as its own forward sees it in one call: with q, k and v computed already.

    An object of that call, passed as `self` instead of the module: nothing is stored on a module, so several
    threads may use one model, and a call that breaks off leaves nothing behind. Trained linears, frozen ones and those
    with adapters are replaced alike.
    """

    def __init__(self, module: Any, outputs: Sequence[Tensor], residual: Tensor | None) -> None:
        q, k, v = outputs
        self.module = module
        self.q_proj, self.k_proj, self.v_proj = (lambda _: q), (lambda _: k), (lambda _: v)
        if residual is not None:
            self.o_proj = lambda x: module.o_proj(x, residual=residual)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def attention_forward(self: Any, original: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    members = [getattr(self, name) for name in QKV]
    qkv = linear_group(members, hidden_states)
    if qkv is None:
        qkv = dense_group(members, hidden_states)
    if qkv is None and decoding.current() is not None:
        qkv = torch.cat([member(hidden_states) for member in members], dim=-1)  # one small copy, and one kernel then
    if qkv is None:
        return original(self, hidden_states, *args, **kwargs)
    if args:
        return original(_Precomputed(self, _split(self, qkv), None), hidden_states, *args, **kwargs)
    return _attention(self, original, qkv, None, {"hidden_states": hidden_states, **kwargs})


def _attention(
    module: Any, original: Callable[..., Any], qkv: Tensor, residual: Tensor | None, kwargs: dict[str, Any]
) -> Any:
    """The attention from what q_proj, k_proj and v_proj give, side by side.

    `residual`: added by o_proj, if that can (`adds_residual`). Norms of heads and rotation are one kernel, each way;
    the original computes them where that is not possible.
    """
    attend = None if _bends_scores(module) else attention_of(module.config)
    rotation = None if attend is None else _rotation(module, qkv, kwargs.get("position_embeddings"))
    if attend is None or rotation is None:
        return original(_Precomputed(module, _split(module, qkv), residual), **kwargs)
    if rotation.norms is None:
        return _attention_rotated(module, attend, rotation, residual, kwargs, qkv)
    compute = partial(_attention_rotated, module, attend, rotation, residual, kwargs)
    return around([getattr(module, name) for name in HEAD_NORMS], compute, qkv)


def _attention_rotated(
    module: Any,
    attend: Callable[..., Any],
    rotation: _Rotation,
    residual: Tensor | None,
    kwargs: dict[str, Any],
    qkv: Tensor,
) -> Any:
    if rotation.norms is not None:
        rotation = rotation._replace(norms=_norms_of_heads(module, qkv))  # gathered by now, where they were not
    out = _decoded(module, qkv, rotation)
    if out is not None:
        return _projected(module, out, residual), None
    taken = ("hidden_states", "position_embeddings", "attention_mask", "past_key_values")
    rest = {name: value for name, value in kwargs.items() if name not in taken}
    query, key, value = (x.transpose(1, 2) for x in rotary(qkv, *rotation))
    cache = kwargs.get("past_key_values")
    if cache is not None:
        key, value = cache.update(key, value, module.layer_idx)
    out, weights = attend(
        module, query, key, value, kwargs.get("attention_mask"),
        dropout=module.attention_dropout if module.training else 0.0, scaling=module.scaling,
        sliding_window=_window_of(module), **rest,
    )  # fmt: skip
    return _projected(module, out.reshape(*qkv.shape[:-1], -1), residual), weights


def _projected(module: Any, out: Tensor, residual: Tensor | None) -> Tensor:
    y = dense_group([module.o_proj], out, residual)
    if y is None:
        y = module.o_proj(out) if residual is None else module.o_proj(out, residual=residual)
    return y


def _bends_scores(module: Any) -> bool:
    """Whether an attention gives its function a bound for scores, which only some functions know."""
    return getattr(module, "attn_logit_softcapping", None) is not None and module.config._attn_implementation != NAME


def _window_of(module: Any) -> int | None:
    """The window of an attention. Mistral's reads it from the configuration; others ignore what that may have."""
    holder = module.config if plain_class(module).__name__ == "MistralAttention" else module
    return getattr(holder, "sliding_window", None)


def _decoded(module: Any, qkv: Tensor, rotation: _Rotation) -> Tensor | None:
    """Attend by the cache of a model that generates, `[..., H·D]`; None if there is none, or if it takes q, k and v."""
    cache = decoding.current()
    if cache is None:
        return None
    cos, sin, heads, norms = rotation
    cos, sin = (x.expand(*qkv.shape[:2], -1).flatten(0, 1) for x in (cos, sin))
    out = cache.attend_rotated(
        module.layer_idx, qkv.flatten(0, 1), cos, sin, heads, norms, scaling=module.scaling,
        window=_window_of(module), softcap=None,
    )  # fmt: skip
    return None if out is None else out.reshape(*qkv.shape[:-1], -1)


def _rotation(module: Any, qkv: Tensor, positions: tuple[Tensor, Tensor] | None) -> _Rotation | None:
    """How q and k are rotated, with the norms of their heads; None if the original has to do that."""
    width = module.head_dim
    if positions is None:
        return None
    cos, sin = positions
    if cos.dtype != qkv.dtype or cos.shape[1:] != (qkv.shape[1], width):
        return None
    norms = None
    if getattr(module, "q_norm", None) is not None:
        norms = _norms_of_heads(module, qkv)
        if norms is None:
            return None
    sizes = [outputs_of(base_of(getattr(module, name))) for name in QKV]
    if any(size % width for size in sizes):
        raise ValueError(
            f"{type(module).__name__}: this rank has {sizes} outputs of q, k and v, not whole heads of {width}; use as "
            "many ranks for tensor parallelism as divide num_key_value_heads"
        )
    q, k, _ = (size // width for size in sizes)
    return _Rotation(cos, sin, Heads(q, k, width), norms)


def _norms_of_heads(module: Any, qkv: Tensor) -> Norms | None:
    of_q, of_k = _norm_of(module.q_norm, qkv), _norm_of(module.k_norm, qkv)
    return None if of_q is None or of_k is None or of_q[1:] != of_k[1:] else (of_q, of_k)


def _split(module: Any, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs of q_proj, k_proj and v_proj."""
    q, k, v = qkv.split([outputs_of(base_of(getattr(module, name))) for name in QKV], dim=-1)
    # Rotating q and k by their positions copies them; v alone would keep all of `qkv` in memory for backward.
    return q, k, v.clone(memory_format=torch.contiguous_format)


def mlp_forward(self: Any, original: Callable[..., Any], x: Tensor) -> Tensor:
    y = gated_mlp(self, x)
    if y is not None:
        return y
    members = [getattr(self, name) for name in GATE_UP]
    # Frozen gate and up compute the same bits in one product as one by one; trained ones have one scale in a group.
    gate_up = linear_group(members, x) if isinstance(base_of(members[0]), FP8FrozenLinear) else None
    if gate_up is None:
        gate_up = dense_group(members, x)
    if gate_up is None:
        return original(self, x)
    gate, up = gate_up.split([member.out_features for member in members], dim=-1)
    h = self.act_fn(gate) * up
    y = dense_group([self.down_proj], h)
    return self.down_proj(h) if y is None else y


def norm_forward(self: Any, original: Callable[..., Any], x: Tensor) -> Tensor:
    """Compute the norm in one kernel: the original's steps in FP32, one by one, take more memory than any layer."""
    norm = _norm_of(self, x)
    return original(self, x) if norm is None else rms_norm(x, norm)[1]


def layer_forward(self: Any, original: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args or hidden_states.numel() == 0:
        return original(self, hidden_states, *args, **kwargs)
    if needs_rehearsal(self, hidden_states, kwargs):
        rehearse(self, _layer, hidden_states, kwargs)
    return _layer(self, hidden_states, kwargs)


def _layer(layer: Any, h: Tensor, kwargs: dict[str, Any]) -> Tensor:
    return _feed_forward(layer, *_attend(layer, h, kwargs))


def _attend(layer: Any, h: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Compute attention(norm(h)). Returns h, and what is yet to be added to it; None if it has been."""
    norm, attention = layer.input_layernorm, layer.self_attn
    members = [getattr(attention, name) for name in QKV] if is_fused(attention) else []
    names = one_product(members, h) if members and _can_join(norm, attention, members[0], h) else None
    if names is None:
        h, x = _normed(norm, h)
        return h, attention(hidden_states=x, **kwargs)[0]
    return around([norm, attention], partial(_attend_joined, layer, members, names, kwargs), h)


def _attend_joined(
    layer: Any, members: Sequence[Any], names: Sequence[Names], kwargs: dict[str, Any], h: Tensor
) -> tuple[Tensor, Tensor | None]:
    norm, attention = layer.input_layernorm, layer.self_attn
    qkv, h = linear_group_after_norm(members, h, _plain_norm(norm), names)
    adds = adds_residual(attention.o_proj)
    # The original reads the shape of h alone.
    given = {"hidden_states": h, **kwargs}
    out = _attention(attention, attention.__dict__[ORIGINAL].forward, qkv, h if adds else None, given)[0]
    return (out, None) if adds else (h, out)


def _feed_forward(layer: Any, h: Tensor, y: Tensor | None) -> Tensor:
    """Compute h + mlp(norm(h)), where y is added to h first, if there is one."""
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    if not is_fused(mlp) or not _can_join(norm, mlp, mlp.gate_proj, h):
        h, x = _normed(norm, h, y)
        return h + mlp(x)
    h = h if y is None else h + y
    names = one_function(mlp, h)
    if names is None:
        return h + mlp(norm(h))

    def function(h: Tensor) -> Tensor:
        return gated_mlp_as(mlp, h, names, _plain_norm(norm), residual=True)

    return around([norm, mlp], function, h)


def _normed(module: Any, h: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h, plus y if there is one, and the norm of it: in one kernel, unless the module has to be called."""
    if _norm_of(module, h) is None or (y is not None and y.dtype != h.dtype):
        h = h if y is None else h + y
        return h, module(h)

    def function(h: Tensor) -> tuple[Tensor, Tensor]:
        norm = norm_of(module)
        assert norm is not None
        return rms_norm(h, norm, y)

    return around([module], function, h)


def _norm_of(module: Any, like: Tensor) -> Norm | None:
    """The norm that a module computes of what is like this tensor; None if it has to be called."""
    norm = None if is_hooked(module) else norm_of(module)
    return norm if norm is not None and norm.weight.dtype == like.dtype else None


def _plain_norm(norm: Any) -> Norm:
    return Norm(norm.weight, norm.variance_epsilon)


def _can_join(norm: Any, follower: Any, linear: Any, h: Tensor) -> bool:
    """Whether a norm can be computed with the product of `linear`, the first linear of its follower, which is fused.

    Somebody may have put another module in the place of the norm since.
    """
    if is_hooked(norm, follower) or not is_plain_norm(norm) or norm.weight.dtype != h.dtype:
        return False
    base = base_of(linear)
    if not isinstance(base, LinearInFP8) or base.spec(h).out_dtype != h.dtype:
        return False  # under autocast, the residual stream is wider than what is added to it
    return joins_norm(linear.config, linear.recipe) if is_trained(linear) else not norm.weight.requires_grad


def joins_norms(layer: Any) -> bool:
    """Whether the norms of a layer are joined to products, as far as its weights go."""
    if not is_of_family(layer.self_attn, "Attention"):
        return False  # somebody has put another module in its place
    linear = base_of(layer.self_attn.q_proj)
    return joins_norm(linear.config, linear.recipe) if is_trained(linear) else True


def joins_norm(config: FP8TrainingConfig, recipe: Recipe) -> bool:
    """Whether trained linears take a norm: those that save activations in FP8, with one scale for all of x."""
    return config.activations == "fp8" and recipe.x.granularity == "tensor"
