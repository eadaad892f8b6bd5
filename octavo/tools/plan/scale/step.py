"""Time of a step on N GPUs: units of computing and communication (`schedule.py`), then the optimiser.

Computing is FLOPs by the measured rate, forward and backward, and with checkpointing forward of layers once more. What
FP8 does to weights, however few the tokens, is 6 bytes an element: 3 to quantise rows for forward (read BF16, write
FP8), 3 for the columns of backward. Gathered in FP8 it is 3/N, as each rank quantises its shard, and 2 to transpose
what came as FP8.

An engine copies: gathered weights out of one buffer, gradients into another in the precision of the wire. DDP copies
gradients into buckets and back. FP8 reduce quantises instead, and reads what arrives to add it up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.tools.plan import persistent
from octavo.tools.plan.scale.assumptions import Assumptions
from octavo.tools.plan.scale.memory import shard_bytes
from octavo.tools.plan.scale.schedule import UnitTime, step_seconds
from octavo.tools.plan.scale.units import Unit, units_of
from octavo.tools.plan.scale.ways import Way
from octavo.tools.plan.scale.wire import REDUCE_BYTES, UnitWire, Wire, wire_of
from octavo.tools.shapes import Case

QUANTISE = 3  # bytes an element


@dataclass(frozen=True)
class Step:
    """Seconds of a step; `computing` includes the optimiser, and `communication` what runs beside computing."""

    seconds: float
    computing: float
    communication: float
    wire: Wire

    @property
    def waiting(self) -> float:
        """Seconds that communication adds: what is not hidden, and what it slows down."""
        return self.seconds - self.computing


def plan_step(case: Case, way: Way, strategy: str, gpus: int, assumed: Assumptions) -> Step:
    """Return the time of a step and what takes it."""
    units = units_of(case, way, strategy)
    wire = wire_of(case, way, strategy, gpus)
    times = [
        _unit_time(case, way, strategy, gpus, assumed, unit, sent) for unit, sent in zip(units, wire.units, strict=True)
    ]
    amax = assumed.ring_seconds(wire.amax, gpus)
    optimizer = _optimizer(case, way, strategy if gpus > 1 else "ddp", assumed) / (1 if strategy == "ddp" else gpus)
    seconds = step_seconds(times, assumed.slowdown) + amax + optimizer
    return Step(seconds, sum(t.forward + t.backward for t in times) + optimizer, _communication(times) + amax, wire)


def _communication(times: Sequence[UnitTime]) -> float:
    return sum(t.forward_gather + t.backward_gather + t.reduce for t in times)


def _unit_time(
    case: Case, way: Way, strategy: str, gpus: int, assumed: Assumptions, unit: Unit, sent: UnitWire
) -> UnitTime:
    forward, backward = (flops / assumed.flops(case, way.option) for flops in _flops(case, way, unit))
    if unit.name == "layer" and way.option.code == "fp8" and not case.frozen:
        more = _weights_apart(case, way, gpus, assumed)
        forward, backward = forward + more[0], backward + more[1]
    if gpus > 1:
        copies = _copies(case, way, strategy, unit)
        forward, backward = forward + copies[0] / assumed.copy_rate, backward + copies[1] / assumed.copy_rate
    return UnitTime(
        forward,
        backward,
        assumed.ring_seconds(sent.forward_gather, gpus),
        assumed.ring_seconds(sent.backward_gather, gpus),
        assumed.ring_seconds(sent.reduce, gpus) + assumed.exchange_seconds(sent.exchange, gpus),
    )


def _flops(case: Case, way: Way, unit: Unit) -> tuple[float, float]:
    """FLOPs of a unit, forward and backward. A tied head counts with the embedding, which is last in backward."""
    own = case.products - 2  # of backward, for each weight and token
    if unit.name != "layer":
        is_head = unit.name == "head" or persistent.is_tied(case)
        weights = persistent.vocabulary_parameters(case) * is_head * case.tokens
        return 2.0 * weights, float(own * weights)
    weights = persistent.layer_parameters(case) * case.tokens
    adapters = case.adapter_parameters * case.tokens / case.layers
    attention = case.attention_flops / case.layers
    forward = 2 * weights + 2 * adapters + attention / 3
    again = forward if way.option.checkpointing == "layers" else 0.0
    return forward, own * weights + 4 * adapters + attention * 2 / 3 + again


def _weights_apart(case: Case, way: Way, gpus: int, assumed: Assumptions) -> tuple[float, float]:
    """Seconds that a layer's weights take in FP8, beyond those that are in the rate already."""
    elements = persistent.layer_parameters(case)
    missing = 0.0 if assumed.at_tokens is None else 1 - case.tokens / assumed.at_tokens
    forward = backward = QUANTISE * missing
    if way.fp8_gather and gpus > 1:
        forward -= QUANTISE * (1 - 1 / gpus)
        backward -= QUANTISE - 2
    return forward * elements / assumed.quantise_rate, backward * elements / assumed.quantise_rate


def _copies(case: Case, way: Way, strategy: str, unit: Unit) -> tuple[int, int]:
    """Bytes that the engine reads and writes for a unit, in forward and in backward."""
    own = persistent.trained_bytes(case, way.option)
    reduced = own if way.reduce == "own" else REDUCE_BYTES[way.reduce]
    gradients = unit.trained * (own + reduced + (1 if way.reduce == "fp8" else 0))
    if strategy == "ddp":
        return 0, gradients + unit.trained * (own + reduced)
    weights = 2 * unit.gathered
    return weights, gradients + (0 if unit.stays else weights)


def _optimizer(case: Case, way: Way, strategy: str, assumed: Assumptions) -> float:
    """Seconds of all of AdamW: weights and states read and written, gradients read."""
    each = shard_bytes(case, way, strategy)
    return persistent.trained(case) * (2 * (each.weight + each.states) + each.gradient) / assumed.optimizer_rate
