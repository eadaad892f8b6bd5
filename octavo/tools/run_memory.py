"""Memory of a training run by kind, as measured and as planned.

`octavo train` writes what it measured into `summary.json`; the plan is made here, from `config.json`, of runs on a GPU.
Both say the same things: gradients are those of all that is trained, and activations and temporary buffers what is left
of the peak.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from octavo.optim.step_memory import NOT_MEASURED, StepMemory, in_words
from octavo.tools.families import family_of
from octavo.training.run_folder import memory_of, read_config, read_summary


@dataclass(frozen=True)
class RunMemory:
    """Memory of one precision of a run. `planned`: None where there is no plan for it."""

    precision: str
    measured: StepMemory
    planned: StepMemory | None

    @property
    def columns(self) -> dict[str, StepMemory]:
        by_precision = {self.precision: self.measured}
        return by_precision if self.planned is None else {**by_precision, f"{self.precision}, planned": self.planned}

    @property
    def against_plan(self) -> str:
        """Difference to the plan as text; empty if there is nothing to compare."""
        if self.planned is None or self.planned.peak is None or self.measured.peak is None:
            return ""
        return f"planned {in_words(self.planned.peak)}, measured {self.measured.peak / self.planned.peak - 1:+.1%}"


def run_memories(config: Mapping[str, Any], summary: Mapping[str, Any]) -> list[RunMemory]:
    """Return the memory in each precision, from a run's `config.json` and `summary.json`."""
    memories = []
    for precision, result in summary.items():
        measured = memory_of(result)
        if measured is not None:
            planned = None if measured.peak is None else planned_memory({**config, "precision": precision})
            memories.append(RunMemory(precision, measured, planned))
    return memories


def planned_memory(config: Mapping[str, Any]) -> StepMemory | None:
    """Return the plan for a run, from its `config.json`; None where the plan does not cover it."""
    return family_of(config.get("model")).planned_run(config)


def memory_rows(memories: list[RunMemory]) -> tuple[list[str], list[list[str]]]:
    """Return headings, and a row for each kind and for the peak."""
    columns = {name: memory for each in memories for name, memory in each.columns.items()}
    kinds = next(iter(columns.values())).parts
    rows = [[kind, *(in_words(memory.parts[kind]) for memory in columns.values())] for kind in kinds]
    return ["", *columns], [*rows, ["peak", *(in_words(memory.peak) for memory in columns.values())]]


def show_memory(folder: Path, console: Console) -> None:
    """Print the memory of a finished run."""
    memories = run_memories(read_config(folder), read_summary(folder))
    if not memories:
        return
    headings, rows = memory_rows(memories)
    table = Table(title="Memory of a step", title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        if row[0] == "peak":
            table.add_section()
        table.add_row(*row)
    console.print(table)
    for each in memories:
        if each.measured.peak is None:
            console.print(f"The peak is {NOT_MEASURED} on {each.measured.device}: torch counts that of GPUs alone")
            return
        if each.against_plan:
            console.print(f"{each.precision}: {each.against_plan}")
