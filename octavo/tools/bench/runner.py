"""Interleaved run: each contender in its own process, so that a GPU that heats up or slows down affects all alike.

1. All workers start at once: importing and compiling are the CPU's work and overlap.
2. The ceiling of the GEMMs is measured, with the workers at rest.
3. One after the other: correctness, then the whole model and its warm-up.
4. Rounds: in each, every contender has its turn of timed steps; every other round in reverse order.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from octavo.tools.bench.contenders import Contender
from octavo.tools.bench.gemm import measure_ceilings
from octavo.tools.bench.processes import WorkerError, WorkerProcess
from octavo.tools.bench.result import FAILED, WRONG, add_figures, fail_row, missing_row, new_row
from octavo.tools.bench.workload import Workload, make_batches
from octavo.tools.bench.workload_result import add_workload_figures, describe_batches
from octavo.tools.shapes import Case

Say = Callable[[str], None]


def run_bench(
    case: Case,
    contenders: Sequence[Contender],
    reasons: dict[str, str],
    *,
    rounds: int,
    steps: int,
    warmup: int,
    say: Say,
) -> dict[str, Any]:
    """Return all measurements, ready for `result.describe`. `say` reports progress."""
    with _Field(case, contenders, say, None) as field:
        say(f"Starting {len(contenders)} processes")
        field.start()
        ceilings = measure_ceilings(case)
        if case.device == "cuda":
            torch.cuda.empty_cache()
        for i in field.running:
            field.check_and_load(i, warmup)
        for number in range(rounds):
            say(f"Round {number + 1} of {rounds}")
            for i in field.running[:: -1 if number % 2 else 1]:
                field.take_turn(i, steps)
    add_figures(field.rows, case, ceilings)
    rows = field.rows + [missing_row(name, reason) for name, reason in reasons.items()]
    return {"kind": "step", "rounds": rounds, "steps": steps, "warmup": warmup, "ceilings": ceilings, "rows": rows}


def run_workload_bench(
    case: Case,
    workload: Workload,
    contenders: Sequence[Contender],
    reasons: dict[str, str],
    *,
    steps: int,
    warmup: int,
    say: Say,
) -> dict[str, Any]:
    """Run every contender through the same batches of a workload, one contender after the other."""
    batches = make_batches(case, workload, warmup + steps)
    with _Field(case, contenders, say, workload) as field:
        say(f"Starting {len(contenders)} processes")
        field.start()
        for i in field.running:
            field.check_and_run(i, warmup, steps)
    add_workload_figures(field.rows, [batch.tokens for batch in batches[warmup:]])
    return {
        "kind": workload.name,
        "workload": workload.to_dict() | describe_batches(batches, warmup),
        "steps": steps,
        "warmup": warmup,
        "rows": field.rows + [missing_row(name, reason) for name, reason in reasons.items()],
    }


class _Field:
    """Contenders of a run with their workers and rows. One that fails is out; the others continue."""

    def __init__(self, case: Case, contenders: Sequence[Contender], say: Say, workload: Workload | None) -> None:
        self.rows = [new_row(contender) for contender in contenders]
        self._say = say
        self._workers: dict[int, WorkerProcess] = {}
        self._make = lambda i: WorkerProcess(case, contenders[i], len(contenders), workload)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.kill()

    @property
    def running(self) -> list[int]:
        return list(self._workers)

    def start(self) -> None:
        for i in range(len(self.rows)):
            self._workers[i] = self._make(i)
            self._workers[i].request("start")
        for i in self.running:
            self._answer(i)

    def check_and_load(self, i: int, warmup: int) -> None:
        if not self._is_correct(i):
            return
        loaded = self._ask(i, "load", warmup=warmup)
        if loaded is not None:
            self.rows[i]["summary"] = loaded["summary"]
            self._say(f"{self.rows[i]['name']}: correct, warm after {loaded['seconds']:.0f} s; {loaded['summary']}")

    def check_and_run(self, i: int, warmup: int, steps: int) -> None:
        """Run a workload; the process then ends, and leaves the device to the next one."""
        row = self.rows[i]
        if not self._is_correct(i):
            return
        turn = self._ask(i, "run", warmup=warmup, steps=steps)
        if turn is not None:
            row["summary"] = turn.pop("summary")
            row["turns"].append(turn)
            self._workers.pop(i).kill()
            self._say(f"{row['name']}: correct, {steps} steps in {sum(turn['times']):.1f} s; {row['summary']}")

    def _is_correct(self, i: int) -> bool:
        comparison = self._ask(i, "check")
        if comparison is None:
            return False
        self.rows[i]["check"] = comparison
        if comparison["failure"]:
            self._leave(i, WRONG, comparison["failure"])
            return False
        return True

    def take_turn(self, i: int, steps: int) -> None:
        turn = self._ask(i, "time", steps=steps)
        if turn is not None:
            self.rows[i]["turns"].append(turn)

    def _ask(self, i: int, do: str, **arguments: Any) -> dict[str, Any] | None:
        self._workers[i].request(do, **arguments)
        return self._answer(i)

    def _answer(self, i: int) -> dict[str, Any] | None:
        try:
            return self._workers[i].answer()
        except WorkerError as error:
            self._leave(i, FAILED, str(error))
            return None

    def _leave(self, i: int, status: str, reason: str) -> None:
        self._workers.pop(i).kill()
        fail_row(self.rows[i], status, reason)
        self._say(f"{self.rows[i]['name']}: {self.rows[i]['reason']}")
