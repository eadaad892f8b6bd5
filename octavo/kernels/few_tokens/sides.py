"""What all launches of few-token products need: tensors by their numbers, kinds of products, parts of their columns."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from octavo.kernels.tuning import FewTokenTiles, tuning_for
from octavo.numerics.few_tokens import Low
from octavo.numerics.norm import Norm
from octavo.numerics.quantize import Quantized

MOST_ADAPTERS = 3
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


def tuning_of(x: Tensor) -> FewTokenTiles:
    return tuning_for(x.device).few_tokens


def matrices_of(adapters: Sequence[Low]) -> list[Tensor]:
    """All A, then all B."""
    return [each.contiguous() for each in (*(low.down for low in adapters), *(low.up for low in adapters))]


def places_of(adapters: Sequence[Low]) -> tuple[tuple[int, int, float], ...]:
    return tuple((low.first, low.last, low.scaling) for low in adapters)


def weight_of(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight.contiguous()


def norm_key(norm: Norm | None) -> tuple[float, bool] | None:
    return None if norm is None else (norm.eps, norm.shifted)


def some(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors if tensor is not None]


def parts_of(tiles: int, steps: int, tokens: int, slots: int, tuning: FewTokenTiles) -> int:
    """How many programs share the columns of each tile of outputs, for the least time: rounds of programs, and sums."""

    def cost(parts: int) -> float:
        rounds = -(-tiles * parts // slots)
        return rounds * (-(-steps // parts) + tuning.start) + (parts > 1) * parts * tuning.part * tokens / 64

    return min(range(1, min(steps, tuning.most_parts) + 1), key=cost)
