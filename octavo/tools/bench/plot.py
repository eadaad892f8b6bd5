"""Plot of a run: step time and peak memory of every contender, with the spread."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from octavo.tools.bench.contenders import BASELINE
from octavo.tools.bench.result import TIMED, title
from octavo.tools.bench.show import ratio


def write_plot(result: dict[str, Any], path: Path) -> str:
    """Write a PNG; return one line that says where it is, or why there is none."""
    rows = [row for row in result["rows"] if row["status"] == TIMED]
    if not rows:
        return "No plot: nothing was timed"
    if find_spec("matplotlib") is None:
        return "No plot: matplotlib is not installed (pip install matplotlib)"
    _draw(result, rows, path)
    return f"Plot: {path}"


def _draw(result: dict[str, Any], rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [row["name"] for row in rows]
    colours = ["tab:blue" if name.startswith("octavo") else "tab:gray" for name in names]
    medians = [row["figures"]["step_s"] * 1e3 for row in rows]
    below = [m - row["figures"]["fastest_s"] * 1e3 for m, row in zip(medians, rows, strict=True)]
    above = [row["figures"]["slowest_s"] * 1e3 - m for m, row in zip(medians, rows, strict=True)]
    with_memory = rows[0]["figures"]["peak_gib"] is not None

    # An explicit canvas: no global state, no window system.
    figure = Figure(figsize=(11 if with_memory else 7, 1.4 + 0.42 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if with_memory else 1, squeeze=False)[0]
    bars = axes[0].barh(names, medians, xerr=[below, above], color=colours, capsize=3)
    axes[0].bar_label(bars, [ratio(row["figures"][f"speedup_{BASELINE}"]) for row in rows], padding=4)
    axes[0].set_xlabel(f"ms a step, median with fastest and slowest (labels: against {BASELINE})")
    if with_memory:
        memory = axes[1].barh(names, [row["figures"]["peak_gib"] for row in rows], color=colours)
        axes[1].bar_label(memory, fmt="%.1f", padding=4)
        axes[1].set_xlabel("peak memory, GiB")
    for ax in axes:
        ax.invert_yaxis()
        ax.margins(x=0.15)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{title(result['case'])}, forward + backward\n"
        f"{result['device']}, torch {result['versions']['torch']}, {result['date']}"
    )
    figure.savefig(path, dpi=120, metadata={"Software": None})
