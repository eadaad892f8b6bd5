"""FP8 values of sharded weights: every rank quantises its rows, by scales that hold for the whole product.

A product's weights `[Nᵢ, K]`, one below the other, are one operand `[N, K]`; FSDP2 gives each rank some rows of each
weight. A scale belongs to a group of `height × width` elements of `[N, K]`, by granularity and by what reads it:

| granularity | forward  | backward | what all ranks have to agree on                                     |
| ----------- | -------- | -------- | ------------------------------------------------------------------- |
| tensor      | N × K    | the same | one amax a product                                                  |
| block       | 128 × 128 | the same | one amax a block, where blocks straddle shards or weights          |
| channel     | 1 × K    | N × 1    | for backward, one amax a column                                     |
| mx          | 1 × 32   | 32 × 1   | for backward, one amax a group, where groups straddle               |

What ranks agree on is measured after each optimiser step and takes part in the all-reduce of `amax.py`, so every rank
knows all those scales and sends FP8 values alone. All other groups lie within one shard: their scales are found while
it is quantised, and travel beside the values. Either way values and scales are those of the whole weight, to the bit.

`tensor`: the amax is recorded in the weight's scaling state, and with delayed scaling the scale follows from state and
amax by the rules of `numerics/scaling.py`, as it does where the weight is whole. That happens at the first gather after
a step, which is a use of the coming step. Within `optimizer.step()` it would be a use that the step of a second
optimiser rolls.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octavo.numerics import OperandRecipe, Quantized
from octavo.numerics.amax import block_amax
from octavo.numerics.quantize import mx_scale, scale_from_amax, scale_of_rows
from octavo.numerics.scaling import AMAX, RESCALED, SCALE, SEEN, holds, new_states
from octavo.ops.quantize import matrix_amax, quantize_by_groups, quantize_group, transpose_bytes

ALIGNED = 4  # numbers: cuBLAS takes scales that begin at a multiple of 16 bytes
LAYOUTS = {"tensor": ("rows",), "block": ("rows",), "channel": ("rows", "columns"), "mx": ("rows", "columns")}


@dataclass(frozen=True)
class Group:
    """The elements of `[N, K]` that share a scale; None stands for all there are."""

    height: int | None
    width: int | None

    def counts(self, rows: int, columns: int) -> tuple[int, int]:
        """How many groups there are, down and across."""
        return (1 if self.height is None else -(-rows // self.height)), (
            1 if self.width is None else -(-columns // self.width)
        )


def group_of(recipe: OperandRecipe, layout: str) -> Group:
    if recipe.granularity == "tensor":
        return Group(None, None)
    if recipe.granularity == "block":
        return Group(*recipe.block)
    width = None if recipe.granularity == "channel" else 32
    return Group(1, width) if layout == "rows" else Group(width, 1)


class Shard:
    """The rows of one weight that a rank holds. `start`: where the weight begins among the rows of the product."""

    def __init__(self, rows: int, chunk: int, first: int, start: int) -> None:
        self.rows = rows  # of the whole weight
        self.chunk = chunk  # of every shard, with padding
        self.first = start + first  # this shard's first row in the product
        self.start = start


class Product:
    """Weights that are one operand, and the scales that all ranks know."""

    def __init__(self, recipe: OperandRecipe, state: Tensor, columns: int, shards: Sequence[Shard], world: int) -> None:
        self.given = recipe
        self.recipe = replace(recipe, delayed=False)
        self.state = state
        self.shards = list(shards)
        self.rows, self.columns = sum(shard.rows for shard in shards), columns
        self.layouts = LAYOUTS[recipe.granularity]
        self.groups = {layout: group_of(recipe, layout) for layout in self.layouts}
        self.shared = [layout for layout in self.layouts if not self._is_local(self.groups[layout].height, world)]
        self.scales: dict[str, Tensor] = {}  # of the shared layouts; `ProductScales` fills them
        self._unused = new_states(device=state.device)

    def _is_local(self, height: int | None, world: int) -> bool:
        """Whether no group straddles two shards, or two weights."""
        if height is None or height == 1:
            return height == 1
        begins = all(shard.start % height == 0 for shard in self.shards)
        return begins and (world == 1 or all(shard.chunk % height == 0 for shard in self.shards))

    def measure(self, layout: str, shard: Shard, x: Tensor, out: Tensor) -> None:
        """Raise the maxima `[down, across]` of a shared layout to those of this shard."""
        if not x.shape[0]:
            return
        group = self.groups[layout]
        if group.height is None:
            found, at = matrix_amax(x, by_column=group.width == 1).view(1, -1), 0
        else:
            assert group.width is not None
            above = shard.first % group.height
            found = block_amax(torch.nn.functional.pad(x, (0, 0, above, 0)), (group.height, group.width))
            at = shard.first // group.height
        into = out[at : at + found.shape[0]]
        torch.maximum(into, found, out=into)

    def quantize(self, layout: str, shard: Shard, x: Tensor) -> Quantized:
        """Return the FP8 values of a shard `[n, K]`, and their scales if they are those of this shard alone."""
        recipe = self.recipe
        if layout in self.shared:
            scale = self.scales[layout]
            if not x.shape[0]:
                return Quantized(x.new_empty(x.shape, dtype=recipe.format.dtype), scale)
            if recipe.granularity == "tensor":
                return quantize_group([x], self._unused, recipe, False, "rows", scale=scale)[0]
            group = self.groups[layout]
            how: dict[str, Any] = {"first": shard.first, "height": group.height, "width": group.width}
            return Quantized(quantize_by_groups(x, scale, recipe, **how), scale)
        if not x.shape[0]:
            down, across = self.groups[layout].counts(0, self.columns)
            scale = torch.empty(down, across, dtype=torch.uint8 if recipe.granularity == "mx" else torch.float32)
            return Quantized(x.new_empty(x.shape, dtype=recipe.format.dtype), scale.to(x.device))
        data, scale = quantize_group([x], self._unused, recipe, False, layout)[0]
        if layout == "columns":  # [K, n] and [K, n/32]: as the weight lies, so that ranks' rows follow one another
            data, scale = transpose_bytes(data), transpose_bytes(scale)
        return Quantized(data, scale)

    def dequantize(self, layout: str, shard: Shard, quantized: Quantized, dtype: torch.dtype) -> Tensor:
        """Return the values of a whole weight."""
        data, scale = quantized
        if layout in self.shared and scale.dim():
            group = self.groups[layout]
            scale = scale_of_rows(scale, data.shape, first=shard.start, height=group.height, width=group.width)
        return Quantized(data, scale).dequantize(dtype)

    def scale_of(self, layout: str, shard: Shard) -> Tensor:
        """Return the shared scale as one weight of several takes it."""
        scale, height = self.scales[layout], self.groups[layout].height
        if height is None or len(self.shards) == 1:
            return scale
        if shard.start % height:
            raise RuntimeError(
                f"a weight of {shard.rows} rows is multiplied alone, but was gathered in FP8 as a part of {self.rows} "
                f"rows, from row {shard.start} on, with a scale for {height} of them: remove the hooks that keep its "
                "product from being one, or call remove() on what octavo.fp8_all_gather returned"
            )
        return scale[shard.start // height : -(-(shard.start + shard.rows) // height)]


class ProductScales:
    """The scales that all ranks know, of all products of one recipe: a `Source` of the exchange in `amax.py`."""

    def __init__(self, products: Sequence[tuple[Product, Sequence[Any]]]) -> None:
        """`products`: with shared layouts, each with its weights, which have a `shard` and their rows in `local()`."""
        self.recipe = products[0][0].given
        self.products = list(products)
        self._parts = [
            (product, members, layout, product.groups[layout].counts(product.rows, product.columns))
            for product, members in self.products
            for layout in product.shared
        ]
        sizes = [down * across for *_, (down, across) in self._parts]
        device = products[0][0].state.device
        self._maxima = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        is_mx = self.recipe.granularity == "mx"
        self._scales = torch.zeros(sum(sizes), dtype=torch.uint8 if is_mx else torch.float32, device=device)
        if self.recipe.granularity == "tensor":
            self._scales = torch.zeros(len(sizes), ALIGNED, dtype=torch.float32, device=device)[:, 0]
        flat = self._scales.view(torch.float8_e8m0fnu) if is_mx else self._scales
        for (product, _, layout, counts), part in zip(self._parts, flat.split(sizes), strict=True):
            product.scales[layout] = part.view(()) if self.recipe.granularity == "tensor" else part.view(counts)
        self._sizes = sizes
        # Scales of whole weights, which the next gather computes; the first in training records them, too.
        self._is_computed = self._is_recorded = True

    @property
    def label(self) -> str:
        return f"weights in {self.recipe.encode()}: {self._sizes}"

    @torch.no_grad()
    def measure(self) -> Tensor:
        """Return the maxima of this rank's shards."""
        self._maxima.zero_()
        for (product, members, layout, counts), part in zip(self._parts, self._maxima.split(self._sizes), strict=True):
            for member in members:
                product.measure(layout, member.shard, member.local(), part.view(counts))
        return self._maxima

    def take(self, maxima: Tensor) -> None:
        self._maxima.copy_(maxima)

    @torch.no_grad()
    def settle(self) -> None:
        """Compute the scales of groups; leave those of whole weights to the next gather."""
        recipe, maxima = self.recipe, self._maxima
        self._is_computed = self._is_recorded = recipe.granularity != "tensor"
        if recipe.granularity == "mx":
            self._scales.copy_(mx_scale(maxima, recipe.format, recipe.mx_rule, recipe.margin).view(torch.uint8))
        elif self._is_computed:
            self._scales.copy_(scale_from_amax(maxima, recipe.format, recipe.margin))

    @torch.no_grad()
    def use(self, *, records: bool) -> None:
        """Compute the scales of whole weights at the first gather after a step; `records`: and record their amax."""
        if self._is_recorded or (self._is_computed and not records):
            return
        self._is_computed, self._is_recorded = True, records
        self._scales.copy_(self._scale_by(self._maxima, records=records))

    def _scale_by(self, amax: Tensor, *, records: bool) -> Tensor:
        """Do for all products at once what `numerics.operand.quantize_operand` does for one."""
        recipe = self.recipe
        mine = [product.state for product, _ in self.products]
        states = torch.stack(mine)
        in_force, most = states[:, SCALE].clone(), torch.maximum(states[:, AMAX], amax)
        scale = scale_from_amax(most if recipe.delayed else amax, recipe.format, recipe.margin)
        if recipe.delayed:
            scale = torch.where(holds(in_force, most, recipe.format, recipe.margin), in_force, scale)
            states[:, RESCALED] += (in_force > 0) & (scale != in_force)
        states[:, AMAX] = most
        states[:, SEEN] += 1
        states[:, SCALE] = torch.where(amax > 0, scale, in_force)
        if records:
            torch._foreach_copy_(mine, list(states.unbind()))
        return scale
