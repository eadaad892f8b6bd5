"""HTML page about a training run: `write_report(folder)` turns the folder's files into one `report.html`.

    metrics.jsonl       one JSON object per step; now and then with the scaling of every operand
    config.json         the run's settings
    metrics_bf16.jsonl  optional: the same run in BF16, for comparison
    products.json       optional: every matrix product, its precision and, where it is not FP8, the reason
    sample.json         optional: a held-out line, and the trained model's continuation
    summary.json        optional: results of a finished run; the memory of its steps

The page loads nothing: style, script and numbers are in the file, and a content security policy keeps it so.
`report_template.html` is the layout, `report.js` fills it, `charts.js` draws its lines and `charts.py` thins them; this
module computes the headline figures and assembles the page. All text from the folder passes through `html.escape` or
through JSON without a `<`, so it cannot become markup.
"""

import html
import json
import math
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from octavo.dist.durable import sync_folder, write_durable
from octavo.optim.step_memory import in_words
from octavo.tools.charts import COLUMNS, SATURATED, Floats, Ints, Run, line, read_run, scaling_series, smooth, spans
from octavo.tools.families import family_of
from octavo.tools.run_memory import RunMemory, memory_rows, run_memories
from octavo.training.run_folder import read_summary
from octavo.training.step_rows import WARM_UP


def write_report(folder: Path) -> Path:
    """Write `folder/report.html` from the run's files, atomically."""
    return write_page(folder, _page(folder))


def write_page(folder: Path, page: str) -> Path:
    """Write a page as `folder/report.html`, atomically."""
    report = folder / "report.html"
    partial = folder / f".report.{os.getpid()}.tmp"
    try:
        # JSON may hold lone surrogates, which UTF-8 cannot: they become "?".
        write_durable(partial, page.encode("utf-8", "replace"))
        partial.replace(report)
        sync_folder(folder)
    finally:
        partial.unlink(missing_ok=True)
    return report


def _page(folder: Path) -> str:
    run = read_run(folder / "metrics.jsonl")
    baseline_path = folder / "metrics_bf16.jsonl"
    baseline = read_run(baseline_path) if baseline_path.exists() else None
    config = _read_object(folder / "config.json")
    products_path = folder / "products.json"
    products = _read_products(products_path) if products_path.exists() else []
    sample_path = folder / "sample.json"
    sample = _read_object(sample_path) if sample_path.exists() else {}

    label = _label(run, config)
    status, tone = _status(run, config)
    window = max(5, len(run.steps) // 25 | 1)  # odd, as a centred window is
    summary = read_summary(folder) if (folder / "summary.json").exists() else {}
    memories = run_memories(config, summary)
    cards = _cards(run, baseline, label, config, products, summary) + _memory_cards(memories)
    fields = {
        "title": html.escape(str(config.get("name") or folder.resolve().name)),
        "subtitle": html.escape(_subtitle(config, label, compared=baseline is not None)),
        "status": f'<span class="pill {tone}">{html.escape(status)}</span>',
        "cards": "\n".join(cards),
        "columns": str(math.ceil(len(cards) / math.ceil(len(cards) / 6))),  # as even as rows of at most six can be
        "label": html.escape(label),
        "unit": _unit(config),
        "window": str(window),
        "memory": _memory_section(memories),
        "prompt": html.escape(str(sample.get("prompt", ""))),
        "written": html.escape(str(sample.get("written", ""))),
        "config": "\n".join(
            f"<tr><th scope=row>{html.escape(key)}</th><td>{html.escape(value)}</td></tr>"
            for key, value in flatten(config)
        ),
        "data": embed(
            _chart_data(run, baseline, label, window)
            | {
                "unit": _unit(config),
                "products": products,
                "emulated": bool(config.get("emulated")),
                "sample": bool(sample),
            }
        ),
        "script": asset("charts.js") + asset("report.js"),
    }
    # One pass, so that a "{{config}}" in a sample is not replaced.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], asset("report_template.html"))


def asset(name: str) -> str:
    return resources.files("octavo.tools").joinpath(name).read_text("utf-8")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file; a training run writes it into its folder") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _read_products(path: Path) -> list[dict[str, str]]:
    """Return the products with every field as text, for display."""
    products = _read_object(path).get("products")
    if not isinstance(products, list) or not all(isinstance(p, dict) and "name" in p for p in products):
        raise ValueError(f"{path}: 'products' must be a list of objects with a 'name'")
    fields = ("name", "op", "precision", "reason", "shapes", "formats", "where", "calls")
    return [{field: str(product.get(field, "")) for field in fields} for product in products]


def _label(run: Run, config: dict[str, Any]) -> str:
    precision = str(config.get("precision") or ("fp8" if run.names else "this run"))
    return precision.upper() if precision.lower() in ("fp8", "bf16", "fp16", "fp32") else precision


def _subtitle(config: dict[str, Any], label: str, compared: bool) -> str:
    words = [str(config[key]) for key in ("model", "size", "device") if config.get(key)]
    return " · ".join([*words, f"{label} against BF16, same seed" if compared else label])


def _status(run: Run, config: dict[str, Any]) -> tuple[str, str]:
    last_step, planned = int(run.steps[-1]), config.get("steps")
    if math.isnan(run.columns["loss"][-1]):
        return f"ended at step {last_step:,} without a finite loss", "bad"
    if isinstance(planned, int) and last_step < planned:
        return f"step {last_step:,} of {planned:,}", "warn"
    return f"complete, {last_step:,} of {planned:,} steps" if planned == last_step else f"step {last_step:,}", "good"


def final_loss(losses: Floats) -> float:
    """Return the mean of the last tenth of the steps with a finite loss; NaN if the last step has none."""
    tail = losses[-max(1, len(losses) // 10) :]
    return math.nan if math.isnan(tail[-1]) else float(np.nanmean(tail))


def loss_difference(run: Run, baseline: Run) -> float:
    """Return (run - baseline) / baseline of the final losses, over the steps that both runs took."""
    _, actual, expected = _paired_losses(run, baseline)
    if len(actual) == 0:
        return math.nan
    reference = final_loss(expected)
    return (final_loss(actual) - reference) / reference if reference else math.nan


def _paired_losses(run: Run, baseline: Run) -> tuple[Ints, Floats, Floats]:
    """Return the steps that both runs took and their losses; NaN in both where either has none."""
    steps, ours, theirs = np.intersect1d(run.steps, baseline.steps, return_indices=True)
    actual, expected = run.columns["loss"][ours], baseline.columns["loss"][theirs]
    both = np.isfinite(actual) & np.isfinite(expected)
    return steps, np.where(both, actual, np.nan), np.where(both, expected, np.nan)


def _chart_data(run: Run, baseline: Run | None, label: str, window: int) -> dict[str, Any]:
    compared = [(label, run)] if baseline is None else [(label, run), ("BF16", baseline)]
    runs = []
    for name, each in compared:
        lost = np.isnan(each.columns["loss"])
        lines = {key: line(each.steps, each.columns[key]) for key in COLUMNS if key != "tokens"}
        lines["smooth"] = line(each.steps, smooth(each.columns["loss"], window))
        marks = {"lost": spans(each.steps, lost), "skipped": spans(each.steps, each.skipped)}
        counts = {"lostCount": int(lost.sum()), "skippedCount": int(each.skipped.sum())}
        runs.append({"name": name, "lines": lines, **marks, **counts})
    difference = None
    if baseline is not None:
        difference = _difference(run, baseline, window)
    return {"runs": runs, "difference": difference, "scaling": scaling_series(run)}


def _difference(run: Run, baseline: Run, window: int) -> dict[str, list[Any]]:
    steps, actual, expected = _paired_losses(run, baseline)
    reference = smooth(expected, window)
    relative = smooth(actual, window) / np.where(reference, reference, np.nan) - 1
    # At the ends the average is over few steps, and their noise would set the axis for everything in between.
    ends = window // 2 if len(steps) > 2 * window else 0
    inner = slice(ends, len(steps) - ends)
    return line(steps[inner], relative[inner])


def _cards(
    run: Run,
    baseline: Run | None,
    label: str,
    config: dict[str, Any],
    products: list[dict[str, str]],
    summary: dict[str, dict[str, Any]],
) -> list[str]:
    losses, unit = run.columns["loss"], _unit(config)
    cards = [card("Final loss", _significant(final_loss(losses)), f"{unit}; mean of the last 10 % of steps")]
    cards += _held_out_cards(label, unit, summary)
    cards.append(card("Start loss", _significant(float(losses[0])), f"{unit}; at step {run.steps[0]:,}"))
    if baseline is not None:
        difference, expected = loss_difference(run, baseline), final_loss(baseline.columns["loss"])
        value = "no figure" if math.isnan(difference) else f"{100 * difference:+.2f} %"
        cards.append(card(f"{label} against BF16", value, f"final loss; BF16 reached {_significant(expected)}"))
    cards.append(_speed_card(run, baseline, summary.get(label.lower(), {})))
    tokens = run.columns["tokens"]
    seen = f"{np.nanmax(tokens):,.0f} tokens" if np.isfinite(tokens).any() else ""
    cards.append(card("Steps", f"{run.steps[-1]:,}", seen))
    lost = np.isnan(losses)
    broken = int((lost | run.skipped).sum())
    if broken:
        note = f"{lost.sum():,} without a finite loss, {run.skipped.sum():,} updates skipped"
        cards.append(card("Broken steps", f"{broken:,}", note, "bad"))
    if products:
        fp8_count = sum(product["precision"] == "fp8" for product in products)
        note = "why not the rest: in the table" if fp8_count < len(products) else "every matrix product"
        cards.append(card("Products in FP8", f"{fp8_count:,} of {len(products):,}", note))
    if run.names:
        cards.append(_saturation_card(run))
    device = str(config.get("device", ""))
    if config.get("emulated"):
        cards.append(card("FP8 arithmetic", "Emulated", f"{device}: FP8 values, not FP8 speed".lstrip(": "), "warn"))
    elif label == "FP8" and "emulated" in config:
        cards.append(card("FP8 arithmetic", "Native", device))
    return cards


def _unit(config: dict[str, Any]) -> str:
    return f"nats per {family_of(config.get('model')).predicts}"


def _held_out_cards(label: str, unit: str, summary: dict[str, dict[str, Any]]) -> list[str]:
    """Return the loss of a finished run on held-out text, and that of BF16."""
    losses = {name: _held_out(result) for name, result in summary.items() if "held_out_loss" in result}
    if label.lower() not in losses:
        return []
    ours, theirs = losses[label.lower()], losses.get("bf16", math.nan)
    note = f"{unit}; on text never trained on"
    if (before := summary[label.lower()].get("held_out_loss_before")) is not None:
        note += f"; {_significant(before)} before training"
    if label != "BF16" and "bf16" in losses:
        note += f"; BF16 {_significant(theirs)}"
        if math.isfinite(ours) and math.isfinite(theirs) and theirs:
            note += f", {100 * (ours / theirs - 1):+.2f} %"
    return [card("Held-out loss", _significant(ours), note)]


def _held_out(result: dict[str, Any]) -> float:
    value = result["held_out_loss"]
    return math.nan if value is None else float(value)


def _speed_card(run: Run, baseline: Run | None, result: dict[str, Any]) -> str:
    speed = _speed(run)
    note = "median over the steps"
    if baseline is not None:
        theirs = _speed(baseline)
        note = f"median; BF16 {theirs:,.0f} ({speed / theirs:.2f}x)" if theirs > 0 else note
    if isinstance(result.get("ms_per_step"), float):
        note = f"{result['ms_per_step']:,.1f} ms a step; {note}"
    return card("Speed", "–" if math.isnan(speed) else f"{speed:,.0f}", f"tokens per second; {note}")


def _speed(run: Run) -> float:
    """Return the median of the steps after the first ones, as the summary has it."""
    speeds = run.columns["tokens_per_s"]
    return _median(speeds[WARM_UP:] if len(speeds) > WARM_UP else speeds)


def _saturation_card(run: Run) -> str:
    shares = run.readings[:, :, SATURATED]
    shares = np.where(np.isfinite(shares), shares, -1)
    time, name = np.unravel_index(int(shares.argmax()), shares.shape)
    worst = float(shares[time, name])
    if worst <= 0:
        return card("Highest saturation", "0 %", "nothing clipped in any reading")
    where = f"{run.names[int(name)]}, step {run.scaling_steps[time]:,}"
    return card("Highest saturation", f"{100 * worst:.2g} %", where)


def _memory_cards(memories: list[RunMemory]) -> list[str]:
    peaks = {each.precision: each.measured.peak for each in memories}
    cards = []
    for memory in memories:
        peak, bf16 = memory.measured.peak, peaks.get("bf16")
        note = memory.against_plan or ("on a GPU" if peak is not None else f"on {memory.measured.device}")
        if memory.precision != "bf16" and peak and bf16:
            note += f"; {peak / bf16:.2f}x BF16's"
        cards.append(card(f"Peak memory, {memory.precision.upper()}", in_words(peak), note))
    return cards


def _memory_section(memories: list[RunMemory]) -> str:
    if not memories:
        return ""
    headings, rows = memory_rows(memories)
    head = "".join(f'<th scope=col class="number">{html.escape(heading)}</th>' for heading in headings)
    body = "\n".join(
        f"<tr><th scope=row>{html.escape(row[0])}</th>"
        + "".join(f'<td class="number">{html.escape(cell)}</td>' for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return asset("report_memory.html").replace("{{head}}", head).replace("{{body}}", body)


def _median(values: Floats) -> float:
    return float(np.nanmedian(values)) if np.isfinite(values).any() else math.nan


def _significant(value: float) -> str:
    return "not finite" if math.isnan(value) else f"{value:.4g}"


def card(label: str, value: str, note: str, tone: str = "") -> str:
    label, value, note = html.escape(label), html.escape(value), html.escape(note)
    return f'<div class="card {tone}"><dt>{label}</dt><dd>{value}<small title="{note}">{note}</small></dd></div>'


def flatten(config: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, dict) and value:
            pairs += flatten(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return pairs


def embed(data: dict[str, Any]) -> str:
    """Return JSON that is safe inside <script>: without a "<", nothing in it can close the element."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
