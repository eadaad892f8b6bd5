"""A step as two queues beside each other, what a GPU computes and what it sends, unit by unit.

    forward    gather(u) → compute(u); the gather of the next unit runs beside it, not earlier
    backward   gather(u) → compute(u) → reduce(u); the gather of the unit before runs beside it, and then the reduce

So at most two units are gathered at once, as in FSDP2. Each queue runs one thing at a time, in the order of the list.
While both run, each is slower by the share `slowdown`. A unit without a gather or a reduce has one of no time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Key = tuple[str, int]


@dataclass(frozen=True)
class UnitTime:
    """Seconds of one unit: computing in both directions, gathers before them, reduce after backward."""

    forward: float
    backward: float
    forward_gather: float = 0.0
    backward_gather: float = 0.0
    reduce: float = 0.0


@dataclass(frozen=True)
class _Task:
    key: Key
    seconds: float
    after: Key | None


def step_seconds(units: Sequence[UnitTime], slowdown: float) -> float:
    """Return the time of forward and backward."""
    queues = (_computed(units), _sent(units))
    place = [0, 0]
    left = [queue[0].seconds for queue in queues]
    done: set[Key] = set()
    now = 0.0
    while any(at < len(queue) for at, queue in zip(place, queues, strict=True)):
        running = [i for i in (0, 1) if place[i] < len(queues[i]) and _may_run(queues[i][place[i]], done)]
        # A task of no time neither slows the other nor is slowed.
        speed = 1.0 - slowdown if len(running) == 2 and min(left) > 0 else 1.0
        passed = min(left[i] for i in running) / speed
        now += passed
        for i in running:
            left[i] -= passed * speed
            if left[i] <= 1e-15:
                done.add(queues[i][place[i]].key)
                place[i] += 1
                left[i] = queues[i][place[i]].seconds if place[i] < len(queues[i]) else 0.0
    return now


def _may_run(task: _Task, done: set[Key]) -> bool:
    return task.after is None or task.after in done


def _computed(units: Sequence[UnitTime]) -> list[_Task]:
    forward = [_Task(("forward", i), unit.forward, ("gather", i)) for i, unit in enumerate(units)]
    backward = [_Task(("backward", i), unit.backward, ("gather again", i)) for i, unit in enumerate(units)]
    return [*forward, *reversed(backward)]


def _sent(units: Sequence[UnitTime]) -> list[_Task]:
    last = len(units) - 1
    tasks = [
        _Task(("gather", i), unit.forward_gather, ("forward", i - 2) if i > 1 else None) for i, unit in enumerate(units)
    ]
    for i in range(last, -1, -1):
        after = ("backward", i + 2) if i + 2 <= last else ("forward", last)
        tasks.append(_Task(("gather again", i), units[i].backward_gather, after))
        if i < last:
            tasks.append(_Task(("reduce", i + 1), units[i + 1].reduce, ("backward", i + 1)))
    return [*tasks, _Task(("reduce", 0), units[0].reduce, ("backward", 0))]
