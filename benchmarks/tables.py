"""Write the tables of `docs/benchmarks.md` from the files in `benchmarks/results`.

    python benchmarks/tables.py

Each table stands between two markers, `<!-- NAME:begin -->` and `<!-- NAME:end -->`; the text around them is written by
hand. Every row of every file is shown, including the rows that lose or fail. `tests/benchmarks/test_tables.py` checks
that the page is current and that no result file is left unread.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from parity_summary import Baseline

from octavo.tools.bench.table import markdown, rollout_markdown, workload_markdown

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
BDH_WAYS = {
    "bdh-fp32": "FP32",
    "bdh-bf16": "BF16 autocast",
    "bdh-fp8": "FP8 autocast",
    "bdh-fused": "FP8, fused layers",
}


def read(pattern: str) -> list[dict[str, Any]]:
    """Results whose file name matches `pattern`, oldest first."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "| --- |" + " ---: |" * (len(headings) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def figures(row: dict[str, Any], formats: dict[str, str]) -> list[str]:
    """Cells of the named figures, each in its format."""
    return [format(row[name], how) for name, how in formats.items()]


def provenance(result: dict[str, Any], command: str) -> str:
    """GPU, date, versions and command, as one line above a table."""
    gpu = result.get("device") or result["gpu"]
    versions = result.get("versions") or {"torch": result["torch"], "transformers": result["transformers"]}
    software = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "transformers") if name in versions)
    return f"{gpu}, {result['date']}, {software}. `{command}`\n\n"


def steps() -> str:
    return markdown([result for result in read("*.json") if result.get("kind") == "step"])


def workloads() -> str:
    """Runs through padded and packed batches; without any, nothing."""
    return workload_markdown(
        [result for kind in ("padded", "packed", "trainer", "sft") for result in read(f"*-{kind}-*.json")]
    )


def rollouts() -> str:
    """Rollouts, and whole steps of GRPO; without any, nothing."""
    return rollout_markdown([result for kind in ("rollout", "grpo") for result in read(f"*-{kind}*.json")])


def longest_completions() -> str:
    """The longest completion of GRPO that fits; without a measurement, nothing."""
    parts = []
    for result in read("*-completions*.json"):
        formats = {"longest": ",", "planned": ",", "peak_gib": ".1f"}
        rows = [[row["way"], *figures(row, formats)] for row in result["rows"]]
        command = " ".join(result["command"]).split(" --out ")[0]
        heading = provenance(result, f"python benchmarks/{command}")
        parts.append(heading + table(["", "longest completion that fits", "planned", "peak, GiB"], rows))
    return "\n\n".join(parts)


def rl_smollm() -> str:
    """GRPO of SmolLM2: the gap by precision, and the reward of each run; without a measurement, nothing."""
    parts = []
    for result in read("*-rl-smollm*.json"):
        heading = provenance(result, f"python benchmarks/rl_smollm.py --model {result['model']}")
        formats = {"gap_mean": ".4f", "gap_p99": ".3f", "gap_k3": ".1e", "gap_exp": ".3f", "gap_clip": ".2%"}
        gaps = []
        for row in result["gap"]:
            ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}x"
            gaps.append([f"{row['way']}, rollout {row['rollout']}", ratio, *figures(row, formats)])
        names = ["mean", "p99", "k3", "mean exp", "past a clipping bound"]
        parts.append(heading + table(["trainer, rollout's products", "against BF16", *names], gaps))
        runs = [run for run in result["runs"] if "final" in run]
        rewards = [
            [f"{run['way']}, seed {run['seed']}", *figures(run, {"first": ".3f", "final": ".3f"})] for run in runs
        ]
        steps_of = f"{result['compared_steps']:,} steps of {result['settings']['prompts']} × "
        steps_of += f"{result['settings']['completions']} completions; means over a fifth of them:\n\n"
        parts.append(steps_of + table(["", "reward at first", "at last"], rewards))
    return "\n\n".join(parts)


def kernels() -> str:
    """Microseconds and the share of a copy's bandwidth, one row for each recipe and operand."""
    (result,) = (result for result in read("*-kernels.json"))
    layouts = ("rows", "columns", "both")
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in result["rows"]:
        key = (row["recipe"], row["operand"], "{:,} × {:,}".format(*row["shape"]))
        time = f"{row['seconds'] * 1e6:.0f} ({row['moved_share_of_equal_copy']:.0%})"
        cells.setdefault(key, {})[row["layout"]] = time
    rows = [
        [f"{recipe} {operand}", shape, *(times.get(layout, "–") for layout in layouts)]
        for (recipe, operand, shape), times in cells.items()
    ]
    heading = provenance(result, "octavo bench --preset 8b --kernels")
    return heading + table(["recipe, operand", "elements", *(f"{layout}, µs" for layout in layouts)], rows)


def frozen_products() -> str:
    (result,) = read("*-frozen-products.json")
    formats = {"fp8_ms": ".1f", "bf16_ms": ".1f", "fp8_gib": ".2f", "bf16_gib": ".2f"}
    rows = [[f"{row['model']}, {row['granularity']}", *figures(row, formats)] for row in result["results"]]
    headings = ["model, granularity", "FP8 products, ms", "BF16 products, ms", "FP8, GiB", "BF16, GiB"]
    return provenance(result, f"python benchmarks/{result['command']}") + table(headings, rows)


def longest() -> str:
    (result,) = read("*-longest.json")
    rows = [[row["way"], *figures(row, {"longest": ",", "planned": ",", "peak_gib": ".1f"})] for row in result["rows"]]
    command = " ".join(result["command"][: result["command"].index("--out")])
    heading = provenance(result, f"python benchmarks/{command}")
    return heading + table(["", "longest sequence that fits", "planned", "peak, GiB"], rows)


def load() -> str:
    (result,) = read("*-load.json")
    rows = []
    for row in result["rows"]:
        loading = row["loading"]
        sizes = (row["weights_bytes"], loading["device_peak_allocated"], loading["host_own"])
        rows.append([row["way"], f"{loading['seconds']:.1f}", *(f"{size / 2**30:.2f}" for size in sizes)])
    headings = ["granularity", "seconds", "weights, GiB", "GPU peak, GiB", "host, GiB"]
    return provenance(result, "python benchmarks/load.py --preset 8b --ways block") + table(headings, rows)


def first_step() -> str:
    """The first step and the median of the later ones, of the newest file; without any, nothing."""
    results = read("*-first-step.json")
    if not results:
        return ""
    rows = [
        [
            f"{row['way']}, {row['recipe']}, {row['cache']} cache",
            *figures(row, {"first": ".2f", "loading": ".1f"}),
            f"{median(row['later']):.3f}",
        ]
        for row in results[-1]["rows"]
    ]
    heading = provenance(results[-1], "python benchmarks/first_step.py --preset 8b")
    return heading + table(["", "first step, s", "loading, s", "later steps, s"], rows)


def one_rank() -> str:
    """Checks with NCCL on one rank; a later file replaces those that it made again. Without any, nothing."""
    results = read("*-one-rank*.json")
    if not results:
        return ""
    rows = {row["check"]: row for result in results for row in result["rows"]}
    return one_rank_table({**results[-1], "command": "python benchmarks/one_rank.py", "rows": list(rows.values())})


def one_rank_table(result: dict[str, Any]) -> str:
    rows = [
        [
            row["check"],
            "holds" if row["ok"] else f"fails: {row.get('error', 'see its figures')}",
            _one_rank_figures(row),
        ]
        for row in result["rows"]
    ]
    return provenance(result, result["command"].split(" --out ")[0]) + table(["check", "", "figures"], rows)


def _one_rank_figures(row: dict[str, Any]) -> str:
    """Say in words what a check has measured."""
    parts = ["losses are equal" if row["equal"] else "losses differ"] if "equal" in row else []
    for way, figures_of in row.get("ways", {}).items():
        if "error" in figures_of:
            parts.append(f"{way} failed: {figures_of['error']}")
        else:
            peak = "" if figures_of["peak_gib"] is None else f", {figures_of['peak_gib']:.1f} GiB"
            parts.append(f"{way} {figures_of['ms']:.1f} ms{peak}")
    for shard in row.get("rows", []):
        parts.append(f"{shard['recipe']} {shard['part']} {shard['us']:.1f} µs, {shard['of_a_copy']:.0%} of a copy")
    for name, text in {"host_ms": "{:.3f} ms of the host", "device_ms": "{:.3f} ms of the device"}.items():
        parts += [text.format(row[name])] if name in row else []
    parts += [f"{row['steps']} steps"] if "steps" in row else []
    parts += [f"{name}: {text}" for name, text in row.get("found", {}).items()]
    parts += [row["left_out"]] if "left_out" in row else []
    return "; ".join(parts)


def masters() -> str:
    """Ways to train BF16 weights; a later file replaces the rows that it measured again."""
    ways: dict[str, dict[str, Any]] = {}
    for result in sorted(read("*-masters*.json"), key=lambda result: -len(result["ways"])):
        ways |= {row["way"]: row for row in result["ways"]}
    formats = {"cosine with FP32 weights, autocast": ".3f", "moved in the first step": ".0%"}
    formats |= {"bytes a parameter": ".1f", "peak GiB": ".1f", "step ms": ".1f"}
    rows = [[name, *figures(row, formats)] for name, row in ways.items()]
    headings = ["weights", "cosine", "changed in a step", "bytes a parameter", "peak, GiB", "optimiser step, ms"]
    return f"{result['title']}. `python benchmarks/master_weights.py --size 1b`\n\n" + table(headings, rows)


def bdh_memory() -> str:
    (result,) = read("*-bdh-100m-memory.json")
    rows = [
        [f"{BDH_WAYS[row['code']]}, `{row['optimizer']}`", f"{row['peak_gib']:.1f}", f"{row['planned_gib']:.1f}"]
        for row in result["rows"]
    ]
    return provenance(result, "python benchmarks/bdh_memory.py") + table(["", "peak, GiB", "planned, GiB"], rows)


def parity() -> str:
    """Held-out loss of each run against BF16 with the same seed."""
    (result,) = read("*-parity.json")
    parts = []
    for name, task in result["tasks"].items():
        runs = [run for run in result["runs"] if run["task"] == name and run["status"] == "complete"]
        baseline = Baseline.of(runs)
        rows = []
        for run in runs:
            difference, in_bf16 = baseline.difference(run), run.get("held_out_loss_in_bf16")
            cells = [run["run"], f"{run['held_out_loss']:.4f}", "" if difference is None else f"{difference:+.2%}"]
            rows.append([*cells, "" if in_bf16 is None else f"{in_bf16:.4f}"])
        size = f"{runs[0]['parameters'] / 1e6:,.0f}M parameters"
        amount = f"{task['steps']:,} steps of {task['batch']} × {task['sequence']:,} {task['unit']}s"
        heading = f"**{name}, {size}, {amount}**: " + provenance(result, f"python benchmarks/parity.py --only {name}")
        parts.append(heading + table(["run", "held-out loss", "against BF16", "evaluated in BF16"], rows))
    return "\n\n".join(parts)


def autocast() -> str:
    (result,) = read("*-autocast-decoders.json")
    names = ("high precision", "converted", "autocast")
    rows = [
        [family, *(f"{losses[name]:.4f}" for name in names), f"{losses['autocast / converted']:.4f}"]
        for family, losses in result["losses"].items()
    ]
    heading = provenance(result, f"python benchmarks/autocast_decoders.py --seeds {result['seeds']}")
    return heading + table(["family", *names, "autocast / converted"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "steps": steps,
    "workloads": workloads,
    "rollouts": rollouts,
    "longest-completions": longest_completions,
    "rl-smollm": rl_smollm,
    "kernels": kernels,
    "frozen-products": frozen_products,
    "longest": longest,
    "first-step": first_step,
    "one-rank": one_rank,
    "load": load,
    "masters": masters,
    "bdh-memory": bdh_memory,
    "parity": parity,
    "autocast": autocast,
}


def with_tables(text: str) -> str:
    """`text` with everything between its markers written anew."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise ValueError(f"{PAGE.name}: needs {begin} and, after it, {end}, once each")
        before, rest = text.split(begin)
        after = rest.split(end)[1]
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    unknown = set(re.findall(r"<!-- ([\w-]+):begin -->", text)) - set(TABLES)
    if unknown:
        raise ValueError(f"{PAGE.name}: no table is called {', '.join(sorted(unknown))}")
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
