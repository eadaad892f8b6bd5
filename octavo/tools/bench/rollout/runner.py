"""All ways of a rollout, or of GRPO's step, one after the other: each has the device to itself, in its own process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.numerics.checks import check_positive_int
from octavo.tools.bench.processes import Process, WorkerError
from octavo.tools.bench.result import FAILED, TIMED, device_name, without_folders
from octavo.tools.bench.rollout.floor import measure_rates
from octavo.tools.bench.rollout.result import add_grpo_figures, add_rollout_figures
from octavo.tools.bench.rollout.ways import Way
from octavo.tools.rollouts import Size
from octavo.tools.shapes import Case

MODES = ("rollout", "grpo")
Say = Callable[[str], None]


class RolloutProcess(Process):
    """A way to generate, in a process of its own."""

    def __init__(self, case: Case, way: Way, workers: int) -> None:
        setup = {"case": case.to_dict(), "way": way.to_dict()}
        super().__init__("octavo.tools.bench.rollout.worker", setup, workers)


@dataclass(frozen=True)
class RolloutBench:
    """Ways to run, at sizes. `runs`: timed rollouts or steps of each; `training`: options of GRPO's steps."""

    mode: str
    case: Case
    ways: Sequence[Way]
    sizes: Sequence[Size]
    runs: int = 2
    peer_tokens: int | None = None
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_positive_int("runs", self.runs)
        if self.peer_tokens is not None:
            check_positive_int("peer_tokens", self.peer_tokens)


def run_rollout_bench(bench: RolloutBench, say: Say) -> dict[str, Any]:
    """Return all measurements, ready for `bench.result.describe`. `say` reports progress."""
    case = bench.case
    say(f"Starting {len(bench.ways)} processes")
    workers = [RolloutProcess(case, way, len(bench.ways)) for way in bench.ways]
    rows: list[dict[str, Any]] = []
    try:
        for worker in workers:
            worker.request("start")
        rates = measure_rates(case) if bench.mode == "rollout" else None
        for way, worker in zip(bench.ways, workers, strict=True):
            rows += _rows(bench, way, worker, say)
            worker.kill()
    finally:
        for worker in workers:
            worker.kill()
    if rates is not None:
        add_rollout_figures(rows, case, rates, device_name(case.device))
    else:
        add_grpo_figures(rows)
    return {
        "kind": bench.mode,
        "rollout": {"sizes": [size.to_dict() for size in bench.sizes], "runs": bench.runs, **bench.training},
        "rates": None if rates is None else rates.to_dict(),
        "rows": rows,
    }


def _rows(bench: RolloutBench, way: Way, worker: Process, say: Say) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"name": way.name, "way": way.to_dict(), "size": size.to_dict(), "status": FAILED, "reason": "not reached"}
        for size in bench.sizes
    ]
    try:
        worker.answer()
        worker.request("load")
        loaded = worker.answer()
        say(f"{way.name}: loaded in {loaded.pop('seconds'):.0f} s; {loaded['summary']}")
        for row, size in zip(rows, bench.sizes, strict=True):
            _ask(bench, worker, size)
            turn = worker.answer()
            row.update(loaded, status=TIMED, reason="", turn=turn)
            say(f"{way.name}, {size.slots} slots: {_in_words(bench.mode, turn)}")
    except WorkerError as error:
        for row in rows:
            if row["status"] != TIMED:
                row["reason"] = without_folders(str(error))
        say(f"{way.name}: {without_folders(str(error))}")
    return rows


def _ask(bench: RolloutBench, worker: Process, size: Size) -> None:
    if bench.mode == "rollout":
        worker.request("rollout", size=size.to_dict(), runs=bench.runs, peer_tokens=bench.peer_tokens)
    else:
        worker.request("grpo", size=size.to_dict(), steps=bench.runs, **bench.training)


def _in_words(mode: str, turn: dict[str, Any]) -> str:
    if mode == "rollout":
        return f"{turn['tokens_per_s']:,.0f} tokens/s, warm after {turn['warm_s']:.0f} s"
    return f"rollout {turn['rollout_s']:.2f} s, training {turn['train_s']:.2f} s"
