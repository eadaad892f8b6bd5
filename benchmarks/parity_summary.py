"""What `parity.py` found, as a Markdown table and, with `--png`, as curves.

    python benchmarks/parity_summary.py benchmarks/results/<date>-h200-parity.json --png parity.png
    python benchmarks/parity_summary.py part1.json part2.json --merged parity.json    # runs that went side by side

    spread     = largest - smallest held-out loss of the BF16 runs, which differ in rounding-sized noise only
    difference = held-out loss - mean of the BF16 runs
    allowed    = max(0.25 % of that mean, 2 × spread)

delayed, channel and block must stay within what is allowed; the other recipes are reported. A loss *lower* than BF16's
by more than that passes, and the table says so.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

SHARE = 0.0025
JUDGED = ("delayed", "channel", "block")
HEADINGS = (
    "recipe",
    "held-out loss",
    "difference",
    "allowed",
    "verdict",
    "underflow mean / max",
    "saturated mean / max",
    "ms a step",
)


def read_records(paths: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in paths]


def merge(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of runs that were done in several processes: the same experiment, on the same kind of machine."""
    whole = records[0] | {"tasks": {}, "runs": [], "not_run": [], "command": []}
    for record in records:
        for field in ("gpu", "versions", "corpus", "shared_gpu"):
            if record[field] != whole[field]:
                raise SystemExit(f"{field} differs: {record[field]} and {whole[field]}; these are two experiments")
        for name, task in record["tasks"].items():
            if whole["tasks"].setdefault(name, task) != task:
                raise SystemExit(f"{name} was not trained alike: {task} and {whole['tasks'][name]}")
        whole["runs"] += record["runs"]
        whole["not_run"] += record["not_run"]
        whole["command"].append(" ".join(record["command"]))
    whole["runs"].sort(key=lambda run: (list(whole["tasks"]).index(run["task"]), not is_bf16(run)))
    return whole


def summarise(record: dict[str, Any]) -> str:
    """One table for each task of a result file."""
    return "\n\n".join(task_table(record, name) for name in record["tasks"])


def task_table(record: dict[str, Any], name: str) -> str:
    task = record["tasks"][name]
    runs = [run for run in record["runs"] if run["task"] == name]
    bf16 = [run["held_out_loss"] for run in runs if is_bf16(run) and run["status"] == "complete"]
    mean = statistics.fmean(bf16) if bf16 else None
    spread = max(bf16) - min(bf16) if bf16 else 0.0
    allowed = max(SHARE * mean, 2 * spread) if mean else None
    complete = [run for run in runs if run["status"] == "complete"]
    held_out = f"{complete[0]['held_out_tokens']:,}" if complete else "no"
    size = f"{runs[0]['parameters'] / 1e6:,.0f}M parameters" if runs and "parameters" in runs[0] else ""
    vocabulary = f", a vocabulary of {task['shape']['vocab_size']:,}" if "vocab_size" in task["shape"] else ""
    lines = [
        f"**{name}**, {size}{vocabulary}: {task['steps']:,} steps of {task['batch']} × {task['sequence']:,} "
        f"{task['unit']}s, {held_out} held-out {task['unit']}s; {record['gpu']}, torch {record['versions']['torch']}, "
        f"{record['date']}.",
    ]
    if mean:
        lines[0] += f" BF16: mean {mean:.4f}, spread {spread:.4f} ({spread / mean:.3%}) over {len(bf16)} runs."
    if record["shared_gpu"]:
        lines[0] += " The GPU was shared, so the times are no measure of speed."
    lines += ["", "| " + " | ".join(HEADINGS) + " |", "|" + " --- |" * len(HEADINGS)]
    lines += ["| " + " | ".join(row(run, mean, allowed)) + " |" for run in runs]
    missing = [entry for entry in record["not_run"] if entry.split()[0] == name]
    if missing:
        lines += ["", f"Not run, for want of time: {', '.join(entry.split()[1] for entry in missing)}."]
    return "\n".join(lines)


def is_bf16(run: dict[str, Any]) -> bool:
    return run["run"].startswith("bf16")


def row(run: dict[str, Any], mean: float | None, allowed: float | None) -> tuple[str, ...]:
    speed = f"{run['ms_per_step']:.1f}" if "ms_per_step" in run else ""
    rates = tuple(
        f"{run[quantity]['mean']:.2%} / {run[quantity]['max']:.2%}" if quantity in run else ""
        for quantity in ("underflow", "saturated")
    )
    if run["status"] != "complete":
        return run["run"], "", "", "", verdict(run, mean, allowed), *rates, speed
    loss = run["held_out_loss"]
    relative = f"{(loss - mean) / mean:+.3%}" if mean else ""
    limit = f"{allowed / mean:.3%}" if mean and allowed and not is_bf16(run) else ""
    return run["run"], f"{loss:.4f}", relative, limit, verdict(run, mean, allowed), *rates, speed


def verdict(run: dict[str, Any], mean: float | None, allowed: float | None) -> str:
    if run["status"] == "nan":
        return f"**FAIL**: not finite at step {run['steps']}"
    if run["status"] == "error":
        return f"**ERROR**: {run['error'].splitlines()[0][:80]}"
    if run["status"] != "complete":
        return f"stopped at step {run['steps']}: {run['status']}"
    if is_bf16(run):
        return "baseline"
    if run["run"] not in JUDGED:
        return "reported"
    if mean is None or allowed is None:
        return "no BF16 run to compare with"
    difference = run["held_out_loss"] - mean
    if difference > allowed:
        return "**FAIL**"
    return "pass" if difference >= -allowed else "pass (better than BF16)"


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """For each task: the loss curves, and below them each curve's difference to the mean of the BF16 ones."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = [(record, name) for record in records for name in record["tasks"]]
    figure, axes = pyplot.subplots(2, len(columns), figsize=(7 * len(columns), 8), squeeze=False, sharex="col")
    for column, (record, name) in enumerate(columns):
        runs = [run for run in record["runs"] if run["task"] == name and "curve" in run]
        baseline = mean_curve([run for run in runs if is_bf16(run) and run["status"] == "complete"])
        for run in runs:
            style = {"color": "0.5", "linewidth": 1} if is_bf16(run) else {"linewidth": 1.2}
            points = [(s, v) for s, v in zip(run["curve"]["step"], run["curve"]["loss"], strict=True) if v is not None]
            axes[0, column].plot(*zip(*points, strict=True), label=run["run"], **style)
            relative = [(s, 100 * (v / baseline[s] - 1)) for s, v in points if s in baseline]
            if relative:
                axes[1, column].plot(*zip(*relative, strict=True), label=run["run"], **style)
        axes[0, column].set(title=name, ylabel="training loss, mean of 10 steps")
        axes[1, column].axhspan(-100 * SHARE, 100 * SHARE, color="0.92", zorder=0)
        axes[1, column].set(xlabel="step", ylabel="difference to the mean of BF16, %", ylim=(-1.5, 1.5))
        axes[0, column].legend()
    figure.suptitle(f"Loss parity, {records[0]['gpu']}, {records[0]['date']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def mean_curve(runs: list[dict[str, Any]]) -> dict[int, float]:
    """Loss by step, averaged over the runs."""
    if not runs:
        return {}
    losses = zip(*(run["curve"]["loss"] for run in runs), strict=True)
    return dict(zip(runs[0]["curve"]["step"], (statistics.fmean(values) for values in losses), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--png", type=Path, help="write the curves here")
    parser.add_argument("--merged", type=Path, help="take the files as parts of one, and write that here")
    options = parser.parse_args()
    records = read_records(options.results)
    if options.merged:
        records = [merge(records)]
        options.merged.write_text(json.dumps(records[0], indent=1) + "\n")
    print("\n\n".join(summarise(record) for record in records))
    if options.png:
        plot(records, options.png)


if __name__ == "__main__":
    main()
