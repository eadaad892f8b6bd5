"""Draw the picture of the README from result files: time and memory of a training step, BF16 against FP8.

    python benchmarks/picture.py                                     # writes docs/speed.svg

Each group of bars is one result file, so all of its bars were measured in the same run. The SVG is written by hand: it
is small, needs no library, and is the same on every machine, so that `tests/benchmarks/test_tables.py` can check that
it is current.
"""

import json
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "speed.svg"
# Heading of a group, result file, and the name of Octavo's FP8 row in it.
GROUPS = (
    ("8B, full fine-tuning", "2026-11-16-h200-8b-32l", "octavo delayed"),
    ("3B, full fine-tuning", "2026-11-16-h200-3b-28l", "octavo delayed"),
    ("8B, LoRA of rank 32", "2026-11-16-h200-8b-32l-lora32-peers", "octavo channel"),
)
BARS = (
    ("bf16-compiled", "Hugging Face, BF16", "#b8bec7"),
    ("octavo-bf16", "Octavo, BF16", "#9cc3e6"),
    ("torchao", "torchao, FP8", "#8d96a3"),
    ("octavo", "Octavo, FP8", "#1b6fc2"),
)
WIDTH, LEFT, PANEL, BETWEEN = 860, 150, 230, 130
TOP, ROW, GAP, HEADING = 64, 21, 14, 22
FONT = 'font-family="Helvetica, Arial, sans-serif"'


def text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" {FONT} font-size="{size}" text-anchor="{anchor}"{weight} fill="#24292f">'
        f"{escape(words)}</text>"
    )


def rows_of(name: str, own: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Label, colour and figures of each bar."""
    result = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    figures = {row["name"]: row["figures"] for row in result["rows"]}
    return [(label, colour, figures[own if key == "octavo" else key]) for key, label, colour in BARS]


def draw() -> str:
    groups = [(heading, rows_of(name, own)) for heading, name, own in GROUPS]
    height = TOP + len(groups) * (HEADING + len(BARS) * ROW + GAP) + 8
    second = LEFT + PANEL + BETWEEN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        text(16, 24, "A training step on one H200, 2026-11-16: forward and backward, 8,192 tokens", size=15, bold=True),
        text(LEFT, 48, "Time, ms (speed-up over Hugging Face in BF16)"),
        text(second, 48, "Peak memory, GiB (share)"),
    ]
    y = TOP
    for heading, rows in groups:
        times = [figures["step_s"] * 1e3 for *_, figures in rows]
        peaks = [figures["peak_gib"] for *_, figures in rows]
        lines.append(text(16, y + 14, heading, size=13, bold=True))
        y += HEADING
        for (label, colour, _), time, peak in zip(rows, times, peaks, strict=True):
            ours = label == "Octavo, FP8"
            lines.append(text(LEFT - 8, y + 13, label, anchor="end", bold=ours))
            for x, value, most, said in (
                (LEFT, time, max(times), f"{time:.0f} ({times[0] / time:.2f}×)"),
                (second, peak, max(peaks), f"{peak:.1f} ({peak / peaks[0]:.2f}×)"),
            ):
                length = PANEL * value / most
                lines.append(f'<rect x="{x}" y="{y}" width="{length:.1f}" height="{ROW - 5}" fill="{colour}"/>')
                lines.append(text(round(x + length + 6, 1), y + 13, said, bold=ours))
            y += ROW
        y += GAP
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw())
