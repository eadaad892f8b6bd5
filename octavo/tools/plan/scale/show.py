"""Output of a plan for several GPUs, on the terminal and as JSON."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from octavo.tools.plan import persistent
from octavo.tools.plan.scale.plan import AtScale, Row, ScalePlan
from octavo.tools.plan.show import PIPE_WIDTH, title
from octavo.tools.plan.timeline import GIB
from octavo.training.errors import UserError
from octavo.training.files import write_json

HEADINGS = {
    "GiB": "peak of a GPU",
    "gather": "GB that a GPU sends in a step, of weights",
    "reduce": "of gradients",
    "amax": "MB of maxima",
    "comm": "ms of communication",
    "ms": "a step",
    "×": "of the first that fits",
}


def run_scale_plan(plan: ScalePlan, *, json: Path | None, console: Console) -> None:
    """Print the plan; write JSON if asked."""
    if json is not None and (json.is_dir() or not json.parent.is_dir()):
        raise UserError(f"--json {json}: a file in a folder that exists is needed")
    show_scale(console, plan)
    if json is not None:
        write_json(json, to_dict(plan), "free some space or choose another --json")
        console.print(Text(f"Figures: {json}"), soft_wrap=True)


def show_scale(console: Console, plan: ScalePlan) -> None:
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console = Console(file=console.file, width=PIPE_WIDTH)
    request = plan.request
    console.print(Text(f"{title(request.case)} on each GPU, {request.strategy}, {request.device.name}", style="bold"))
    for at in plan.at:
        _show_at(console, at)
    console.print(Text("; ".join(f"{name}: {meaning}" for name, meaning in HEADINGS.items()), style="dim"))
    console.print(Text("\nAssumed, not measured on several GPUs: ratios mean more than milliseconds.", style="yellow"))
    for line in _assumptions(plan):
        console.print(Text(f"- {line}"))


def _show_at(console: Console, at: AtScale) -> None:
    console.print()
    gpus = "1 GPU" if at.gpus == 1 else f"{at.gpus:,} GPUs"
    if at.advice.row is None:
        console.print(Text(f"{gpus}: nothing fits. {at.advice.why}", style="bold red"))
    else:
        console.print(Text(f"{gpus}: {at.advice.row.way.name}: {at.advice.why}", style="bold"))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", overflow="fold")
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in at.rows:
        style = "bold" if row is at.advice.row else "" if row.fits else "dim"
        table.add_row(row.way.name + ("" if row.fits else " (too large)"), *_cells(row, at.baseline), style=style)
    console.print(table)
    if at.others:
        others = [
            f"{strategy} {1e3 * row.step.seconds:,.0f} ms and {row.memory.peak_gib:.1f} GiB ({row.way.name})"
            for strategy, row in at.others
        ]
        console.print(Text(f"Other strategies: {'; '.join(others)}."))


def _cells(row: Row, baseline: Row | None) -> list[str]:
    step, wire = row.step, row.step.wire
    sent = [_short(wire.gather / 1e9), _short(wire.reduce / 1e9), _short(wire.amax / 1e6)]
    times = [f"{1e3 * step.communication:,.0f}", f"{1e3 * step.seconds:,.0f}"] if row.fits else ["–", "–"]
    ratio = f"{baseline.step.seconds / step.seconds:.2f}" if row.fits and baseline is not None else "–"
    return [f"{row.memory.peak_gib:.1f}", *sent, *times, ratio]


def _short(value: float) -> str:
    """Return three digits or so; 0 as a dash."""
    return "–" if not value else f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _assumptions(plan: ScalePlan) -> list[str]:
    request = plan.request
    lines = request.assumed.in_words(request.case, request.gpus)
    about = {
        "ddp": "Buckets are a second copy of the gradients; gradient_as_bucket_view=True saves them.",
        "fsdp2": "Units: each layer, the head, and the root with the embedding, which stays gathered. Gathered in BF16 "
        "and reduced in FP32 where a row says nothing else.",
        "zero3": "Gathered and reduced in BF16, master weights in FP32. DeepSpeed has no door for FP8 on the wire.",
    }[request.strategy]
    trained = {
        "ddp": "BF16 weights with FP32 masters",
        "fsdp2": "FP32 weights in shards, which are gathered in BF16 (MixedPrecisionPolicy)",
        "zero3": "BF16 weights with FP32 masters",
    }[request.strategy]
    weights = [] if request.case.frozen else [f"{trained}, AdamW with FP32 states, in every row."]
    return [*lines, *([about] if max(request.gpus) > 1 else []), *weights]


def to_dict(plan: ScalePlan) -> dict[str, Any]:
    """Return all figures: bytes and seconds, except where a name says otherwise."""
    request, case = plan.request, plan.request.case
    gpu = request.device
    return {
        "model": case.name,
        "mode": "lora" if case.frozen else "full",
        "strategy": request.strategy,
        "batch": case.tokens // case.seq,
        "seq": case.seq,
        "layers": case.layers,
        "parameters": persistent.parameters(case),
        "rank": case.rank,
        "targets": case.targets if case.rank else None,
        "config": dict(case.config),
        "gpu": {"name": gpu.name, "gib": gpu.gib, "room_gib": gpu.room},
        "assumptions": {**asdict(request.assumed), "in_words": _assumptions(plan)},
        "scales": [_at_dict(plan, at) for at in plan.at],
    }


def _at_dict(plan: ScalePlan, at: AtScale) -> dict[str, Any]:
    chosen = at.advice.row
    return {
        "gpus": at.gpus,
        "room_gib": plan.request.room(at.gpus) / GIB,
        "ways": [_row_dict(plan, at, row) for row in at.rows],
        "advice": {"way": None if chosen is None else chosen.way.name, "why": at.advice.why},
        "other_strategies": {strategy: _row_dict(plan, at, row) for strategy, row in at.others},
    }


def _row_dict(plan: ScalePlan, at: AtScale, row: Row) -> dict[str, Any]:
    step, wire = row.step, row.step.wire
    return {
        "name": row.way.name,
        "option": row.way.option.to_dict(),
        "fp8_gather": row.way.fp8_gather,
        "reduce": row.way.reduce,
        "fits": row.fits,
        "peak_gib": row.memory.peak_gib,
        "peak": row.memory.peak.to_dict(),
        "moments": [moment.to_dict() for moment in row.memory.moments],
        "sent": {"gather": wire.gather, "reduce": wire.reduce, "amax": wire.amax, "total": wire.total},
        "seconds": step.seconds,
        "computing_seconds": step.computing,
        "communication_seconds": step.communication,
        "tokens_per_second_and_gpu": plan.request.case.tokens / step.seconds,
        "times_baseline": None if at.baseline is None else at.baseline.step.seconds / step.seconds,
    }
