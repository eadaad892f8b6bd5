"""Every way at every number of GPUs, and which to choose.

The advice is the first way, in the order of `ways_of`, that is within `NEAR` of the fastest that fits: ways with less
FP8 on the wire come first, since gradients reduced in BF16 or FP8 are rounded. FP8 gather changes no bit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from octavo.tools.plan.options import BY_EXACTNESS
from octavo.tools.plan.request import with_batch
from octavo.tools.plan.scale.memory import rank_memory
from octavo.tools.plan.scale.request import ScaleRequest
from octavo.tools.plan.scale.step import Step, plan_step
from octavo.tools.plan.scale.ways import STRATEGIES, Way, ways_of
from octavo.tools.plan.timeline import GIB, Memory
from octavo.tools.shapes import Case
from octavo.training.errors import UserError

NEAR = 1.02
MOST_GPUS = 4096


@dataclass(frozen=True)
class Row:
    """One way on so many GPUs."""

    way: Way
    memory: Memory
    step: Step
    fits: bool


@dataclass(frozen=True)
class Advice:
    """The chosen way, or None where none fits, with the reasons."""

    row: Row | None
    why: str


@dataclass(frozen=True)
class AtScale:
    """All ways on so many GPUs. `others`: the chosen rows of the other strategies, where something fits."""

    gpus: int
    rows: Sequence[Row]
    advice: Advice
    others: Sequence[tuple[str, Row]]

    @property
    def baseline(self) -> Row | None:
        """The first row that fits."""
        return next((row for row in self.rows if row.fits), None)


@dataclass(frozen=True)
class ScalePlan:
    """A complete plan."""

    request: ScaleRequest
    at: Sequence[AtScale]


def make_scale_plan(request: ScaleRequest) -> ScalePlan:
    """Return every way at every number of GPUs; an error if nothing fits on any."""
    plans = [_at(request, gpus) for gpus in request.gpus]
    if all(plan.advice.row is None for plan in plans):
        gpus = max(request.gpus)
        raise UserError(
            f"--gpus {gpus} --strategy {request.strategy}: {request.model} does not fit {request.device.name}. "
            f"{what_fits(request, gpus)}"
        )
    return ScalePlan(request, plans)


def _at(request: ScaleRequest, gpus: int) -> AtScale:
    rows = rows_of(request, gpus)
    others = [
        (strategy, row)
        for strategy in STRATEGIES
        if strategy != request.strategy and (row := _chosen(rows_of(replace(request, strategy=strategy), gpus)))
    ]
    chosen = _chosen(rows)
    why = what_fits(request, gpus) if chosen is None else _why(request, gpus, rows, chosen)
    return AtScale(gpus, rows, Advice(chosen, why), others if gpus > 1 else [])


def rows_of(request: ScaleRequest, gpus: int) -> list[Row]:
    """Return each way, with checkpointing only where it does not fit without. One GPU has nothing on the wire."""
    ways = [way for way in request.ways if gpus > 1 or not (way.fp8_gather or way.says_reduce)]
    return [_row(request, gpus, way) for way in ways]


def _row(request: ScaleRequest, gpus: int, way: Way) -> Row:
    case, strategy = request.case, request.strategy
    for kind in request.kinds:
        way = way.with_checkpointing(kind)
        memory = rank_memory(case, way, strategy, gpus)
        if fits := memory.peak.total <= request.room(gpus):
            break
    return Row(way, memory, plan_step(case, way, strategy, gpus, request.assumed), fits)


def _chosen(rows: Iterable[Row]) -> Row | None:
    fitting = [row for row in rows if row.fits and row.way.option.code != "hf"]
    if not fitting:
        return None
    fastest = min(row.step.seconds for row in fitting)
    return next(row for row in fitting if row.step.seconds <= NEAR * fastest)


def _why(request: ScaleRequest, gpus: int, rows: Sequence[Row], chosen: Row) -> str:
    step = chosen.step
    parts = [f"{1e3 * step.seconds:,.0f} ms, {chosen.memory.peak_gib:.1f} of {request.room(gpus) / GIB:.1f} GiB"]
    bf16 = [row for row in rows if row.fits and row.way.option.code != "fp8"]
    if bf16 and chosen.way.option.code == "fp8":
        best = min(bf16, key=lambda row: row.step.seconds)
        parts.append(f"{best.step.seconds / step.seconds:.2f}x as fast as {best.way.name}, the fastest in BF16")
    if gpus > 1:
        slower = step.waiting / step.computing
        parts.append(
            f"{1e3 * step.communication:,.0f} ms of communication beside {1e3 * step.computing:,.0f} of computing add "
            f"{1e3 * step.waiting:,.0f} ({slower:.0%})"
        )
    for row in rows:
        if row is chosen or row.way.option.code == "hf" or not row.fits:
            continue
        ratio = row.step.seconds / step.seconds
        is_later = rows.index(row) > rows.index(chosen)
        if is_later and ratio <= 1:
            parts.append(f"{row.way.name} would gain only {1 - ratio:.1%}")
        elif is_later:
            reason = _all_to_all(request, gpus, row)
            parts.append(f"{row.way.name} would take {ratio - 1:.0%} longer{reason}")
    return "; ".join(parts) + "."


def _all_to_all(request: ScaleRequest, gpus: int, row: Row) -> str:
    if row.way.reduce != "fp8" or gpus <= request.assumed.node:
        return ""
    ring = request.assumed.bus(gpus) / 1e9
    return f", since its all-to-all crosses nodes at {request.assumed.network:g} GB/s a GPU, and rings reach {ring:.0f}"


def what_fits(request: ScaleRequest, gpus: int) -> str:
    """Return what would fit instead: a smaller batch, smaller states, another strategy, more GPUs."""
    case, strategy = request.case, request.strategy
    found: list[str] = []

    def fit(case: Case, strategy: str, gpus: int, optimizer: str = "adamw") -> bool:
        ways = [way.with_checkpointing("layers").with_optimizer(optimizer) for way in ways_of(case, strategy)]
        sizes = (rank_memory(case, way, strategy, gpus).peak.total for way in ways if way.option.code != "hf")
        return min(sizes) <= request.room(gpus)

    if request.checkpointing == "none" and fit(case, strategy, gpus):
        found.append("--checkpointing layers")
    batches = range(case.tokens // case.seq - 1, 0, -1)
    if batch := next((batch for batch in batches if fit(with_batch(case, batch), strategy, gpus)), 0):
        found.append(f"--batch {batch} with checkpointing")
    if not case.frozen:
        small = [name for name in BY_EXACTNESS[1:] if name != "adamwfp8" and fit(case, strategy, gpus, name)]
        found += [f"{name} with checkpointing" for name in small[:1]]
    if other := next((s for s in STRATEGIES[1:] if s != strategy and fit(case, s, gpus)), ""):
        found.append(f"--strategy {other}")
    doubled = [2**i for i in range(1, MOST_GPUS.bit_length()) if 2**i > gpus]
    if strategy != "ddp" and (more := next((n for n in doubled if fit(case, strategy, n)), 0)):
        found.append(f"--gpus {more}")
    if not found and not case.frozen:
        return "Nothing smaller fits either; --mode lora needs least."
    return f"These would fit: {'; '.join(found)}." if found else "Nothing smaller fits either; a larger --gpu may."
