"""Terminal output of a run: the opening lines, a progress bar with a line every few steps, and the result."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from octavo.optim.step_memory import in_words
from octavo.support import check_fp8_support, leave_emulation_unannounced, require_tensor_cores
from octavo.training.data import ByteData
from octavo.training.learner import Sample
from octavo.training.settings import DTYPES, TrainSettings


class Display:
    """Output to a console: with a bar at the bottom of a terminal, lines alone in a file or a pipe."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._saturated = ""

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=True)

    def opening(self, settings: TrainSettings) -> None:
        if settings.precision == "fp8":
            self.say(f"FP8 training enabled with format: {settings.fp8.fp8_format.lower()}", "bold")
        else:
            self.say(f"FP8 training disabled: precision {settings.precision}", "bold")
        self.say(f"Using device: {settings.device} with dtype {DTYPES[settings.dtype]}", "bold")
        if settings.precision == "fp8" and why_emulated(settings):
            self.say(f"FP8 products are emulated: {why_emulated(settings)}", "dim")
            leave_emulation_unannounced(settings.device)

    def model_and_data(self, settings: TrainSettings, data: ByteData, folder: Path) -> None:
        self.say(f"Model: BDH {settings.size}, {settings.shape.parameter_count:,} parameters", "dim")
        if code := code_of(settings):
            self.say(f"Code: {code}", "dim")
        self.say(f"Data: {data}", "dim")
        tokens = f"{settings.batch} × {settings.seq} bytes"
        if settings.micro_batches > 1:
            tokens = f"{settings.micro_batches} × {tokens}"
        self.say(f"Steps: {settings.steps:,} of {tokens}, {settings.optimizer}, peak rate {settings.lr:g}", "dim")
        if settings.ranks > 1:
            own = settings.batch * settings.micro_batches // (settings.ranks * settings.own_micro_batches)
            share = f"{settings.own_micro_batches} × {own} × {settings.seq} bytes of a step"
            self.say(f"Ranks: {settings.ranks} by {settings.strategy}, each with {share}", "dim")
        self.say(f"Output: {folder}", "dim")

    @contextmanager
    def training(self, settings: TrainSettings, done: int) -> Iterator[None]:
        columns = (
            TextColumn(f"[bold]{settings.precision}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            self._progress = progress
            self._saturated = ""
            self._task = progress.add_task("", total=settings.steps, completed=done, figures="")
            yield
        self._progress = None

    def step(self, row: dict[str, Any], log: bool) -> None:
        """Advance the bar, and print a line if `log`."""
        if row.get("scaling"):
            worst = max(operand["saturated"] for operand in row["scaling"].values())
            self._saturated = f"  saturated {worst:.3%}"
            rescaled = fmean(operand["rescaled"] for operand in row["scaling"].values())
            if rescaled:  # delayed scales were too small, or far too large
                self._saturated += f"  rescaled {rescaled:.1%}"
        loss = "not finite (skipped)" if row["loss"] is None else f"{row['loss']:.4f}"
        figures = f"loss {loss}  {row['tokens_per_s']:,.0f} tokens/s{self._saturated}"
        if self._progress is not None:
            self._progress.update(self._task, advance=1, figures=figures)
        if log:
            norm = "not finite" if row["grad_norm"] is None else f"{row['grad_norm']:.3f}"
            self.say(f"step {row['step']:>5}  {figures}  rate {row['lr']:.2e}  gradient norm {norm}")

    def sample(self, sample: Sample | None) -> None:
        if sample is None:
            self.say("No sample: the model's logits are not finite", "red")
            return
        text = Text.assemble((printable(sample.prompt), "dim"), printable(sample.written))
        self.console.print(Panel(text, title="sample: a held-out line (dim), then the model", title_align="left"))

    def results(self, results: dict[str, dict[str, Any]], settings: TrainSettings) -> None:
        table = Table(title="Loss per byte (nats), and speed", title_justify="left")
        peaks = {name: peak_of(result) for name, result in results.items()}
        headings = ["precision", "last 10 % of steps", "held out", "tokens/s", "ms a step", "skipped steps"]
        for heading in [*headings, "peak memory"] if any(peaks.values()) else headings:
            table.add_column(heading, justify="left" if heading == "precision" else "right")
        for name, result in results.items():
            table.add_row(
                name,
                _loss(result["final_loss"]),
                _loss(result["held_out_loss"]),
                f"{result['tokens_per_s']:,.0f}",
                f"{result['ms_per_step']:,.1f}",
                str(result["skipped"]),
                *([in_words(peaks[name])] if any(peaks.values()) else []),
            )
        self.console.print(table)
        if "bf16" in results and "fp8" in results:
            for figure, words in (("final_loss", "final loss"), ("held_out_loss", "held-out loss")):
                ratio = results["fp8"][figure] / results["bf16"][figure] - 1
                if not math.isfinite(ratio):
                    continue  # the table says which of them is not finite
                self.say(f"FP8's {words} is {abs(ratio):.2%} {'above' if ratio > 0 else 'below'} BF16's", "bold")
            self.say(compare_speed(results["fp8"], results["bf16"], settings), "bold")


def printable(text: str) -> str:
    """Replace control bytes, which a fresh model writes and a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text.expandtabs(4))


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not finite"


def code_of(settings: TrainSettings) -> str:
    """Return the code that training runs through; empty for the model as it was written."""
    if settings.fused:
        return "fused FP8 layers"
    return "compiled by torch.compile" if settings.compile else ""


def peak_of(result: dict[str, Any]) -> int | None:
    """Return the peak memory of a training, if it was measured."""
    memory = result["memory"]
    return None if memory is None else memory["peak"]


def compare_speed(fp8: dict[str, Any], bf16: dict[str, Any], settings: TrainSettings) -> str:
    """Return one sentence with the ratios of speed and, where it was measured, of memory."""
    emulated = "Emulated " if why_emulated(settings) else ""
    ratio = fp8["tokens_per_s"] / bf16["tokens_per_s"]
    baseline = "BF16 with torch.compile" if settings.compile else "BF16"
    text = f"{emulated}FP8 trains {ratio:.2f}x as many tokens per second as {baseline}"
    ours, theirs = peak_of(fp8), peak_of(bf16)
    return f"{text}, in {ours / theirs:.2f}x the memory" if ours and theirs else text


def why_emulated(settings: TrainSettings) -> str:
    """Return why FP8 products are emulated; empty if they run on tensor cores."""
    if settings.fp8.emulate:
        return "as asked"
    support = check_fp8_support(settings.device)
    if not support:
        return support.reason
    try:
        require_tensor_cores(settings.device, settings.fp8.replace(emulate=False))
    except RuntimeError as error:
        return str(error).removeprefix("emulate=False: ")
    return ""
