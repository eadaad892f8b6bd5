"""Markdown tables of result files: one for each training step, run through a workload, rollout and step of GRPO.

Every row of a file is in its table, including the rows that lose or fail, with the date, the GPU, the versions and the
command behind it. `benchmarks/tables.py` of the repository writes the page that shows them.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from octavo.tools.bench.contenders import BASELINE, OWN_BASELINE
from octavo.tools.bench.result import TIMED, title
from octavo.tools.bench.rollout.show import CELLS, rollout_title
from octavo.tools.bench.show import ratio
from octavo.tools.bench.workload_result import FASTER, steps_title, workload_title

_HEADINGS = ("", "ms a step", f"× {BASELINE}", f"× {OWN_BASELINE}", "GiB", "TFLOP/s", "GEMM floor", "worst underflow")
_WORKLOAD_HEADINGS = (
    *("", "real tokens/s", f"× {FASTER}", f"× {OWN_BASELINE}", "ms, median", "ms, slowest after 3", "GiB", "last loss"),
)


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Return one table for each result that timed a step."""
    tables = [_one(result) for result in results if result["kind"] == "step"]
    return "\n\n".join(tables)


def workload_markdown(results: Sequence[dict[str, Any]]) -> str:
    """Return one table for each result of a workload."""
    parts = []
    for result in results:
        heading = f"{workload_title(result)}; {steps_title(result)}"
        parts.append(_table(result, heading, _WORKLOAD_HEADINGS, _workload_cells))
    return "\n\n".join(parts)


def rollout_markdown(results: Sequence[dict[str, Any]]) -> str:
    """Return one table for each result of rollouts or of GRPO's steps."""
    return "\n\n".join(_table(result, rollout_title(result), *CELLS[result["kind"]]) for result in results)


def _one(result: dict[str, Any]) -> str:
    whole = any(row.get("optimizer") for row in result["rows"])
    steps = ", with the optimiser: AdamW where no other is named" if whole else ""
    return _table(result, f"{title(result['case'])}{steps}", _HEADINGS, _cells)


def _table(
    result: dict[str, Any], heading: str, columns: Sequence[str], cells: Callable[[dict[str, Any]], list[str]]
) -> str:
    versions = result["versions"]
    released = {name: version.split("+")[0] if name == "octavo" else version for name, version in versions.items()}
    software = ", ".join(f"{name} {version}" for name, version in released.items() if version != "not installed")
    command = re.sub(r" --out \S+", "", result["command"])  # the folder of one run says nothing to a reader
    lines = [
        f"**{heading}**: {result['device']}, {result['date']}, {software}. `{command}`",
        "",
        "| " + " | ".join(columns) + " |",
        "| --- |" + " ---: |" * (len(columns) - 1),
    ]
    for row in result["rows"]:
        timed = row["status"] == TIMED
        lines.append("| " + " | ".join(cells(row) if timed else _without_figures(row, len(columns))) + " |")
    return "\n".join(lines)


def _without_figures(row: dict[str, Any], columns: int) -> list[str]:
    reason = row["reason"].replace("|", "\\|").replace("<", "&lt;")
    return [row["name"], f"{row['status']}: {reason}", *[""] * (columns - 2)]


def _workload_cells(row: dict[str, Any]) -> list[str]:
    f = row["figures"]
    return [
        row["name"] + (", compiled" if row["compile"] and row["name"] != BASELINE else ""),
        f"{f['tokens_per_s']:,.0f}",
        ratio(f[f"speedup_{FASTER}"]),
        ratio(f[f"speedup_{OWN_BASELINE}"]),
        f"{f['step_s'] * 1e3:.1f}",
        f"{f['slowest_s'] * 1e3:.1f}",
        "–" if f["peak_gib"] is None else f"{f['peak_gib']:.1f}",
        f"{f['loss']:.4f}",
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    f = row["figures"]
    underflow = [rate["underflow_max"] for rate in f["scaling"].values()]
    return [
        row["name"],
        f"{f['step_s'] * 1e3:.1f} ({f['fastest_s'] * 1e3:.1f}–{f['slowest_s'] * 1e3:.1f})",
        ratio(f[f"speedup_{BASELINE}"]),
        ratio(f[f"speedup_{OWN_BASELINE}"]),
        "–" if f["peak_gib"] is None else f"{f['peak_gib']:.1f}",
        f"{f['tflops']:.3g}",
        "–" if f["gemm_floor_share"] is None else f"{f['gemm_floor_share']:.0%}",
        f"{max(underflow):.2%}" if underflow else "–",
    ]
