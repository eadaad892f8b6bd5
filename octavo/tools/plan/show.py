"""Output of a plan on the terminal, and as JSON."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from octavo.tools.plan import persistent
from octavo.tools.plan.advice import Advice
from octavo.tools.plan.fits import MOST
from octavo.tools.plan.gpus import Gpu
from octavo.tools.plan.timeline import GIB, KINDS, Memory
from octavo.tools.shapes import Case

PIPE_WIDTH = 80
BAR = 60
WIDE = 140  # from here on a table has all its columns
SHORT = ("wts", "grads", "states", "acts", "bufs")  # for KINDS
# Signs that can be told apart without colours.
SIGNS = dict(zip(KINDS, "█▓▒░·", strict=True))
COLOURS = dict(zip(KINDS, ("blue", "magenta", "yellow", "green", "red"), strict=True))


@dataclass(frozen=True)
class Plan:
    """A complete plan. `batches` and `sequences`: the largest and the longest of each option on `gpu`."""

    model: str
    case: Case
    memories: Sequence[Memory]
    gpu: Gpu | None
    batches: Sequence[int]
    sequences: Sequence[int]
    advice: Advice | None
    notes: Sequence[str]
    background: Sequence[str]


def show(console: Console, plan: Plan, everything: bool = False) -> None:
    """Print the short answer; or all options, with their memory by kind, and then the answer."""
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console = Console(file=console.file, width=PIPE_WIDTH)
    console.print(Text(title(plan.case), style="bold"))
    if everything:
        console.print(_table(plan, narrow=console.width < WIDE))
        console.print(_bars(plan, console.width), soft_wrap=True)
        for note in plan.background:
            console.print(Text(note, style="yellow"))
    if plan.advice is not None and plan.gpu is not None:
        _show_chosen(console, plan.advice, plan.gpu)
    for note in plan.notes:
        console.print(Text(note, style="yellow"))
    if not everything:
        console.print(_short_table(plan))
    if plan.advice is not None:
        _show_code(console, plan.advice)
    if not everything:
        console.print(Text(f"All {len(plan.memories)} options, and what takes their memory: --all", style="dim"))


def title(case: Case) -> str:
    size, what = case.family.describe(case)
    return (
        f"{case.name}, {size} parameters, {case.layers} layers: {what}, {case.tokens // case.seq} × {case.seq:,} tokens"
    )


def _table(plan: Plan, narrow: bool) -> Table:
    """Return a table that fits narrow terminals: short headings, no moment of the peak, names folded, figures uncut."""
    caption = "GiB at the moment of the peak; ×: of the first row's"
    if plan.gpu is not None:
        caption += f"; most: sequences that fit {plan.gpu.name}, {plan.gpu.room:.1f} GiB of tensors"
    if plan.sequences:
        caption += "; longest: tokens of one that fits alone"
    has_host = any(memory.host for memory in plan.memories)
    if has_host:
        caption += "; host: GiB of host memory"
    table = Table(caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.caption_justify = "left"
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
    baseline = plan.memories[0].peak.total
    section = ""
    for i, memory in enumerate(plan.memories):
        option, peak = memory.option, memory.peak
        if option.section != section:
            section = option.section
            table.add_section()
            table.add_row(Text(section, style="italic"))
        row = [f"{getattr(peak, kind) / GIB:.1f}" for kind in KINDS]
        row += [f"{memory.peak_gib:.1f}", f"{peak.total / baseline:.2f}", *([] if narrow else [peak.name])]
        row += [_batch(plan.batches[i])] if plan.batches else []
        row += [f"{plan.sequences[i]:,}" if plan.sequences[i] else "–"] if plan.sequences else []
        table.add_row(option.name, *row, *([f"{memory.host_gib:.1f}" if memory.host else ""] if has_host else []))
    return table


def _shown(plan: Plan) -> list[int]:
    """The short table's options: BF16, plain FP8, what takes least with ever more effort, and the advised one."""
    memories, family = plan.memories, plan.case.family
    plain = [i for i, memory in enumerate(memories) if not memory.option.section]
    on_gpu = [i for i, memory in enumerate(memories) if not memory.option.offload]

    def least(among: Sequence[int]) -> int:
        return min(among, key=lambda i: memories[i].peak.total)

    def index_of(code: str) -> int:
        options = [(i, memories[i].option) for i in plain]
        return next((i for i, o in options if o.code == code and o.weight_bytes == family.weight_bytes), 0)

    chosen = {
        0,
        index_of(family.advised[False][0]),
        index_of(family.advised[True][0]),
        least(plain),
        least(on_gpu),
        least(range(len(memories))),
    }
    if plan.advice is not None and plan.advice.option is not None:
        chosen |= {i for i, memory in enumerate(memories) if memory.option == plan.advice.option}
    return sorted(chosen)


def _short_table(plan: Plan) -> Table:
    host = any(plan.memories[i].host for i in _shown(plan))
    headings = {"GiB": "peak of a step", "×": "of the first row's"}
    if plan.gpu is not None:
        headings["most"] = f"sequences that fit {plan.gpu.name}"
    if plan.sequences:
        headings["longest"] = "tokens of one that fits alone"
    if host:
        headings["host"] = "GiB of host memory"
    caption = "; ".join(f"{name}: {meaning}" for name, meaning in headings.items())
    table = Table(caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.caption_justify = "left"
    table.add_column("", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    baseline = plan.memories[0].peak.total
    for i in _shown(plan):
        memory = plan.memories[i]
        cells = [f"{memory.peak_gib:.1f}", f"{memory.peak.total / baseline:.2f}"]
        cells += [_batch(plan.batches[i])] if plan.gpu is not None else []
        cells += [f"{plan.sequences[i]:,}" if plan.sequences[i] else "–"] if plan.sequences else []
        cells += [f"{memory.host_gib:.1f}" if memory.host else ""] if host else []
        advised = plan.advice is not None and memory.option == plan.advice.option
        table.add_row(memory.option.full_name, *cells, style="bold" if advised else "")
    return table


def _batch(batch: int) -> str:
    return "–" if not batch else f"≥ {MOST}" if batch >= MOST else str(batch)


def _bars(plan: Plan, columns: int) -> Text:
    """Return one bar for each option, split by kind, with a line where the GPU ends."""
    name_width = max(len(memory.option.name) for memory in plan.memories)
    bar = max(10, min(BAR, columns - name_width - 10))
    limit = None if plan.gpu is None else plan.gpu.room * GIB
    longest = max(memory.peak.total for memory in plan.memories)
    text = Text("\n")
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
        text.append(f"{memory.option.name:>{name_width}} ")
        cells = _cells(memory, longest, bar)
        end = None if limit is None else round(bar * limit / longest)
        for column, kind in enumerate(cells):
            if column == end:
                text.append("│", "bold")
            text.append(SIGNS[kind], COLOURS[kind])
        text.append(f" {memory.peak_gib:.1f}\n")
    return text


def _cells(memory: Memory, longest: int, bar: int) -> list[str]:
    """Return the kind of each cell of a bar. Rounding the ends of parts, not their lengths, keeps the sum right."""
    cells: list[str] = []
    so_far = 0
    for kind in KINDS:
        so_far += getattr(memory.peak, kind)
        cells += [kind] * (round(bar * so_far / longest) - len(cells))
    return cells


def _show_chosen(console: Console, advice: Advice, gpu: Gpu) -> None:
    if advice.option is None:
        console.print(Text(f"For {gpu.name}: {advice.why}.", style="bold red"))
        return
    console.print(Text(f"For {gpu.name}: {advice.option.full_name}, batch {advice.batch}: {advice.why}.", style="bold"))


def _show_code(console: Console, advice: Advice) -> None:
    if not advice.code:
        return
    console.print(Text(f"\n{folded(advice.code)}\n"), soft_wrap=True)
    if advice.check:
        console.print(Text(f"To measure its forward and backward:\n{folded(advice.check)}\n"), soft_wrap=True)


def folded(code: str) -> str:
    """Break a command's line after a backslash; lines of Python are short already."""
    if not code.startswith("octavo "):
        return code
    lines = textwrap.wrap(code, PIPE_WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    return " \\\n  ".join(lines)


def to_dict(plan: Plan) -> dict[str, Any]:
    case = plan.case
    return {
        "model": case.name,
        "mode": "lora" if case.frozen else "full",
        "batch": case.tokens // case.seq,
        "seq": case.seq,
        "layers": case.layers,
        "parameters": persistent.parameters(case),
        "rank": case.rank,
        "targets": case.targets if case.rank else None,
        "config": dict(case.config),
        "gpu": None if plan.gpu is None else _gpu_dict(plan.gpu),
        "options": [_option(memory, plan, i) for i, memory in enumerate(plan.memories)],
        "advice": None if plan.advice is None else asdict(plan.advice),
        "notes": [*plan.notes, *plan.background],
    }


def _option(memory: Memory, plan: Plan, number: int) -> dict[str, Any]:
    """Return an option's figures, in bytes except where a name says GiB."""
    return {
        "name": memory.option.full_name,
        "option": memory.option.to_dict(),
        "peak_gib": memory.peak_gib,
        "host_gib": memory.host_gib,
        "peak": memory.peak.to_dict(),
        "moments": [moment.to_dict() for moment in memory.moments],
        "kept_by_a_layer": dict(memory.saved),
        "largest_batch": plan.batches[number] if plan.gpu is not None else None,
        "longest_sequence": plan.sequences[number] if plan.sequences else None,
    }


def _gpu_dict(gpu: Gpu) -> dict[str, Any]:
    return {"name": gpu.name, "gib": gpu.gib, "has_fp8": gpu.has_fp8, "room_gib": gpu.room}
