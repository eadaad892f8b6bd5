"""A plan on the terminal, and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from octavo.tools.bench.cases import Case
from octavo.tools.plan import standing
from octavo.tools.plan.advice import Advice
from octavo.tools.plan.gpus import MOST, Gpu
from octavo.tools.plan.moments import GIB, KINDS, Memory

PIPE_WIDTH = 140
BAR = 60
SHORT = ("wts", "grads", "states", "acts", "bufs")  # for KINDS
# Signs that can be told apart without colours.
SIGNS = dict(zip(KINDS, "█▓▒░·", strict=True))
COLOURS = dict(zip(KINDS, ("blue", "magenta", "yellow", "green", "red"), strict=True))


@dataclass(frozen=True)
class Plan:
    """All that was found. `batches` and `sequences`: the largest and the longest of each option on `gpu`."""

    model: str
    case: Case
    memories: Sequence[Memory]
    gpu: Gpu | None
    batches: Sequence[int]
    sequences: Sequence[int]
    advice: Advice | None
    notes: Sequence[str]


def show(console: Console, plan: Plan) -> None:
    # A file or a pipe has no width of its own, and rich would squeeze the table into 80 columns.
    wide = console if console.is_terminal else Console(file=console.file, width=PIPE_WIDTH)
    wide.print(_table(plan, narrow=wide.width < PIPE_WIDTH))
    wide.print(_bars(plan), soft_wrap=True)
    for note in plan.notes:
        wide.print(Text(note, style="yellow"))
    if plan.advice is not None and plan.gpu is not None:
        _show_advice(wide, plan.advice, plan.gpu)


def title(case: Case) -> str:
    what = f"LoRA of rank {case.rank} on {case.targets} linears" if case.frozen else "full fine-tuning"
    what = "training" if case.is_bdh else what
    count = standing.parameters(case)
    size = f"{count / 1e6:.0f} million" if case.is_bdh else f"{count / 1e9:.2f} billion"
    return (
        f"{case.name}, {size} parameters, {case.layers} layers: {what}, {case.tokens // case.seq} × {case.seq:,} tokens"
    )


def _table(plan: Plan, narrow: bool) -> Table:
    """Narrow: with short headings, and without the moment of the peak; names are folded, figures never cut."""
    caption = "GiB at the moment of the peak; ×: of the first row's"
    if plan.gpu is not None:
        caption += f"; most: sequences that fit {plan.gpu.name}, {plan.gpu.room:.1f} GiB of tensors"
    if plan.sequences:
        caption += "; longest: tokens of one that fits alone"
    has_host = any(memory.host for memory in plan.memories)
    if has_host:
        caption += "; host: GiB of host memory"
    table = Table(title=title(plan.case), caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    headings = [
        *(SHORT if narrow else KINDS),
        "peak",
        "×",
        *([] if narrow else ["at"]),
        *(["most"] if plan.gpu else []),
        *(["longest"] if plan.sequences else []),
        *(["host"] if has_host else []),
    ]
    table.add_column("", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "at" else "right", no_wrap=True)
    first = plan.memories[0].peak.total
    section = ""
    for i, memory in enumerate(plan.memories):
        option, peak = memory.option, memory.peak
        if option.section != section:
            section = option.section
            table.add_section()
            table.add_row(Text(section, style="italic"))
        row = [f"{getattr(peak, kind) / GIB:.1f}" for kind in KINDS]
        row += [f"{memory.peak_gib:.1f}", f"{peak.total / first:.2f}", *([] if narrow else [peak.name])]
        row += [_batch(plan.batches[i])] if plan.batches else []
        row += [f"{plan.sequences[i]:,}" if plan.sequences[i] else "–"] if plan.sequences else []
        table.add_row(option.name, *row, *([f"{memory.host_gib:.1f}" if memory.host else ""] if has_host else []))
    return table


def _batch(batch: int) -> str:
    return "–" if not batch else f"≥ {MOST}" if batch >= MOST else str(batch)


def _bars(plan: Plan) -> Text:
    """One bar for each option, split by kind; a line where the GPU ends."""
    limit = None if plan.gpu is None else plan.gpu.room * GIB
    longest = max(memory.peak.total for memory in plan.memories)
    width = max(len(memory.option.name) for memory in plan.memories)
    text = Text("\n" + " " * (width + 1))
    for kind in KINDS:
        text.append(f"{SIGNS[kind]} ", COLOURS[kind]).append(f"{kind}  ")
    if limit is not None and limit < longest:
        text.append("│ end of the GPU")
    text.append("\n")
    section = ""
    for memory in plan.memories:
        if memory.option.section != section:
            section = memory.option.section
            text.append(section + "\n", "italic")
        text.append(f"{memory.option.name:>{width}} ")
        cells = _cells(memory, longest)
        end = None if limit is None else round(BAR * limit / longest)
        for place, kind in enumerate(cells):
            if place == end:
                text.append("│", "bold")
            text.append(SIGNS[kind], COLOURS[kind])
        text.append(f" {memory.peak_gib:.1f}\n")
    return text


def _cells(memory: Memory, longest: int) -> list[str]:
    """The kind of each cell of a bar. Rounding the ends of parts, not their lengths, keeps the whole right."""
    cells: list[str] = []
    so_far = 0
    for kind in KINDS:
        so_far += getattr(memory.peak, kind)
        cells += [kind] * (round(BAR * so_far / longest) - len(cells))
    return cells


def _show_advice(console: Console, advice: Advice, gpu: Gpu) -> None:
    if advice.option is None:
        console.print(Text(f"For {gpu.name}: {advice.why}.", style="bold red"))
        return
    chosen = f"For {gpu.name}: {advice.option.full_name}, batch {advice.batch}: {advice.why}."
    console.print(Text(chosen, style="bold"))
    console.print()
    console.print(Text(advice.code), soft_wrap=True)
    if advice.check:
        console.print(Text(f"\nTo measure its forward and backward:\n{advice.check}"), soft_wrap=True)


def to_dict(plan: Plan) -> dict[str, Any]:
    case = plan.case
    return {
        "model": case.name,
        "mode": "lora" if case.frozen else "full",
        "batch": case.tokens // case.seq,
        "seq": case.seq,
        "layers": case.layers,
        "parameters": standing.parameters(case),
        "rank": case.rank,
        "targets": case.targets if case.rank else None,
        "config": dict(case.config),
        "gpu": None if plan.gpu is None else {**asdict(plan.gpu), "room_gib": plan.gpu.room},
        "options": [_option(memory, plan, i) for i, memory in enumerate(plan.memories)],
        "advice": None if plan.advice is None else asdict(plan.advice),
        "notes": list(plan.notes),
    }


def _option(memory: Memory, plan: Plan, number: int) -> dict[str, Any]:
    """In bytes, but for what says GiB."""
    return {
        "name": memory.option.full_name,
        "option": asdict(memory.option),
        "peak_gib": memory.peak_gib,
        "host_gib": memory.host_gib,
        "peak": memory.peak.to_dict(),
        "moments": [moment.to_dict() for moment in memory.moments],
        "kept_by_a_layer": dict(memory.kept),
        "largest_batch": plan.batches[number] if plan.gpu is not None else None,
        "longest_sequence": plan.sequences[number] if plan.sequences else None,
    }
