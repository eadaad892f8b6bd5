"""A decoder layer whose norms are computed with the products that follow them, so that what goes into a norm need not
be kept for backward (see `numerics/norm.py`). On a frozen base, what a layer adds to the residual stream is added where
it is computed. What cannot be, goes the way of transformers.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from octavo.hf import decoder, frozen
from octavo.hf.hooks import is_hooked
from octavo.nn.linear import FP8Linear, LinearInFP8
from octavo.numerics import FP8TrainingConfig
from octavo.numerics.config import Recipe
from octavo.numerics.norm import Norm


def can_fuse(module: Any) -> bool:
    """A layer of h + attention(norm(h)), then h + mlp(norm(h)), with plain norms; what follows one of them is fused."""
    if not decoder.is_own(module, "DecoderLayer"):
        return False
    norms = (getattr(module, name, None) for name in ("input_layernorm", "post_attention_layernorm"))
    return all(map(decoder.is_plain_norm, norms)) and any(map(decoder.is_fused, (module.self_attn, module.mlp)))


def fuse(module: nn.Module) -> None:
    decoder.take_class(module, _layer_forward)


def _layer_forward(self: Any, original: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args or hidden_states.numel() == 0:
        return original(self, hidden_states, *args, **kwargs)
    return _feed_forward(self, _attend(self, hidden_states, kwargs))


def _attend(self: Any, h: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """h + attention(norm(h))."""
    attention = self.self_attn
    members = [getattr(attention, name) for name in decoder.QKV]
    norm = _norm_to_join(self.input_layernorm, attention, members[0], h)
    y = None if norm is None else decoder.product_of_group(members, h, norm)
    if y is None:
        return h + attention(hidden_states=self.input_layernorm(h), **kwargs)[0]
    adds = frozen.adds_residual(attention.o_proj)
    out = decoder.attend(attention, y, h, residual=h if adds else None, **kwargs)[0]
    return out if adds else h + out


def _feed_forward(self: Any, h: Tensor) -> Tensor:
    """h + mlp(norm(h))."""
    mlp = self.mlp
    norm = _norm_to_join(self.post_attention_layernorm, mlp, mlp.gate_proj, h)
    if norm is None:
        return h + mlp(self.post_attention_layernorm(h))
    activation = decoder.ACTIVATIONS.get(type(mlp.act_fn).__name__)
    if activation is not None and not is_hooked(mlp.act_fn):
        added = frozen.mlp(mlp.gate_proj, mlp.up_proj, mlp.down_proj, h, activation, norm, residual=True)
        if added is not None:
            return added
    y = decoder.trained_mlp(mlp, h, norm)
    return h + (mlp(self.post_attention_layernorm(h)) if y is None else y)


def _norm_to_join(norm: Any, follower: Any, linear: Any, h: Tensor) -> Norm | None:
    """What `norm` computes, if nobody watches it or what follows it, and `linear`, the first there, keeps x for it."""
    if is_hooked(norm, follower) or not decoder.is_fused(follower) or norm.weight.dtype != h.dtype:
        return None
    base = frozen.base_of(linear)
    if not isinstance(base, LinearInFP8) or base.spec(h).out_dtype != h.dtype:
        return None  # under autocast, the residual stream is wider than what is added to it
    joins = joins_norm(linear.config, linear.recipe) if type(linear) is FP8Linear else not norm.weight.requires_grad
    return Norm(norm.weight, norm.variance_epsilon) if joins else None


def joins_norm(config: FP8TrainingConfig, recipe: Recipe) -> bool:
    """Of trained linears: those that keep less, with one scale for all of x."""
    return config.activations == "fp8" and recipe.x.granularity == "tensor"
