"""A product as both families of few-token kernels take it: its weight and adapters, as numbers of tensors."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl

from octavo.kernels.few_tokens.tiles import BLOCKS, CHANNEL, TENSOR
from octavo.numerics import Quantized
from octavo.numerics.few_tokens import Low

MOST_ADAPTERS = 3
FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
# Kinds of products, each with tiles of its own: any, of gate and up to h, and of h.
PRODUCT, GATED, DOWN = "products", "gated", "down"


class Side(NamedTuple):
    """One product: the numbers of its tensors among those of the launches, and what is known of them."""

    weight: Quantized
    w: int
    scale: int
    adapters: Sequence[Low]
    matrices: int  # the first of all A, then all B

    @property
    def ranks(self) -> list[int]:
        return [low.down.shape[0] for low in self.adapters]

    def downs(self) -> list[int]:
        return self._three(self.matrices)

    def ups(self) -> list[int]:
        return self._three(self.matrices + len(self.adapters))

    def _three(self, first: int) -> list[int]:
        """Three numbers: those of the adapters there are, and again the first."""
        count = len(self.adapters)
        return [first + (i if i < count else 0) if count else self.w for i in range(MOST_ADAPTERS)]

    @property
    def rank_constants(self) -> dict[str, int]:
        ranks = self.ranks + [0] * (MOST_ADAPTERS - len(self.adapters))
        return {f"RANK{i}": rank for i, rank in enumerate(ranks)}

    @property
    def spans(self) -> tuple[float, ...]:
        every = [(low.first, low.last - low.first, low.scaling) for low in self.adapters]
        firsts, sizes, scalings = zip(*every, *[(0, 0, 1.0)] * (MOST_ADAPTERS - len(every)), strict=True)
        return (*firsts, *sizes, *map(float, scalings))

    @property
    def mode(self) -> Any:
        """How the weight is scaled, as a constant of kernels."""
        scale = self.weight.scale
        return TENSOR if scale.dim() == 0 else CHANNEL if scale.shape == (len(self.weight.data), 1) else BLOCKS

    @property
    def stride(self) -> int:
        """From a row of blocks' scales to the next."""
        return self.weight.scale.shape[1] if self.mode is BLOCKS else 0
