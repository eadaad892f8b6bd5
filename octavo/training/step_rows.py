"""Rows of `metrics.jsonl`, written when their steps are known: on a GPU, steps are queued before earlier ones end.

The host reads the result of a step when `IN_FLIGHT` more are queued behind it, so the GPU always has work. Everything
is read before a line is printed and before a checkpoint is written.
"""

import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

from octavo.training.display import Display
from octavo.training.errors import RunError
from octavo.training.run_folder import Metrics
from octavo.training.run_trainer import TakenStep
from octavo.training.settings import TrainSettings
from octavo.training.trainer import Step

IN_FLIGHT = 2
MAX_SKIPPED_IN_A_ROW = 10
WARM_UP = 3  # steps that compile, or load kernels, and count in no figure of speed


@dataclass(frozen=True)
class Taken:
    """A step of a run. `seconds`: of the host. `scaling`: statistics, where the step prints a line."""

    number: int
    step: Step | TakenStep
    seconds: float
    log: bool
    scaling: dict[str, Any] | None = None


class StepRows:
    """Writes a row for each step, and shows it."""

    def __init__(self, settings: TrainSettings, metrics: Metrics, display: Display) -> None:
        self._settings, self._metrics, self._display = settings, metrics, display
        self._waiting: deque[Taken] = deque()
        self._skipped_in_a_row = 0

    def add(self, taken: Taken) -> None:
        """Add a step; write the rows of those that have ended, or of all if it prints a line."""
        self._waiting.append(taken)
        self.write(0 if taken.log else IN_FLIGHT)

    def write(self, keep: int = 0) -> None:
        """Write rows, except those of the `keep` newest steps. Raises `RunError` if nothing is learned any more."""
        while len(self._waiting) > keep:
            taken = self._waiting.popleft()
            row = make_row(taken, self._settings)
            self._metrics.append(row)
            self._display.step(row, taken.log)
            self._skipped_in_a_row = self._skipped_in_a_row + 1 if row["skipped"] else 0
            if self._skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
                raise RunError(
                    f"loss or gradient not finite for {MAX_SKIPPED_IN_A_ROW} steps in a row, up to step {row['step']}: "
                    f"try a smaller --lr (it is {self._settings.lr:g}), a longer --warmup ({self._settings.warmup}) or "
                    "--precision bf16"
                )


def make_row(taken: Taken, settings: TrainSettings) -> dict[str, Any]:
    """Return a line of metrics.jsonl. Numbers keep all their digits, so that curves can be compared bit for bit."""
    if isinstance(taken.step, TakenStep):
        step, seconds = taken.step.result, taken.step.seconds
    else:
        step, seconds = taken.step, taken.seconds
    row = {
        "step": taken.number,
        "loss": step.loss if not step.skipped else None,  # JSON has no NaN
        "lr": settings.learning_rate(taken.number),
        "grad_norm": step.grad_norm if not step.skipped else None,
        "tokens": taken.number * settings.tokens_per_step,
        "tokens_per_s": settings.tokens_per_step / seconds,
        "skipped": step.skipped,
    }
    return row if taken.scaling is None else {**row, "scaling": taken.scaling}


def median_speed(rows: list[dict[str, Any]]) -> float:
    """Return the median tokens per second of a run, without its first steps unless there are no others."""
    return statistics.median(row["tokens_per_s"] for row in rows[WARM_UP:] or rows)
