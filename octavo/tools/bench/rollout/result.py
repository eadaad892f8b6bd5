"""Figures of rollouts and of GRPO's steps, from the workers' answers.

A rollout's row is one way at one number of slots. `floor_share` is the share of the floor at the bandwidth of this
run's copy, `datasheet_share` at that of the data sheet; both of tokens a second over the whole rollout. `step_share` is
that of a decode step alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from octavo.tools.bench.result import TIMED
from octavo.tools.bench.rollout.floor import DATASHEETS, Rates, floor_of_way
from octavo.tools.bench.rollout.ways import AGAINST, OWN, Way
from octavo.tools.rollouts import Size
from octavo.tools.shapes import Case


def add_rollout_figures(rows: Sequence[dict[str, Any]], case: Case, rates: Rates, device: str) -> None:
    """Add to every row that was timed its floor, and its speed-up over the others with as many slots."""
    timed = [row for row in rows if row["status"] == TIMED]
    for row in timed:
        way, size, turn = Way(**row["way"]), Size(**row["size"]), row["turn"]
        used = replace(size, new_tokens=turn["new_tokens"])
        floor = floor_of_way(case, used, rates, way)
        sheet = DATASHEETS.get(device)
        by_sheet = None if sheet is None else floor_of_way(case, used, sheet, way)
        row["figures"] = {
            **{name: turn[name] for name in ("tokens_per_s", "step_s", "prefill_s", "new_tokens")},
            "floor": floor.to_dict(),
            "floor_share": turn["tokens_per_s"] / floor.tokens_per_s,
            "step_share": None if turn["step_s"] is None else floor.seconds / turn["step_s"],
            "datasheet_tokens_per_s": by_sheet and by_sheet.tokens_per_s,
            "datasheet_share": by_sheet and turn["tokens_per_s"] / by_sheet.tokens_per_s,
        }
    for row in timed:
        for name in AGAINST:
            base = _row_of(timed, name, row["size"])
            row["figures"][f"speedup_{name}"] = (
                None if base is None else row["figures"]["tokens_per_s"] / base["figures"]["tokens_per_s"]
            )


def add_grpo_figures(rows: Sequence[dict[str, Any]]) -> None:
    """Add to every row that was timed its speed and memory against Octavo's own BF16.

    `memory_two_copies`: against BF16 with a second copy of its weights, as an engine with its own would hold. That copy
    is counted, not measured.
    """
    timed = [row for row in rows if row["status"] == TIMED]
    for row in timed:
        turn = row["turn"]
        row["figures"] = {
            "step_s": sum(turn["times"]) / len(turn["times"]),
            **{name: turn[name] for name in ("rollout_s", "train_s", "gap_mean", "gap_p99", "gap_clip", "peak_gib")},
        }
    for row in timed:
        base, mine = _row_of(timed, OWN, row["size"]), row["figures"]
        for name in ("step_s", "rollout_s", "train_s"):
            mine[f"speedup_{name}"] = None if base is None else base["figures"][name] / mine[name]
        known = base is not None and mine["peak_gib"] is not None
        mine["memory"] = mine["peak_gib"] / base["figures"]["peak_gib"] if base and known else None
        two = base["figures"]["peak_gib"] + base["weights_gib"] if base and known else None
        mine["memory_two_copies"] = None if two is None else mine["peak_gib"] / two


def _row_of(rows: Sequence[dict[str, Any]], name: str, size: dict[str, int]) -> dict[str, Any] | None:
    return next((row for row in rows if row["name"] == name and row["size"] == size), None)
