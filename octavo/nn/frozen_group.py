"""Frozen linears with one input as one product: q, k and v, or gate and up, each still a module with its own weight.

The weights of a group lie side by side in one buffer, and each module's own is a slice of it, so the group needs no
copy. A move to another device parts them: the product is then computed from a copy, until they are put together again.
"""

from collections.abc import Sequence

import torch

from octavo.nn.frozen import SCALE_NAME, FP8FrozenLinear, FrozenTensor
from octavo.numerics.quantize import BLOCK
from octavo.ops.weight import are_neighbours


def why_no_group(members: Sequence[FP8FrozenLinear]) -> str:
    """Why these cannot be one product; empty if they can."""
    if len({member.in_fp8 for member in members}) > 1:
        return "only some of their products are in FP8"
    if len({member.bias is None for member in members}) > 1:
        return "only some of them have a bias"
    return why_not_together(members) if members[0].in_fp8 else ""


def why_not_together(members: Sequence[FP8FrozenLinear]) -> str:
    """Why their weights and scales cannot be those of one weight; empty if they can."""
    first = members[0]
    if len({member.granularity for member in members}) > 1 or len({member.format for member in members}) > 1:
        return "their weights are quantised differently"
    if first.granularity == "tensor":
        return "each has a scale of its own for the whole tensor"
    if first.granularity == "block" and any(member.out_features % BLOCK for member in members):
        return f"a block of {BLOCK} rows would straddle two of them"
    return ""


def put_together(members: Sequence[FP8FrozenLinear]) -> None:
    """Let the weights of these, and their scales, lie side by side, if they can be one."""
    if why_not_together(members):
        return
    for name in ("weight", SCALE_NAME):
        parts = [getattr(member, name).data for member in members]
        if not are_neighbours(parts):
            slices = torch.cat(parts).split([part.shape[0] for part in parts])
            for member, part in zip(members, slices, strict=True):
                setattr(member, name, FrozenTensor(part))
