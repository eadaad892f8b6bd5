"""Markdown tables from result files: `python -m octavo.tools.bench.table benchmarks/results/*.json`.

It replaces what stands between the two markers in README.md. Every row of every file is in it, also those that lose or
failed, with the date, the GPU, the versions and the command that gave it.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.tools.bench.contenders import BASELINE, OWN_BASELINE
from octavo.tools.bench.result import TIMED, title
from octavo.tools.bench.show import ratio
from octavo.training.files import replace_file

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
_HEADINGS = ("", "ms a step", f"× {BASELINE}", f"× {OWN_BASELINE}", "GiB", "TFLOP/s", "GEMM floor", "worst underflow")


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Return one table for each result that timed a step."""
    parts = [_one(result) for result in results if result["kind"] == "step"]
    return "\n\n".join(parts)


def _one(result: dict[str, Any]) -> str:
    case, versions = result["case"], result["versions"]
    whole = any(row.get("optimizer") for row in result["rows"])
    steps = ", with the optimiser: AdamW where no other is named" if whole else ""
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        f"**{title(case)}{steps}**: {result['device']}, {result['date']}, {software}. `{result['command']}`",
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


def rewrite(page: Path, results: Sequence[dict[str, Any]]) -> None:
    """Replace the tables between the markers of `page`."""
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{page}: needs {BEGIN} and, after it, {END}, once each")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    replace_file(page, f"{before}{BEGIN}\n{markdown(results)}\n{END}{after}")


def main(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0].startswith("-"):
        sys.exit("usage: python -m octavo.tools.bench.table RESULT.json… (from the folder with README.md)")
    rewrite(Path("README.md"), [json.loads(Path(name).read_text()) for name in sorted(arguments)])


if __name__ == "__main__":
    main(sys.argv[1:])
