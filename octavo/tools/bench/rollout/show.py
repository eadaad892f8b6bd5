"""Rollouts and GRPO's steps on the terminal, and as Markdown."""

from typing import Any

from rich.table import Table

from octavo.tools.bench.result import TIMED, model_title
from octavo.tools.bench.rollout.ways import OWN

ROLLOUT_HEADINGS = (
    *("", "slots", "tokens/s", "ms a step", "of the floor", "step of its floor", "at the data sheet", f"× {OWN}"),
    *("× generate", "gap", "trainer's gap", "greedy", "GiB", "standby GiB"),
)
GRPO_HEADINGS = (
    *("", "s a step", "rollout s", "training s", f"× {OWN}", "rollout ×", "training ×", "gap", "GiB", f"GiB × {OWN}"),
    "GiB × two copies",
)


def rollout_title(result: dict[str, Any]) -> str:
    """Return a title for a result of rollouts or of GRPO's steps."""
    sizes = result["rollout"]["sizes"]
    size, groups = sizes[0], sorted({each["group"] for each in sizes})  # fewer slots than --group are one group
    title = (
        f"{model_title(result['case'])}, completions of {size['new_tokens']:,} tokens, prompts of {size['prompt']:,} "
        f"in groups of {' and '.join(map(str, groups))}"
    )
    rates = result["rates"]
    if rates is None:
        return f"{title}, {size['slots']} sequences a step"
    return f"{title}; a copy: {rates['tb_per_s']:.3g} TB/s"


def rollout_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a timed row, below `ROLLOUT_HEADINGS`."""
    f, turn = row["figures"], row["turn"]
    fewer = turn["new_tokens"] != row["size"]["new_tokens"]
    return [
        row["name"] + (f" ({turn['new_tokens']} tokens)" if fewer else ""),
        str(row["size"]["slots"]),
        f"{f['tokens_per_s']:,.0f}",
        _number(f["step_s"] and f["step_s"] * 1e3, ".2f"),
        f"{f['floor_share']:.0%}",
        _number(f["step_share"], ".0%"),
        _number(f["datasheet_share"], ".0%"),
        *(_ratio(f[f"speedup_{name}"]) for name in (OWN, "generate")),
        _number(turn.get("gap"), ".4f"),
        _number(turn.get("trainer_gap"), ".4f"),
        _number(turn.get("agreement"), ".1%"),
        _number(turn["peak_gib"], ".1f"),
        _number(turn["standby_gib"], ".1f"),
    ]


def grpo_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a timed row, below `GRPO_HEADINGS`."""
    f = row["figures"]
    return [
        row["name"],
        *(f"{f[name]:.2f}" for name in ("step_s", "rollout_s", "train_s")),
        *(_ratio(f[f"speedup_{name}"]) for name in ("step_s", "rollout_s", "train_s")),
        f"{f['gap_mean']:.4f}",
        _number(f["peak_gib"], ".1f"),
        _ratio(f["memory"]),
        _ratio(f["memory_two_copies"]),
    ]


CELLS = {"rollout": (ROLLOUT_HEADINGS, rollout_cells), "grpo": (GRPO_HEADINGS, grpo_cells)}


def rollout_tables(result: dict[str, Any]) -> list[Table]:
    """Return the table of a result of either kind, for the terminal."""
    headings, cells = CELLS[result["kind"]]
    table = Table(title=f"{rollout_title(result)}, {result['device']}", title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", overflow="fold", no_wrap=i == 0)
    for row in result["rows"]:
        if row["status"] == TIMED:
            table.add_row(*cells(row))
    return [table]


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
