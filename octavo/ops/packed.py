"""An input as it travels between ranks: each row is its FP8 bytes, and then the bytes of its scales.

    row of K elements     K bytes, then ⌈K/128⌉ × 4 (block), ⌈K/32⌉ (mx), or 4 (channel; tensor, the same in each row)

One message has all of it, whole rows can be put in any order, and an operator takes it in the place of x: a matrix of
bytes is never an input otherwise.
"""

import torch
from torch import Tensor

from octavo.numerics import OperandRecipe, Quantized
from octavo.numerics.quantize import packed_scale_dtype
from octavo.ops.quantize import pack_scale, unpack_scale


def pack_rows(x: Quantized) -> Tensor:
    """Return the rows `[M, K]` of x with their scales, as bytes."""
    scale = pack_scale(x.scale)
    scale = scale.expand(x.data.shape[0], 1) if scale.dim() == 0 else scale
    return torch.cat([x.data.view(torch.uint8), scale.contiguous().view(torch.uint8)], dim=1)


def is_packed(x: Tensor) -> bool:
    return x.dtype == torch.uint8


def unpack_rows(rows: Tensor, columns: int, recipe: OperandRecipe) -> Quantized:
    """Undo `pack_rows` for rows of that many elements."""
    data = rows[:, :columns].contiguous().view(recipe.format.dtype)
    scale = rows[:, columns:].contiguous().view(packed_scale_dtype(recipe.granularity))
    return Quantized(data, scale[0, 0].clone() if recipe.granularity == "tensor" else unpack_scale(scale))
