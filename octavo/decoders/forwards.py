"""The forwards of fused modules: attention, MLP, norm, and a decoder layer with norms joined to what follows them.

A forward takes the module, the forward of its original class, and the arguments of the call. It returns what the
original would, and calls it where the fused products cannot be used.

    attention   q, k and v share one quantised input and one GEMM
    mlp         gate and up share one GEMM; activation and quantising are one kernel, forward and backward
    layer       a norm is computed with the product that follows it, so that its input need not be saved for backward
                (`numerics/norm.py`); on a frozen base, the residual stream is added where an output is computed
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.decoders.classes import ORIGINAL, is_fused
from octavo.decoders.hooks import is_hooked
from octavo.decoders.match import GATE_UP, QKV, base_of
from octavo.decoders.products import adds_residual, gated_mlp, linear_group
from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.linear import FP8Linear, LinearInFP8
from octavo.numerics import FP8TrainingConfig
from octavo.numerics.config import Recipe
from octavo.numerics.norm import Norm


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
    qkv = linear_group([getattr(self, name) for name in QKV], hidden_states)
    if qkv is None:
        return original(self, hidden_states, *args, **kwargs)
    return original(_with_outputs(self, qkv), hidden_states, *args, **kwargs)


def _with_outputs(module: Any, qkv: Tensor, residual: Tensor | None = None) -> _Precomputed:
    """The attention with its outputs of q, k and v. `residual`: added by o_proj, if that can (`adds_residual`)."""
    q, k, v = qkv.split([getattr(module, name).out_features for name in QKV], dim=-1)
    # Rotating q and k by their positions copies them; v alone would keep all of `qkv` in memory for backward.
    return _Precomputed(module, (q, k, v.clone(memory_format=torch.contiguous_format)), residual)


def mlp_forward(self: Any, original: Callable[..., Any], x: Tensor) -> Tensor:
    y = gated_mlp(self, x)
    if y is not None:
        return y
    members = [getattr(self, name) for name in GATE_UP]
    # Frozen gate and up compute the same bits in one product as one by one; trained ones have one scale in a group.
    gate_up = linear_group(members, x) if isinstance(base_of(members[0]), FP8FrozenLinear) else None
    if gate_up is None:
        return original(self, x)
    gate, up = gate_up.split([member.out_features for member in members], dim=-1)
    return self.down_proj(self.act_fn(gate) * up)


def norm_forward(self: Any, original: Callable[..., Any], x: Tensor) -> Tensor:
    """Compute the norm in one kernel: the original's steps in FP32, one by one, take more memory than any layer."""
    if x.dtype == torch.float32:
        return original(self, x)
    return self.weight * nn.functional.rms_norm(x, (x.shape[-1],), eps=self.variance_epsilon)


def layer_forward(self: Any, original: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args or hidden_states.numel() == 0:
        return original(self, hidden_states, *args, **kwargs)
    return _feed_forward(self, _attend(self, hidden_states, kwargs))


def _attend(layer: Any, h: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Compute h + attention(norm(h))."""
    attention = layer.self_attn
    members = [getattr(attention, name) for name in QKV]
    norm = _norm_to_join(layer.input_layernorm, attention, members[0], h)
    qkv = None if norm is None else linear_group(members, h, norm)
    if qkv is None:
        return h + attention(hidden_states=layer.input_layernorm(h), **kwargs)[0]
    adds = adds_residual(attention.o_proj)
    precomputed = _with_outputs(attention, qkv, residual=h if adds else None)
    out = attention.__dict__[ORIGINAL].forward(precomputed, hidden_states=h, **kwargs)[0]  # reads the shape of h alone
    return out if adds else h + out


def _feed_forward(layer: Any, h: Tensor) -> Tensor:
    """Compute h + mlp(norm(h))."""
    mlp = layer.mlp
    norm = _norm_to_join(layer.post_attention_layernorm, mlp, mlp.gate_proj, h)
    y = None if norm is None else gated_mlp(mlp, h, norm, residual=True)
    return h + mlp(layer.post_attention_layernorm(h)) if y is None else y


def _norm_to_join(norm: Any, follower: Any, linear: Any, h: Tensor) -> Norm | None:
    """The norm, if it can be computed with the product of `linear`, the first linear of its follower; else None."""
    if is_hooked(norm, follower) or not is_fused(follower) or norm.weight.dtype != h.dtype:
        return None
    base = base_of(linear)
    if not isinstance(base, LinearInFP8) or base.spec(h).out_dtype != h.dtype:
        return None  # under autocast, the residual stream is wider than what is added to it
    joins = joins_norm(linear.config, linear.recipe) if type(linear) is FP8Linear else not norm.weight.requires_grad
    return Norm(norm.weight, norm.variance_epsilon) if joins else None


def joins_norm(config: FP8TrainingConfig, recipe: Recipe) -> bool:
    """Whether trained linears take a norm: those that save activations in FP8, with one scale for all of x."""
    return config.activations == "fp8" and recipe.x.granularity == "tensor"
