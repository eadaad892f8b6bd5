"""Bytes that a rank sends in a step, by collective. N ranks, of which each has S bytes of what is gathered or reduced.

    all-gather       (N − 1) · S          of weights, in a ring
    reduce-scatter   (N − 1) · S          of gradients, in a ring, in FP32 or BF16 as FSDP2's `reduce_dtype` says
    all-to-all       (N − 1) · S          of gradients in FP8, which no ring can add up: E4M3, and an FP32 scale for 128
    all-reduce       2 (N − 1) / N · T    of a tensor of T bytes: gradients of DDP, amax

FP8 reduce of DDP is an all-to-all, and an all-gather of the sums in BF16. Amax: of four products a layer the states of
x, w and g, four numbers each (`octavo.share_amax`), and with FP8 gather maxima of the weights, in one all-reduce: one a
product, or one a block where blocks straddle shards. Where none does, scales of blocks travel beside the values.
"""

from dataclasses import dataclass
from itertools import accumulate

from octavo.numerics.quantize import BLOCK
from octavo.tools.plan import persistent
from octavo.tools.plan.layer import BF16, FP32
from octavo.tools.plan.scale.units import Unit, units_of
from octavo.tools.plan.scale.ways import Way
from octavo.tools.shapes import MEMBERS, Case

REDUCE_BYTES = {"fp32": FP32, "bf16": BF16, "fp8": 1}
SCALED = 128  # elements of a gradient that share a scale on the wire
AMAX_HEADER = 8  # numbers that tell whether all ranks reduce the same
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
    sent = [
        _replicated(way, unit, gpus, own) if strategy == "ddp" else _sharded(case, way, unit, gpus) for unit in units
    ]
    return Wire(tuple(sent), all_reduced(amax_bytes(case, way, gpus), gpus))


def all_reduced(size: float, gpus: int) -> float:
    return 2 * (gpus - 1) / gpus * size


def in_fp8(elements: int) -> int:
    """Bytes of so many elements of a gradient, in whole blocks with their scales."""
    return -(-elements // SCALED) * (SCALED + FP32)


def _sharded(case: Case, way: Way, unit: Unit, gpus: int) -> UnitWire:
    others = gpus - 1
    scales = _scales_of_shard(case, way, gpus) if unit.name == "layer" else 0
    gather = float(others * (unit.gathered_from_rank(gpus) + scales))
    elements = unit.reduced_to_rank(gpus)
    again = 0.0 if unit.stays else gather
    if way.reduce == "fp8":
        return UnitWire(gather, again, 0.0, others * in_fp8(elements))
    return UnitWire(gather, again, others * elements * REDUCE_BYTES[way.reduce], 0.0)


def _replicated(way: Way, unit: Unit, gpus: int, own: int) -> UnitWire:
    """Return the bytes of DDP, whose gradients have `own` bytes an element."""
    if way.reduce == "fp8":
        part = -(-unit.trained // gpus)
        return UnitWire(0.0, 0.0, (gpus - 1) * part * BF16, (gpus - 1) * in_fp8(part))
    return UnitWire(0.0, 0.0, all_reduced(unit.trained * own, gpus), 0.0)


def amax_bytes(case: Case, way: Way, gpus: int) -> int:
    """Bytes of what all ranks take the maximum of, once a step."""
    if way.option.code != "fp8" or case.frozen:
        return 0
    numbers = len(MEMBERS) * AMAX_NUMBERS
    if way.fp8_gather:
        numbers += sum(_maxima(product, way, gpus) for product in _products(case))
    return (AMAX_HEADER + case.layers * numbers) * FP32


def _products(case: Case) -> list[list[tuple[int, int]]]:
    """Outputs and inputs of the weights of each product of a layer."""
    matrices = iter(persistent.layer_matrices(case))
    return [[next(matrices) for _ in members] for members in MEMBERS.values()]


def _maxima(product: list[tuple[int, int]], way: Way, gpus: int) -> int:
    """Numbers that ranks have to agree on to quantise the weights of a product."""
    if way.option.recipe != "block":
        return 1
    inputs = product[0][1]
    return 0 if _is_local(product, gpus) else -(-sum(n for n, _ in product) // BLOCK) * -(-inputs // BLOCK)


def _is_local(product: list[tuple[int, int]], gpus: int) -> bool:
    """Whether no block straddles two shards, or two weights."""
    starts = accumulate((n for n, _ in product[:-1]), initial=0)
    return not any(start % BLOCK for start in starts) and not any(-(-n // gpus) % BLOCK for n, _ in product)


def _scales_of_shard(case: Case, way: Way, gpus: int) -> int:
    """Bytes of block scales that a rank gives to each other one with the weights of a layer."""
    if not (way.fp8_gather and way.option.recipe == "block"):
        return 0
    local = [matrix for product in _products(case) if _is_local(product, gpus) for matrix in product]
    return FP32 * sum(-(-n // gpus) // BLOCK * -(-k // BLOCK) for n, k in local)
