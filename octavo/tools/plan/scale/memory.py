"""Memory of a rank: the plan of one GPU (`octavo/tools/plan/memory.py`), divided by the strategy.

    ddp           all of it, and buckets, which are a second copy of all gradients (`gradient_as_bucket_view=True`
                  saves them)
    fsdp2, zero3  of weights, gradients and states 1/N. On top, at each moment: units that are gathered (the one that
                  runs and the next, and the root of FSDP2), and the gradient that is being reduced, in the precision
                  on the wire; the head's and the embedding's own gradients are whole while they are computed
    fsdp2         trained weights and their gradients are in FP32 in shards, and have no lower halves: masters of BF16
                  shards are refused, and FP32 shards are gathered in BF16 (`MixedPrecisionPolicy`)
    zero3         also FP32 master weights, instead of lower halves

Activations and buffers are those of one GPU. Frozen weights are gathered like others. On one GPU nothing is added.
"""

from dataclasses import replace
from typing import NamedTuple

from octavo.tools.plan import persistent
from octavo.tools.plan.layer import FP32
from octavo.tools.plan.memory import plan_memory
from octavo.tools.plan.scale.units import Unit, units_of
from octavo.tools.plan.scale.ways import Way
from octavo.tools.plan.scale.wire import REDUCE_BYTES
from octavo.tools.plan.timeline import Memory, Moment
from octavo.tools.shapes import Case


def rank_memory(case: Case, way: Way, strategy: str, gpus: int) -> Memory:
    """Return the memory that a step takes on each of so many GPUs."""
    memory = plan_memory(case, way.option)
    if gpus == 1:
        return memory
    if strategy == "ddp":
        buckets = persistent.gradients(case, way.option)
        return replace(memory, moments=tuple(replace(m, buffers=m.buffers + buckets) for m in memory.moments))
    return replace(memory, moments=tuple(_sharded(case, way, strategy, gpus, moment) for moment in memory.moments))


def _sharded(case: Case, way: Way, strategy: str, gpus: int, moment: Moment) -> Moment:
    units = units_of(case, way, strategy)
    root, layer, head = units[0], units[1], units[-1]
    is_tied = head is layer
    kept = root.gathered if root.stays or is_tied else 0
    of_head = 0 if is_tied else head.gathered
    next_layer = layer.gathered if case.layers > 1 else 0
    # Gathered; the unit whose gradient is whole; the one whose gradient is on the wire. A tied head's is the root's.
    gathered, whole, reducing = {
        "head": (kept + of_head + layer.gathered, head, None),
        "last layer": (kept + layer.gathered + next_layer, None, head),
        "first layer": (kept + layer.gathered, None, layer),
        "embedding": (root.gathered, root, root),
    }[moment.name]
    if is_tied:
        whole, reducing = root, None if moment.name == "last layer" else reducing
    own = 0 if whole is None else min(moment.gradients, _own_gradient(case, way, whole))
    on_the_wire = 0 if reducing is None else _on_the_wire(case, way, reducing)
    shard, one = shard_bytes(case, way, strategy), shard_bytes(case, way, "ddp")
    trained = persistent.trained(case)
    of_shards = (moment.gradients - own) * shard.gradient // one.gradient
    return replace(
        moment,
        weights=_divided(moment.weights + trained * (shard.weight - one.weight), gpus) + gathered,
        gradients=own + _divided(of_shards, gpus) + on_the_wire,
        states=_divided(moment.states + round(trained * (shard.states - one.states)), gpus),
    )


class Bytes(NamedTuple):
    """Bytes per trained parameter."""

    weight: int
    states: float
    gradient: int


def shard_bytes(case: Case, way: Way, strategy: str) -> Bytes:
    """Return what a strategy has of a trained parameter between steps; of `ddp`, what one GPU has."""
    own, states = persistent.trained_bytes(case, way.option), sum(persistent.state_bytes(case, way.option))
    if strategy == "ddp" or not way.option.masters:
        return Bytes(own, states, own)
    states -= persistent.LOW_HALF
    return Bytes(FP32, states, FP32) if strategy == "fsdp2" else Bytes(own, states + FP32, own)


def _divided(size: int, gpus: int) -> int:
    return -(-size // gpus)


def _own_gradient(case: Case, way: Way, unit: Unit) -> int:
    return unit.trained * persistent.trained_bytes(case, way.option)


def _on_the_wire(case: Case, way: Way, unit: Unit) -> int:
    """Bytes of a gradient that is being reduced: what is sent, and for FP8 what arrives, too."""
    size = persistent.trained_bytes(case, way.option) if way.reduce == "own" else REDUCE_BYTES[way.reduce]
    return unit.trained * size * (2 if way.reduce == "fp8" else 1)
