"""Terminal output of a fine-tuning run: a bar with loss, speed, memory and time left, and a line now and then."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from octavo.optim.step_memory import in_words
from octavo.training.display import printable


class Display:
    """Output to a console: with a bar at the bottom of a terminal, lines alone in a file or a pipe."""

    def __init__(self, console: Console, device: str) -> None:
        self.console = console
        self.device = device
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=True)

    @contextmanager
    def training(self, steps: int, done: int, precision: str) -> Iterator[None]:
        columns = (
            TextColumn(f"[bold]{precision}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            self._progress = progress
            self._task = progress.add_task("", total=steps, completed=done, figures="")
            yield
        self._progress = None

    def step(self, row: dict[str, Any], log: bool) -> None:
        """Advance the bar, and print a line if `log`."""
        speed = f"{row['tokens_per_s']:,.0f} tokens/s"
        figures = f"loss {row['loss']:.4f}  {speed}  {in_words(used_memory(self.device))}"
        if self._progress is not None:
            self._progress.update(self._task, advance=1, figures=figures)
        if log:
            self.say(f"step {row['step']:>5}  {figures}  rate {row['lr']:.2e}  gradient norm {row['grad_norm']:.3f}")

    def held_out(self, step: int, loss: float) -> None:
        when = f"after step {step:,}" if step else "before training"
        self.say(f"held-out loss {loss:.4f} {when}", "bold")

    def sample(self, sample: dict[str, str]) -> None:
        text = Text.assemble((printable(sample["prompt"]), "dim"), printable(sample["written"]))
        self.console.print(Panel(text, title="sample: a held-out prompt (dim), then the model", title_align="left"))

    def results(self, result: dict[str, Any]) -> None:
        table = Table(title="Loss per token (nats)", title_justify="left")
        cells = {
            "last 10 % of steps": f"{result['final_loss']:.4f}",
            "held out, before": _loss(result["held_out_loss_before"]),
            "held out, after": _loss(result.get("held_out_loss")),
            "tokens/s": f"{result['tokens_per_s']:,.0f}",
        }
        for heading in cells:
            table.add_column(heading, justify="right")
        table.add_row(*cells.values())
        self.console.print(table)


def used_memory(device: str) -> int:
    """Return the peak of memory: of tensors on a GPU, of the process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
