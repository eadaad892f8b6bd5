"""q, k and v from the product that computes them side by side: norms of heads, then rotation by position; and back.

    q, k, v = split(qkv)
    q, k = norm(q), norm(k)                   each head for itself, where a family does that (`numerics.norm`)
    q = q · cos + rotate_half(q) · sin        rotate_half([a, b]) = [−b, a], the halves of a head; k likewise

    dq = g · cos − rotate_half(g · sin)       then back through the norms
    dqkv = join(dq, dk, dv)

Shapes: `qkv[T, (H + 2·G)·D]` for H heads of q and G of k and of v; `cos` and `sin[R, D]`, where T is a multiple of R,
and token t has the position in row t mod R: R is T, or the length of sequences that share their positions. Each product
and each sum is rounded to the dtype of qkv, as torch does it one by one, so that the bits are those of transformers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.numerics.norm import Norm, rms_norm, rms_norm_backward, weight_gradient

Norms = tuple[Norm, Norm]  # of q and of k


class Heads(NamedTuple):
    """How many heads q has, how many k and v have each, and the width of a head."""

    q: int
    kv: int
    width: int

    @property
    def features(self) -> int:
        """All of q, k and v side by side."""
        return (self.q + 2 * self.kv) * self.width


def split_heads(qkv: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, `[T, heads, D]`, as views."""
    apart = qkv.view(qkv.shape[0], -1, heads.width)
    return apart[:, : heads.q], apart[:, heads.q : heads.q + heads.kv], apart[:, heads.q + heads.kv :]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads `x[T, heads, D]` by `cos` and `sin[T, 1, D]`."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def rotate_back(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradient of `rotate`."""
    a, b = (g * sin).chunk(2, dim=-1)
    return g * cos + torch.cat((b, -a), dim=-1)


def rotary(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, norms: Norms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, `[T, heads, D]`, each with memory of its own."""
    q, k, v = split_heads(qkv, heads)
    if norms is not None:
        q, k = rms_norm(q, norms[0])[0], rms_norm(k, norms[1])[0]
    cos, sin = for_tokens(cos, qkv.shape[0]), for_tokens(sin, qkv.shape[0])
    return rotate(q, cos, sin), rotate(k, cos, sin), v.clone(memory_format=torch.contiguous_format)


def rotary_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor | None, cos: Tensor, sin: Tensor, heads: Heads,
    norms: Norms | None = None, *, needs: tuple[bool, bool] = (True, True),
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return dqkv, and the gradients of the weights of both norms; `qkv` is for the norms, `needs` of their weights."""
    cos, sin = for_tokens(cos, dq.shape[0]), for_tokens(sin, dq.shape[0])
    back = [rotate_back(dq, cos, sin), rotate_back(dk, cos, sin)]
    weights: list[Tensor | None] = [None, None]
    if norms is not None:
        assert qkv is not None
        inputs = split_heads(qkv, heads)[:2]
        for i, (g, x, norm) in enumerate(zip(back, inputs, norms, strict=True)):
            inverse = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + norm.eps)
            normed = x.float() * inverse
            back[i] = rms_norm_backward(g, norm.factor() * normed, norm, inverse, normed)
            if needs[i]:
                weights[i] = weight_gradient(g.flatten(0, 1), normed, norm, normed.flatten(0, 1))
    return torch.cat([part.flatten(1) for part in (*back, dv)], dim=1), weights[0], weights[1]


def for_tokens(table: Tensor, tokens: int) -> Tensor:
    """Return `cos` or `sin` for each token, `[T, 1, D]`."""
    return table.repeat(tokens // table.shape[0], 1).unsqueeze(1)
