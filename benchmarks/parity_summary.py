"""Summary of `parity.py`'s results as a Markdown table and, with `--png`, as curves.

    python benchmarks/parity_summary.py benchmarks/results/<date>-h200-parity.json --png parity.png
    python benchmarks/parity_summary.py part1.json part2.json --merged parity.json    # runs that went side by side

    difference = held-out loss - mean of the BF16 runs of the same seed
    spread     = largest - smallest held-out loss of BF16 with different seeds; where there is one seed only, of the
                 BF16 runs that differ in rounding-sized noise
    allowed    = max(0.25 % of the mean, 2 × spread)

A run with another optimiser, as `bf16+adamw4bit`, is held against the same run with AdamW: 1 % is allowed.
delayed, channel and block must stay within what is allowed, on average over the seeds they were run with; the other
recipes are reported. A loss *lower* than BF16's by more than that passes, and the table says so. `evaluated in BF16` is
the difference when what was trained in FP8 is then run in BF16.
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARE = 0.0025
OPTIMIZER_SHARE = 0.01
JUDGED = ("delayed", "channel", "block")
HEADINGS = (
    "recipe",
    "held-out loss",
    "difference",
    "allowed",
    "verdict",
    "evaluated in BF16",
    "underflow mean / max",
    "saturated mean / max",
    "ms a step",
)


def read_records(paths: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in paths]


def merge(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one record of runs done in several processes: the same experiment, on the same kind of machine."""
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
    """Return one table for each task of a result file."""
    return "\n\n".join(task_table(record, name) for name in record["tasks"])


@dataclass(frozen=True)
class Baseline:
    """BF16's held-out loss by seed, the scatter that differences are judged by, and its source."""

    by_seed: dict[int, float]
    spread: float
    source: str

    @classmethod
    def of(cls, runs: list[dict[str, Any]]) -> "Baseline":
        losses: dict[int, list[float]] = {}
        for run in runs:
            if is_bf16(run) and run["status"] == "complete":
                losses.setdefault(seed_of(run), []).append(run["held_out_loss"])
        by_seed = {seed: statistics.fmean(values) for seed, values in losses.items()}
        scatter = list(by_seed.values()) if len(by_seed) > 1 else losses.get(0, [0.0])
        source = f"{len(by_seed)} seeds" if len(by_seed) > 1 else f"{len(scatter)} runs with noise"
        return cls(by_seed, max(scatter) - min(scatter), source)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed.values())

    @property
    def allowed(self) -> float:
        """Return the allowed difference as a share of the mean."""
        return max(SHARE, 2 * self.spread / self.mean)

    def difference(self, run: dict[str, Any]) -> float | None:
        """Return the difference to BF16 with the same seed, as a share; None if there is nothing to compare."""
        exact = self.by_seed.get(seed_of(run))
        return None if exact is None or run["status"] != "complete" else run["held_out_loss"] / exact - 1


def task_table(record: dict[str, Any], name: str) -> str:
    task = record["tasks"][name]
    runs = [run for run in record["runs"] if run["task"] == name]
    baseline = Baseline.of(runs)
    complete = [run for run in runs if run["status"] == "complete"]
    held_out = f"{complete[0]['held_out_tokens']:,}" if complete else "no"
    size = f"{runs[0]['parameters'] / 1e6:,.0f}M parameters" if runs and "parameters" in runs[0] else ""
    vocabulary = f", a vocabulary of {task['shape']['vocab_size']:,}" if "vocab_size" in task["shape"] else ""
    lines = [
        f"**{name}**, {size}{vocabulary}: {task['steps']:,} steps of {task['batch']} × {task['sequence']:,} "
        f"{task['unit']}s, {held_out} held-out {task['unit']}s; {record['gpu']}, torch {record['versions']['torch']}, "
        f"{record['date']}.",
    ]
    if baseline.by_seed:
        share = baseline.spread / baseline.mean
        lines[0] += (
            f" BF16: mean {baseline.mean:.4f}, spread {baseline.spread:.4f} ({share:.3%}) over {baseline.source}."
        )
    if record["shared_gpu"]:
        lines[0] += " The GPU was shared, so the times are no measure of speed."
    lines += ["", "| " + " | ".join(HEADINGS) + " |", "|" + " --- |" * len(HEADINGS)]
    lines += ["| " + " | ".join(row(run, runs, baseline)) + " |" for run in runs]
    missing = [entry for entry in record["not_run"] if entry.split()[0] == name]
    if missing:
        lines += ["", f"Not run, for want of time: {', '.join(entry.split()[1] for entry in missing)}."]
    return "\n".join(lines)


def is_bf16(run: dict[str, Any]) -> bool:
    return run["run"].startswith("bf16") and "+" not in run["run"]


def recipe_of(run: dict[str, Any]) -> str:
    return run["run"].partition("-seed")[0]


def seed_of(run: dict[str, Any]) -> int:
    return int(run["run"].partition("-seed")[2] or 0)


def row(run: dict[str, Any], runs: list[dict[str, Any]], baseline: Baseline) -> tuple[str, ...]:
    speed = f"{run['ms_per_step']:.1f}" if "ms_per_step" in run else ""
    rates = tuple(
        f"{run[quantity]['mean']:.2%} / {run[quantity]['max']:.2%}" if quantity in run else ""
        for quantity in ("underflow", "saturated")
    )
    difference = baseline.difference(run)
    in_bf16, exact = run.get("held_out_loss_in_bf16"), baseline.by_seed.get(seed_of(run))
    return (
        run["run"],
        f"{run['held_out_loss']:.4f}" if run["status"] == "complete" else "",
        "" if difference is None else f"{difference:+.3%}",
        "" if difference is None or is_bf16(run) else f"{baseline.allowed:.3%}",
        verdict(run, runs, baseline),
        "" if in_bf16 is None or exact is None else f"{in_bf16 / exact - 1:+.3%}",
        *rates,
        speed,
    )


def _verdict_of_optimizer(run: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    recipe, _, seed = run["run"].partition("-seed")
    plain = recipe.partition("+")[0] + (f"-seed{seed}" if seed else "")
    other = next((each for each in runs if each["run"] == plain and each["status"] == "complete"), None)
    if other is None:
        return f"no {plain} to compare with"
    difference = run["held_out_loss"] / other["held_out_loss"] - 1
    return f"{'pass' if difference <= OPTIMIZER_SHARE else '**FAIL**'}: {difference:+.3%} to AdamW"


def verdict(run: dict[str, Any], runs: list[dict[str, Any]], baseline: Baseline) -> str:
    if run["status"] == "nan":
        return f"**FAIL**: not finite at step {run['steps']}"
    if run["status"] == "error":
        return f"**ERROR**: {run['error'].splitlines()[0][:80]}"
    if run["status"] != "complete":
        return f"stopped at step {run['steps']}: {run['status']}"
    if is_bf16(run):
        return "baseline"
    if "+" in run["run"]:
        return _verdict_of_optimizer(run, runs)
    if recipe_of(run) not in JUDGED:
        return "reported"
    by_seed: dict[int, list[float]] = {}
    for other in runs:
        difference = baseline.difference(other)
        if recipe_of(other) == recipe_of(run) and difference is not None:
            by_seed.setdefault(seed_of(other), []).append(difference)
    if not by_seed:
        return "no BF16 run to compare with"
    mean = statistics.fmean(statistics.fmean(alike) for alike in by_seed.values())
    said = f" ({mean:+.3%} over {len(by_seed)} seeds)" if len(by_seed) > 1 else ""
    if mean > baseline.allowed:
        return f"**FAIL**{said}"
    return f"pass{said}" if mean >= -baseline.allowed else f"pass (better than BF16){said}"


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Plot, for each task, the loss curves and each curve's difference to the mean of the BF16 ones."""
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
    """Return the loss by step, averaged over the runs."""
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
