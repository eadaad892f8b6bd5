"""Launches of a single token's product: its kernels are in `rows.py`.

    linear       project x; rows
    gated MLP    project x; rows of gate and up, to h; project h; rows of down

Nothing is projected where there is neither a norm nor an adapter.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from octavo.kernels.few_tokens.rows import project_kernel, whole_rows_kernel
from octavo.kernels.few_tokens.sides import FORMATS, GATED, Side
from octavo.kernels.gated.activations import ACTIVATIONS
from octavo.kernels.launch import Launches
from octavo.kernels.tuning import tuning_for
from octavo.numerics.norm import Norm


class Projected(NamedTuple):
    """The numbers of x, after its norm, and of the parts of all t, one below the other."""

    x: int
    t: int
    parts: int


def add_projection(
    launches: Launches, like: Tensor, x: int, side: Side, norm: Norm | None = None, norm_at: int | None = None
) -> Projected:
    """Add the launch before the rows. `x`: its number, of a tensor in the dtype and on the device of `like`."""
    k, ranks, tiles = side.weight.data.shape[1], sum(side.ranks), tuning_for(like.device).one_token
    if not ranks and norm is None:
        return Projected(x, x, 1)
    width = triton.next_power_of_2(k)
    if norm is None:
        width = min(width, tiles.projected)
    parts = -(-k // width)
    eps, shifted = (0.0, False) if norm is None else (float(norm.eps), norm.shifted)
    after = x if norm is None else launches.make((1, k), like.dtype)
    t = launches.make((parts, max(1, ranks)), torch.float32)
    constants = {
        "NORM": norm is not None, "SHIFTED": shifted, "K": k, "WIDTH": width, "PARTS": parts,
        "num_warps": min(16, max(4, width // tiles.project_elements)),
    }  # fmt: skip
    tensors = (x, x if norm_at is None else norm_at, after, *side.downs(), t)
    grid = (ranks * parts + (norm is not None),)
    launches.launch(project_kernel, grid, tensors, (eps,), constants | side.rank_constants)
    return Projected(after, t, parts)


def add_rows(
    launches: Launches, like: Tensor, before: Projected, side: Side, kind: str, *,
    activation: str | None = None, bias_at: int | None = None, residual_at: int | None = None,
) -> int:  # fmt: skip
    """Add the launch of a product, and return the number of y; or, with an activation, of h."""
    n, k = side.weight.data.shape
    tile, features = getattr(tuning_for(like.device).one_token, kind), n // 2 if kind == GATED else n
    y = launches.make((1, features), like.dtype)
    constants = {
        "FORMAT": FORMATS[side.weight.data.dtype], "MODE": side.mode.value,
        "ACTIVATION": None if activation is None else ACTIVATIONS[activation],
        "BIAS": bias_at is not None, "RESIDUAL": residual_at is not None, "K": k, "ROWS": tile.rows,
        "WIDTH": min(tile.width, triton.next_power_of_2(k)), "PARTS": before.parts, "STAGES": tile.stages,
        "num_warps": tile.warps,
    }  # fmt: skip
    beside = (y if bias_at is None else bias_at, y if residual_at is None else residual_at)
    tensors = (before.x, side.w, side.scale, before.t, *side.ups(), *beside, y)
    numbers = (n, side.stride, *side.spans)
    launches.launch(whole_rows_kernel, (-(-features // tile.rows),), tensors, numbers, constants | side.rank_constants)
    return y
