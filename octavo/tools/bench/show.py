"""Results on the terminal."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from octavo.tools.bench.contenders import BASELINE, OWN_BASELINE
from octavo.tools.bench.gemm import KINDS
from octavo.tools.bench.result import TIMED, title
from octavo.tools.bench.rollout.show import rollout_tables
from octavo.tools.bench.workload_result import FASTER, steps_title, workload_title

PIPE_WIDTH = 180


def show(console: Console, result: dict[str, Any]) -> None:
    """Print the tables of a result of any kind, then the contenders without figures, and why."""
    tables = {
        "step": _step_tables,
        "gemm": _gemm_tables,
        "kernels": _kernel_tables,
        "rollout": rollout_tables,
        "grpo": rollout_tables,
    }.get(result["kind"], _workload_tables)
    # A file or a pipe has no width of its own, and rich would squeeze the tables into 80 columns.
    wide = console if console.is_terminal else Console(file=console.file, width=PIPE_WIDTH)
    for table in tables(result):
        wide.print(table)
    for row in result["rows"]:
        if row["status"] != TIMED:
            console.print(Text(f"{row['name']}: {row['status']}: {row['reason']}", style="yellow"), soft_wrap=True)
    if "workload" in result:
        _show_padded_calls(console, result["rows"])
    if result["device"] == "CPU":
        console.print(Text("FP8 is emulated on a CPU: these times say nothing about FP8 on a GPU.", style="bold"))


def _show_padded_calls(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        for turn in row.get("turns", ()):
            for reason, count in turn["padded_calls"].items():
                line = f"{row['name']}: padding computed in {count} calls: {reason}"
                console.print(Text(line, style="yellow"), soft_wrap=True)


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", overflow="fold", no_wrap=i == 0)
    return table


def _narrow(*headings: str) -> list[str]:
    return [heading.replace("-", "\n") for heading in headings]


def _step_tables(result: dict[str, Any]) -> list[Table]:
    case = result["case"]
    speed = _table(
        f"{title(case)}, {result['device']}: forward + backward{' + optimiser' if _is_whole(result) else ''}",
        (
            "",
            "ms",
            "min–max",
            "tokens/s",
            *_narrow(f"×-{BASELINE}", f"×-{OWN_BASELINE}"),
            "GiB",
            *_narrow(f"GiB ×-{BASELINE}"),
            "TFLOP/s",
            *_narrow("GEMM-floor"),
        ),
    )
    numbers = _table(
        f"Against BF16 on {min(case['layers'], 2)} layers; worst tensor's underflow and saturation in the timed steps",
        ("", "loss", "gradient cosine", "underflow", "saturated"),
    )
    for row in result["rows"]:
        if row["status"] == TIMED:
            f = row["figures"]
            speed.add_row(
                row["name"],
                f"{f['step_s'] * 1e3:.1f}",
                f"{f['fastest_s'] * 1e3:.1f}–{f['slowest_s'] * 1e3:.1f}",
                f"{f['tokens_per_s']:,.0f}",
                ratio(f[f"speedup_{BASELINE}"]),
                ratio(f[f"speedup_{OWN_BASELINE}"]),
                "–" if f["peak_gib"] is None else f"{f['peak_gib']:.1f}",
                ratio(f.get(f"memory_{BASELINE}")),
                f"{f['tflops']:.3g}",
                "–" if f["gemm_floor_share"] is None else f"{f['gemm_floor_share']:.0%}",
            )
        if row.get("check"):
            rates = row.get("figures", {}).get("scaling", {})
            numbers.add_row(
                row["name"],
                _number(row["check"]["loss_difference"], "+.3%"),
                _number(row["check"]["cosine"], ".4f"),
                worst_rates(rates, "underflow"),
                worst_rates(rates, "saturated"),
            )
    return [speed, numbers]


def _workload_tables(result: dict[str, Any]) -> list[Table]:
    with_peft = any(row["name"] == "peft" and row["status"] == TIMED for row in result["rows"])
    table = _table(
        f"{workload_title(result)}, {result['device']}: {steps_title(result)}",
        (
            "",
            "compiled",
            "real tokens/s",
            *_narrow(f"×-{FASTER}", f"×-{OWN_BASELINE}"),
            *(_narrow("×-peft") if with_peft else ()),
            "ms",
            *_narrow("slowest-after 3", "s with-warm-up"),
            "GiB",
            *_narrow(f"GiB ×-{FASTER}"),
            "last loss",
            *_narrow("gradient-cosine"),
        ),
    )
    for row in result["rows"]:
        if row["status"] != TIMED:
            continue
        f = row["figures"]
        table.add_row(
            row["name"],
            "yes" if row["compile"] else "no",
            f"{f['tokens_per_s']:,.0f}",
            ratio(f[f"speedup_{FASTER}"]),
            ratio(f[f"speedup_{OWN_BASELINE}"]),
            *([ratio(f["speedup_peft"])] if with_peft else []),
            f"{f['step_s'] * 1e3:.1f}",
            f"{f['slowest_s'] * 1e3:.1f}",
            f"{f['whole_s']:.1f}",
            "–" if f["peak_gib"] is None else f"{f['peak_gib']:.1f}",
            ratio(f[f"memory_{FASTER}"]),
            f"{f['loss']:.4f}",
            _number(row["check"]["cosine"], ".4f"),
        )
    return [table]


def _is_whole(result: dict[str, Any]) -> bool:
    return any(row.get("optimizer") for row in result["rows"])


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def worst_rates(rates: dict[str, dict[str, float]], which: str) -> str:
    """Return the rates of the worst tensor for each operand."""
    return "  ".join(f"{operand} {rate[f'{which}_max']:.2%}" for operand, rate in rates.items()) or "–"


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def _gemm_tables(result: dict[str, Any]) -> list[Table]:
    ceilings = result["ceilings"]
    fp8 = "not measured (no FP8 tensor cores)" if ceilings["fp8"] is None else f"{ceilings['fp8']:.4g}"
    title = f"TFLOP/s (× BF16, share of the FP8 ceiling). Ceilings of this run: BF16 {ceilings['bf16']:.4g}, FP8 {fp8}"
    table = _table(title, ("", "M × N × K", "BF16", "cuBLAS FP8", *KINDS))
    by_product: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        by_product.setdefault(f"{row['linear']} {row['which']}", {})[row["kind"]] = row
    for name, kinds in by_product.items():
        row = next(iter(kinds.values()))
        rates = [row["fp8"], *(kinds[kind]["tflops"] for kind in KINDS)]
        table.add_row(
            name,
            f"{row['m']} × {row['n']} × {row['k']}",
            f"{row['bf16']:.4g}",
            *(_rate(rate, row["bf16"], ceilings["fp8"]) for rate in rates),
        )
    return [table]


def _rate(rate: float | None, bf16: float, ceiling: float | None) -> str:
    if rate is None:
        return "–"
    return f"{rate:.4g} ({rate / bf16:.2f}x" + ("" if ceiling is None else f", {rate / ceiling:.0%}") + ")"


def _kernel_tables(result: dict[str, Any]) -> list[Table]:
    table = _table(
        f"Quantising. A copy on this device: {result['copy_tb_per_s']:.3g} TB/s. "
        "Of copy: every byte counted once; moved: as often as the passes move it; of equal: against a copy of as much",
        ("recipe", "operand", "layout", "shape", "µs", "TB/s", "of copy", "moved", "of equal"),
    )
    for row in result["rows"]:
        if row["status"] != TIMED:
            continue
        table.add_row(
            row["recipe"],
            row["operand"],
            row["layout"],
            " × ".join(map(str, row["shape"])),
            f"{row['seconds'] * 1e6:.1f}",
            f"{row['tb_per_s']:.3g}",
            f"{row['share_of_copy']:.0%}",
            f"{row['moved_share_of_copy']:.0%}",
            f"{row['moved_share_of_equal_copy']:.0%}" if "moved_share_of_equal_copy" in row else "–",
        )
    return [table]
