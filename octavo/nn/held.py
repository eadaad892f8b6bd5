"""Trained weights that are quantised once and held in FP8, while nothing trains: for the length of a rollout.

A trained linear quantises its weight in every call. A decoder that generates calls it for every token, with a weight
that does not change meanwhile. Inside `holding`, the FP8 values are those that the trainer's own forward would compute,
by the same function from the same Parameters, and products take them as they take a frozen weight:

    wq = quantise(w)  once;        y = x · wqᵀ  many times

The buffers stay where they are from one rollout to the next (`refresh` writes new values into them), so that a CUDA
graph that reads them remains valid. `release` frees them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from octavo.numerics import Quantized
from octavo.numerics.config import OperandRecipe
from octavo.ops.quantize import quantize_group
from octavo.ops.weight import Weight, joined


class HeldWeights:
    """FP8 copies of trained weights, made at their first use, by the linears of a product."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], tuple[Sequence[Any], Quantized]] = {}

    def weight(self, members: Sequence[Any]) -> Weight:
        """Return the weights of these `FP8Linear`s, one below the other, as one stored weight."""
        key = (members[0].recipe.w, *map(id, members))
        if key not in self._copies:
            with torch.inference_mode(False):  # vLLM computes in it, and what is made there cannot be refreshed
                self._copies[key] = (members, _quantized(members))
        data, scale = self._copies[key][1]
        return Weight([data], [scale])

    def refresh(self) -> None:
        """Quantise again what the weights are now, into the same memory; forget copies of linears that have changed."""
        self._copies = {key: each for key, each in self._copies.items() if _is_still(key[0], each[0])}
        for members, copy in self._copies.values():
            data, scale = _quantized(members)
            if data.data_ptr() != copy.data.data_ptr():  # else it is an FP8-only weight itself
                copy.data.view(torch.uint8).copy_(data.view(torch.uint8))
                copy.scale.copy_(scale)

    def release(self) -> None:
        """Free the copies."""
        self._copies.clear()

    @property
    def nbytes(self) -> int:
        return sum(copy.data.nbytes + copy.scale.nbytes for _, copy in self._copies.values())


def _is_still(recipe: OperandRecipe, members: Sequence[Any]) -> bool:
    """Whether all of these are linears in FP8, with this recipe of weights: `restore` may have given them back."""
    return all(hasattr(member, "fp8_only") and member.recipe.w == recipe for member in members)


def _quantized(members: Sequence[Any]) -> Quantized:
    """Quantise the weights as one operand, as the trainer does; FP8-only ones are returned as they are."""
    first = members[0]
    if first.fp8_only is not None:
        parts: list[Tensor] = [member.fp8_only.data for member in members]
        return Quantized(joined(parts), first.fp8_only.group_scale if len(members) > 1 else first.fp8_only.scale)
    weights = [member.weight.detach() for member in members]
    return quantize_group(weights, first.state_w, first.recipe.w, False, "rows")[0]


_CURRENT: ContextVar[HeldWeights | None] = ContextVar("octavo_held", default=None)


def current() -> HeldWeights | None:
    """Return the weights that are held at the moment; None outside `holding`."""
    return None if torch.compiler.is_compiling() else _CURRENT.get()  # Dynamo cannot read the variable


@contextmanager
def holding(weights: HeldWeights) -> Iterator[None]:
    """Have trained linears take their weights from these copies. Gradients do not reach the Parameters meanwhile."""
    token = _CURRENT.set(weights)
    try:
        yield
    finally:
        _CURRENT.reset(token)
