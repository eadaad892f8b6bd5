"""Terminal output of a GRPO run: a bar with reward, KL, length, gap and speed, and a line now and then."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from octavo.training.display import printable


class Display:
    """Output to a console: with a bar at the bottom of a terminal, lines alone in a file or a pipe."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=True)

    @contextmanager
    def bar(self, name: str, steps: int, done: int = 0) -> Iterator[None]:
        """Show a bar of so many steps."""
        columns = (
            TextColumn(f"[bold]{name}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            self._progress = progress
            self._task = progress.add_task("", total=steps, completed=done, figures="")
            yield
        self._progress = None

    def advance(self, figures: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, advance=1, figures=figures)

    def watch_prompts(self, prompts: Iterable[dict[str, Any]], number: int) -> Iterator[dict[str, Any]]:
        """Yield prompts as they are made, and show a bar."""
        with self.bar("making prompts", number):
            for prompt in prompts:
                self.advance("")
                yield prompt

    def step(self, row: dict[str, Any], log: bool) -> None:
        """Advance the bar, and print a line if `log`."""
        kl = "–" if row["kl"] is None else f"{row['kl']:.3f}"
        figures = f"reward {row['reward']:.3f}  KL {kl}  length {row['length']:.1f}  gap {row['gap_mean']:.1e}"
        self.advance(figures)
        if log:
            speed = f"rollout {row['rollout_tokens_per_s']:,.0f} tokens/s  training {row['train_tokens_per_s']:,.0f}"
            self.say(f"step {row['step']:>4}  {figures}  {speed}{_counted(row)}")

    def results(self, result: dict[str, Any]) -> None:
        table = Table(title="Mean reward", title_justify="left")
        cells = {
            "before": f"{result['reward_before']:.3f}",
            "after": f"{result['reward_after']:.3f}",
            "first step": f"{result['reward_first']:.3f}",
            "last steps": f"{result['reward_last']:.3f}",
            "mean gap": f"{result['gap_mean']:.1e}",
            "rollout tok/s": f"{result['rollout_tokens_per_s']:,.0f}",
            "training tok/s": f"{result['train_tokens_per_s']:,.0f}",
        }
        for heading in cells:
            table.add_column(heading, justify="right")
        table.add_row(*cells.values())
        self.console.print(table)

    def samples(self, samples: Sequence[dict[str, Any]]) -> None:
        """Show some prompts with completions from before and after."""
        table = Table(title="Samples", title_justify="left")
        for heading in ("prompt", "before", "after"):
            table.add_column(heading, overflow="ellipsis", max_width=40)
        for sample in samples[:4]:
            before, after = (printable(sample[key]["text"]) for key in ("before", "after"))
            table.add_row(Text(printable(sample["prompt"][-200:])), Text(before), Text(after))
        self.console.print(table)


def _counted(row: dict[str, Any]) -> str:
    """Return what was counted in a step and is worth a word."""
    words = []
    if row["equal_groups"]:
        words.append(f"{row['equal_groups']} of {row['groups']} groups all equal")
    if row["unscored"]:
        words.append(f"{row['unscored']} without a reward")
    if row["left_out"] > row["unscored"]:
        words.append(f"{row['left_out'] - row['unscored']} cut off and not learned from")
    if row["truncated"] >= 0.5:
        words.append(f"{100 * row['truncated']:.0f} % ended by length")
    return f"  ({', '.join(words)})" if words else ""
