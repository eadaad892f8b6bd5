"""Weights that arrive in FP8: what a sharded weight is between its all-gather and its resharding (`dist/gather.py`).

A `GatheredWeight` has the shape, dtype and device of the weight, and no memory of its own: its `source` has one byte an
element with scales. Linears take those as they take a weight that is FP8-only, and give the gradient to it. In backward
the weight may have been gathered anew, and then perhaps quantised along the other dimension, so autograd functions do
not save FP8 values: they ask the source again.

Everything else that reads such a weight gets what it dequantises to.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.ops.weight import Weight
from octavo.tracing import constant_when_traced


class Source(Protocol):
    """The FP8 values of one weight."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def together(self, weights: Sequence[Any], use: str) -> Weight:
        """Return these weights, this one first, as one right operand. `use`: "forward" or "backward"."""

    def dequantized(self) -> Tensor:
        """Return the values, in `dtype`."""


class GatheredWeight(Tensor):
    """A weight whose values are in FP8, elsewhere."""

    source: Source

    @staticmethod
    def __new__(cls, source: Source) -> "GatheredWeight":
        made: GatheredWeight = torch.Tensor._make_wrapper_subclass(
            cls, source.shape, dtype=source.dtype, device=source.device
        )
        made.source = source
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        aten = torch.ops.aten
        same = func in (aten.detach.default, aten.alias.default)
        if func is aten.as_strided.default:
            weight, size, stride = args[:3]
            same = tuple(size) == tuple(weight.shape) and tuple(stride) == weight.stride() and not any(args[3:])
        if same:
            return cls(args[0].source)

        if func._schema.is_mutable:
            raise RuntimeError(
                f"{func} on a weight that was gathered in FP8: its values are those of its shards. Write to the "
                "sharded parameter between steps, or call remove() on what octavo.fp8_all_gather returned"
            )

        def values(value: Any) -> Any:
            return value.source.dequantized() if isinstance(value, cls) else value

        flat, tree = torch.utils._pytree.tree_flatten((args, kwargs or {}))
        new_args, new_kwargs = torch.utils._pytree.tree_unflatten([values(each) for each in flat], tree)
        return func(*new_args, **new_kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype}, {self.device})"


def is_gathered(weights: Sequence[Tensor]) -> bool:
    return len(weights) > 0 and isinstance(weights[0], GatheredWeight)  # torch 2.11 cannot trace `bool` of a tuple


@constant_when_traced
def refuse_to_compile() -> None:
    """Raise: compiled code would lose the gradient of a gathered weight."""
    raise RuntimeError(
        "torch.compile does not know weights that arrive in FP8: leave out torch.compile or octavo.fp8_all_gather"
    )


def gathered_again(weights: Sequence[Any]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the FP8 values of these weights as `dx = g · w` reads them, and their scales."""
    weight = weights[0].source.together(weights, "backward")
    return weight.parts, weight.scales
