"""Markdown tables of result files: one for each timed training step.

Every row of a file is in its table, including the rows that lose or fail, with the date, the GPU, the versions and the
command behind it. `benchmarks/tables.py` of the repository writes the page that shows them.
"""

import re
from collections.abc import Sequence
from typing import Any

from octavo.tools.bench.contenders import BASELINE, OWN_BASELINE
from octavo.tools.bench.result import TIMED, title
from octavo.tools.bench.show import ratio

_HEADINGS = ("", "ms a step", f"× {BASELINE}", f"× {OWN_BASELINE}", "GiB", "TFLOP/s", "GEMM floor", "worst underflow")


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Return one table for each result that timed a step."""
    tables = [_one(result) for result in results if result["kind"] == "step"]
    return "\n\n".join(tables)


def _one(result: dict[str, Any]) -> str:
    case, versions = result["case"], result["versions"]
    whole = any(row.get("optimizer") for row in result["rows"])
    steps = ", with the optimiser: AdamW where no other is named" if whole else ""
    released = {name: version.split("+")[0] if name == "octavo" else version for name, version in versions.items()}
    software = ", ".join(f"{name} {version}" for name, version in released.items() if version != "not installed")
    command = re.sub(r" --out \S+", "", result["command"])  # the folder of one run says nothing to a reader
    lines = [
        f"**{title(case)}{steps}**: {result['device']}, {result['date']}, {software}. `{command}`",
        "",
        "| " + " | ".join(_HEADINGS) + " |",
        "| --- |" + " ---: |" * (len(_HEADINGS) - 1),
    ]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in result["rows"]]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    name = row["name"]
    if row["status"] != TIMED:
        reason = row["reason"].replace("|", "\\|").replace("<", "&lt;")
        return [name, f"{row['status']}: {reason}", *[""] * (len(_HEADINGS) - 2)]
    f = row["figures"]
    underflow = [rate["underflow_max"] for rate in f["scaling"].values()]
    return [
        name,
        f"{f['step_s'] * 1e3:.1f} ({f['fastest_s'] * 1e3:.1f}–{f['slowest_s'] * 1e3:.1f})",
        ratio(f[f"speedup_{BASELINE}"]),
        ratio(f[f"speedup_{OWN_BASELINE}"]),
        "–" if f["peak_gib"] is None else f"{f['peak_gib']:.1f}",
        f"{f['tflops']:.3g}",
        "–" if f["gemm_floor_share"] is None else f"{f['gemm_floor_share']:.0%}",
        f"{max(underflow):.2%}" if underflow else "–",
    ]
