"""Bytes that a rank sends in a step, by collective. N ranks, of which each has S bytes of what is gathered or reduced.

    all-gather       (N − 1) · S          of weights, in a ring
    reduce-scatter   (N − 1) · S          of gradients, in a ring
    all-to-all       (N − 1) · S          of gradients in FP8, which no ring can add up: E4M3, and an FP32 scale for 128
    all-reduce       2 (N − 1) / N · T    of a tensor of T bytes: gradients of DDP, amax

FP8 reduce of DDP is an all-to-all, and an all-gather of the sums, in FP8 as well. Amax: of four products a layer the
states of x, w and g, four numbers each (`octavo.share_amax`), and with FP8 gather the maxima of the weights, for each
tensor or block, in one all-reduce.
"""

from dataclasses import dataclass

from octavo.numerics.quantize import BLOCK
from octavo.tools.plan import persistent
from octavo.tools.plan.layer import BF16, FP32
from octavo.tools.plan.scale.units import Unit, units_of
from octavo.tools.plan.scale.ways import Way
from octavo.tools.shapes import MEMBERS, Case

REDUCE_BYTES = {"fp32": FP32, "bf16": BF16, "fp8": 1}
SCALED = 128  # elements of a gradient that share a scale on the wire
AMAX_NUMBERS = 3 * 4  # of a product: x, w and g; scale, amax, uses, non-finite


@dataclass(frozen=True)
class UnitWire:
    """Bytes that a rank sends for one unit. `reduce` and `exchange`: in rings, and as an all-to-all."""

    forward_gather: float
    backward_gather: float
    reduce: float
    exchange: float


@dataclass(frozen=True)
class Wire:
    """Bytes that a rank sends in a step."""

    units: tuple[UnitWire, ...]
    amax: float

    @property
    def gather(self) -> float:
        return sum(unit.forward_gather + unit.backward_gather for unit in self.units)

    @property
    def reduce(self) -> float:
        return sum(unit.reduce + unit.exchange for unit in self.units)

    @property
    def total(self) -> float:
        return self.gather + self.reduce + self.amax


def wire_of(case: Case, way: Way, strategy: str, gpus: int) -> Wire:
    """Return the bytes of a step. With one GPU there are none."""
    units = units_of(case, way, strategy)
    own = persistent.trained_bytes(case, way.option)
    sent = [_replicated(way, unit, gpus, own) if strategy == "ddp" else _sharded(way, unit, gpus) for unit in units]
    return Wire(tuple(sent), all_reduced(amax_bytes(case, way), gpus))


def all_reduced(size: float, gpus: int) -> float:
    return 2 * (gpus - 1) / gpus * size


def in_fp8(elements: int) -> int:
    """Bytes of so many elements of a gradient, with their scales."""
    return elements + FP32 * -(-elements // SCALED)


def _sharded(way: Way, unit: Unit, gpus: int) -> UnitWire:
    others = gpus - 1
    gather = float(others * unit.gathered_from_rank(gpus))
    elements = unit.reduced_to_rank(gpus)
    again = 0.0 if unit.stays else gather
    if way.reduce == "fp8":
        return UnitWire(gather, again, 0.0, others * in_fp8(elements))
    return UnitWire(gather, again, others * elements * REDUCE_BYTES[way.reduce], 0.0)


def _replicated(way: Way, unit: Unit, gpus: int, own: int) -> UnitWire:
    """Return the bytes of DDP, whose gradients have `own` bytes an element."""
    if way.reduce == "fp8":
        part = in_fp8(-(-unit.trained // gpus))
        return UnitWire(0.0, 0.0, (gpus - 1) * part, (gpus - 1) * part)
    return UnitWire(0.0, 0.0, all_reduced(unit.trained * own, gpus), 0.0)


def amax_bytes(case: Case, way: Way) -> int:
    """Bytes of what all ranks take the maximum of, once a step."""
    if way.option.code != "fp8" or case.frozen:
        return 0
    states = case.layers * len(MEMBERS) * AMAX_NUMBERS * FP32
    return states + (case.layers * _weight_maxima(case, way) * FP32 if way.fp8_gather else 0)


def _weight_maxima(case: Case, way: Way) -> int:
    if way.option.recipe == "block":
        return sum(-(-n // BLOCK) * -(-k // BLOCK) for n, k in persistent.layer_matrices(case))
    return len(MEMBERS)  # q, k and v, and gate and up, share one scale
