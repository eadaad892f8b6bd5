"""HTML page about a GRPO run: `write_rl_report(folder)` turns the folder's files into one `report.html`.

    metrics.jsonl   one JSON object per step: reward, KL, lengths, gap, speed
    config.json     the run's settings
    samples.json    prompts with completions from before and after
    summary.json    means of the whole run

Head and style are those of `html_report.py`, and so is the rule: the page loads nothing, and all text from the folder
passes through `html.escape` or through JSON without a `<`.
"""

import html
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from octavo.tools.charts import Floats, Ints, line, smooth
from octavo.tools.html_report import asset, card, embed, flatten, write_page
from octavo.training.files import read_object
from octavo.training.run_folder import CONFIG, METRICS, SAMPLES, SUMMARY, Metrics

_LINES = ("reward", "gap_mean", "gap_p99", "kl", "length", "longest", "grad_norm", "rollout_tokens_per_s")
_HINT = "a run of octavo grpo writes it into its folder"


def write_rl_report(folder: Path) -> Path:
    """Write `folder/report.html` from the run's files, atomically."""
    rows = Metrics(folder / METRICS).rows()
    if not rows:
        raise ValueError(f"{folder / METRICS}: no steps in it; {_HINT}")
    config = read_object(folder / CONFIG, _HINT)
    samples = read_object(folder / SAMPLES, _HINT).get("samples", []) if (folder / SAMPLES).exists() else []
    result = next(iter(read_object(folder / SUMMARY, _HINT).values())) if (folder / SUMMARY).exists() else {}
    window = max(5, len(rows) // 15 | 1)  # odd, as a centred window is
    planned, last = config.get("steps"), rows[-1]["step"]
    complete = last == planned
    cards = _cards(rows, config, result)
    fields = {
        "title": html.escape(str(config.get("name") or folder.resolve().name)),
        "subtitle": html.escape(_subtitle(config)),
        "status": f'<span class="pill {"good" if complete else "warn"}">step {last:,} of {planned:,}</span>',
        "cards": "\n".join(cards),
        "columns": str(math.ceil(len(cards) / math.ceil(len(cards) / 6))),
        "window": str(window),
        "samples": "\n".join(_sample(sample) for sample in samples),
        "config": "\n".join(
            f"<tr><th scope=row>{html.escape(key)}</th><td>{html.escape(value)}</td></tr>"
            for key, value in flatten(config)
        ),
        "data": embed(_chart_data(rows, window)),
        "script": asset("charts.js") + asset("rl_report.js"),
    }
    head, _ = asset("report_template.html").split("<main>", 1)
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], head + asset("rl_report.html"))
    return write_page(folder, page)


def _subtitle(config: dict[str, Any]) -> str:
    what = "all weights" if config.get("full") else f"LoRA of rank {config.get('rank')}"
    words = [config.get("model") or "a small decoder", config.get("task") or "sorting digits", what]
    words += [f"{config.get('engine')} engine", config.get("device"), str(config.get("precision", "")).upper()]
    return " · ".join(str(word) for word in ["GRPO", *words] if word)


def _cards(rows: list[dict[str, Any]], config: dict[str, Any], result: dict[str, Any]) -> list[str]:
    tenth = max(len(rows) // 10, 1)
    last = sum(row["reward"] for row in rows[-tenth:]) / tenth
    cards = [
        card("Reward", f"{last:.3f}", f"mean of the last 10 % of steps; {rows[0]['reward']:.3f} in the first step")
    ]
    if "reward_after" in result:
        note = f"of one completion of each of the first prompts; {result['reward_before']:.3f} before training"
        cards.append(card("Reward after", f"{result['reward_after']:.3f}", note))
    cards += [
        card("Gap", f"{result.get('gap_mean', rows[-1]['gap_mean']):.2g}", "mean |Δ log p| of rollout and trainer"),
        card("Gap, exp |Δ|", f"{result.get('gap_exp', rows[-1]['gap_exp']):.4f}", "mean; up to 1.05 is usual"),
    ]
    equal, groups = (sum(row[name] for row in rows) for name in ("equal_groups", "groups"))
    cards.append(card("Groups all equal", f"{100 * equal / max(groups, 1):.0f} %", f"{equal:,} of {groups:,}"))
    unscored, too_long = sum(row["unscored"] for row in rows), config.get("prompts_too_long", 0)
    if unscored:
        cards.append(card("Without a reward", f"{unscored:,}", "completions, left out of their groups", "warn"))
    if too_long:
        cards.append(card("Prompts too long", f"{too_long:,}", "left out: no positions for them", "warn"))
    for name, words in (("rollout_tokens_per_s", "Rollout"), ("train_tokens_per_s", "Training")):
        values = [row[name] for row in rows]
        cards.append(card(words, f"{float(np.median(values)):,.0f}", "tokens per second, median"))
    if config.get("emulated"):
        cards.append(card("FP8 arithmetic", "Emulated", "FP8 values, not FP8 speed", "warn"))
    return cards


def _chart_data(rows: list[dict[str, Any]], window: int) -> dict[str, Any]:
    steps: Ints = np.array([row["step"] for row in rows])

    def values(name: str) -> Floats:
        return np.array([math.nan if row[name] is None else float(row[name]) for row in rows])

    data = {name: line(steps, values(name)) for name in (*_LINES, "train_tokens_per_s")}
    data["smooth"] = line(steps, smooth(values("reward"), window))
    data["equal"] = line(steps, np.array([row["equal_groups"] / max(row["groups"], 1) for row in rows]))
    return data


def _sample(sample: dict[str, Any]) -> str:
    cells = [f"<td><code>{html.escape(str(sample['prompt']))}</code></td>"]
    for when in ("before", "after"):
        each = sample.get(when, {})
        reward = each.get("reward")
        cells.append(f"<td><code>{html.escape(str(each.get('text', '')))}</code></td>")
        cells.append(f'<td class="number">{"–" if reward is None else f"{reward:.3g}"}</td>')
    return f"<tr>{''.join(cells)}</tr>"
