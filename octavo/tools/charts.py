"""Metrics of a run, read from disk and reduced to the numbers that charts draw.

A run of 10,000 steps that watches 900 operands logs millions of numbers; a chart a thousand pixels wide shows about a
thousand. Both reductions are chosen so that nothing alarming can vanish:

- a line keeps the lowest and the highest value of each stretch of steps, so a spike one step long survives;
- scale, amax, saturation and underflow keep the largest reading of each stretch.

Readings travel as whole thousandths of log10: 900 operands x 60 points x 4 readings come to about 1.3 MB of text, where
floats with the same three digits would take 2 MB.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

COLUMNS = ("loss", "lr", "grad_norm", "tokens", "tokens_per_s")
READINGS = ("scale", "amax", "saturated", "underflow", "rescaled")
SATURATED = READINGS.index("saturated")
LINE_POINTS = 1500
SCALING_POINTS = 60
ZERO_CODE = -99999  # stands for 0, which has no logarithm; the page's `decode` knows it


@dataclass(frozen=True)
class Run:
    """Metrics of one run. In `columns`, NaN stands for every absent or non-finite value."""

    steps: Ints
    columns: dict[str, Floats]
    skipped: Bools
    names: list[str]
    scaling_steps: Ints
    readings: npt.NDArray[np.float32]  # [scaling step, name, reading]; NaN: absent, inf: not finite


@dataclass(frozen=True)
class _Row:
    step: int
    columns: list[float]
    skipped: bool
    readings: npt.NDArray[np.float32] | None


def read_run(path: Path) -> Run:
    """Read a `metrics.jsonl`; errors are a ValueError that names the file and the line."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a training run writes it into its folder")
    rows: list[_Row] = []
    index_of: dict[str, int] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = _parse_row(line, index_of)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
            # A run resumed from a checkpoint logs the steps after it again: the second pass is the one that counts.
            while rows and rows[-1].step >= row.step:
                rows.pop()
            rows.append(row)
    if not rows:
        raise ValueError(f"{path}: no steps in it")
    return _to_run(rows, list(index_of))


def _parse_row(line: bytes, index_of: dict[str, int]) -> _Row:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {type(row).__name__}")
    step = row.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        raise ValueError(f"'step' must be an integer, found {step!r}")
    if "loss" not in row:
        raise ValueError("'loss' is missing")
    columns = [_number(row.get(name), name, not_finite=math.nan) for name in COLUMNS]
    readings = _parse_scaling(row["scaling"], index_of) if row.get("scaling") else None
    return _Row(step, columns, bool(row.get("skipped", False)), readings)


def _parse_scaling(scaling: Any, index_of: dict[str, int]) -> npt.NDArray[np.float32]:
    if not isinstance(scaling, dict) or not all(isinstance(entry, dict) for entry in scaling.values()):
        raise ValueError("'scaling' must be an object of objects")
    for name in scaling:
        index_of.setdefault(name, len(index_of))
    readings = np.full((len(index_of), len(READINGS)), np.nan, dtype=np.float32)
    for name, entry in scaling.items():
        readings[index_of[name]] = [_number(entry.get(key), f"{name}: {key}", not_finite=math.inf) for key in READINGS]
    return readings


def _number(value: object, name: str, not_finite: float) -> float:
    if value is None:
        return math.nan
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"'{name}' must be a number, found {value!r}")
    return float(value) if math.isfinite(value) else not_finite


def _to_run(rows: list[_Row], names: list[str]) -> Run:
    watched = [(row.step, row.readings) for row in rows if row.readings is not None]
    readings = np.full((len(watched), len(names), len(READINGS)), np.nan, dtype=np.float32)
    for time, (_, reading) in enumerate(watched):
        readings[time, : len(reading)] = reading
    return Run(
        steps=np.array([row.step for row in rows]),
        columns={name: np.array([row.columns[i] for row in rows]) for i, name in enumerate(COLUMNS)},
        skipped=np.array([row.skipped for row in rows]),
        names=names,
        scaling_steps=np.array([step for step, _ in watched], dtype=np.int64),
        readings=readings,
    )


def smooth(values: Floats, window: int) -> Floats:
    """Return the centred moving average; NaN is left out of it and stays NaN.

    Centred, because an average of past steps only would lag behind a falling loss. Near both ends the window narrows
    and stays symmetric, for the same reason.
    """
    indices = np.arange(len(values))
    reach = np.minimum(window // 2, np.minimum(indices, indices[::-1]))
    known = np.isfinite(values)
    totals = np.concatenate([[0], np.cumsum(np.where(known, values, 0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    start, past = indices - reach, indices + reach + 1
    return np.where(known, (totals[past] - totals[start]) / np.maximum(1, counts[past] - counts[start]), np.nan)


def line(steps: Ints, values: Floats) -> dict[str, list[Any]]:
    """Return a line's points, {"x": ..., "y": ...}: at most LINE_POINTS, with the extremes of each stretch of steps."""
    chosen = np.arange(len(steps))
    if len(steps) > LINE_POINTS:
        stretches = np.array_split(chosen, LINE_POINTS // 2)
        chosen = np.unique(np.concatenate([_extremes(values, stretch) for stretch in stretches]))
    return {"x": steps[chosen].tolist(), "y": [rounded(value) for value in values[chosen].tolist()]}


def _extremes(values: Floats, indices: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    finite = indices[np.isfinite(values[indices])]
    if len(finite) == 0:
        return indices[:1]  # one gap is enough
    return finite[[values[finite].argmin(), values[finite].argmax()]]


def rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def spans(steps: Ints, flags: Bools) -> list[list[int]]:
    """Return the flagged steps as [first, last] spans; those too close to tell apart on a chart are joined."""
    reach = max(1, len(steps) // LINE_POINTS)
    merged: list[list[int]] = []
    previous = -reach - 1
    for index in np.flatnonzero(flags).tolist():
        step = int(steps[index])
        if index - previous <= reach:
            merged[-1][1] = step
        else:
            merged.append([step, step])
        previous = index
    return merged


def scaling_series(run: Run) -> dict[str, Any]:
    """Return every operand's readings over at most SCALING_POINTS stretches of the run, and the latest ones.

    A row's `series` are in the order of READINGS; one that never changes is a single number.
    """
    times = len(run.scaling_steps)
    if times == 0:
        return {"steps": [], "rows": []}
    stretches = np.array_split(np.arange(times), min(times, SCALING_POINTS))
    # fmax passes over NaN (the operand was not read at that step), but inf (it was, and is broken) wins.
    worst = np.stack([np.fmax.reduce(run.readings[stretch], axis=0) for stretch in stretches])
    latest = run.readings[0]
    for readings in run.readings[1:]:
        latest = np.where(np.isnan(readings), latest, readings)
    rows = []
    for i, name in enumerate(run.names):
        product, _, operand = name.rpartition(".")
        series = [_encode(worst[:, i, r]) for r in range(len(READINGS))]
        last = [rounded(value) for value in latest[i].tolist()]
        rows.append({"product": product, "operand": operand, "series": series, "last": last})
    return {"steps": [int(run.scaling_steps[stretch[-1]]) for stretch in stretches], "rows": rows}


def _encode(values: npt.NDArray[np.float32]) -> list[int | None] | int | None:
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(values == 0, ZERO_CODE, np.round(1000 * np.log10(values)))
    series = [int(code) if math.isfinite(code) else None for code in codes.tolist()]
    return series[0] if len(set(series)) == 1 else series
