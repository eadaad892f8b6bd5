"""A plan of GRPO from a request, printed and written."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from octavo.numerics.checks import check_positive_int
from octavo.tools.families import family_of
from octavo.tools.plan.gpus import Gpu, find_gpu
from octavo.tools.plan.grpo import GRPOMemory, against_bf16, grpo_options, longest_completion, plan_grpo, training_case
from octavo.tools.plan.request import Request
from octavo.tools.plan.show import PIPE_WIDTH
from octavo.tools.plan.timeline import GIB
from octavo.tools.rollouts import Size, check_positions
from octavo.tools.shapes import SHAPES, Case
from octavo.training.errors import UserError
from octavo.training.files import write_json


@dataclass(frozen=True)
class GRPORequest:
    """Request for a plan, with the options of `octavo plan --mode grpo`: a model, and the numbers of a step."""

    model: str
    slots: int = 64
    prompt: int = 128
    new_tokens: int = 512
    group: int = 8
    micro_batch_tokens: int = 8192
    layers: int | None = None
    rank: int | None = None
    targets: str | None = None
    gpu: str | None = None

    def __post_init__(self) -> None:
        check_positive_int("micro_batch_tokens", self.micro_batch_tokens)
        if family_of(SHAPES.get(self.model, {}).get("model_type")).predicts != "token":
            raise UserError(f"MODEL {self.model}: GRPO is of Hugging Face decoders")
        check_positions(self.model, self.size, self.case.config.get("max_position_embeddings"))

    @cached_property
    def size(self) -> Size:
        return Size(self.slots, self.prompt, self.new_tokens, min(self.group, self.slots))

    @cached_property
    def case(self) -> Case:
        size = self.size
        request = Request(
            self.model, "lora", batch=1, seq=None, layers=self.layers, rank=self.rank, targets=self.targets
        )
        return training_case(request.case, size, self.micro_batch_tokens)


@dataclass(frozen=True)
class GRPOPlan:
    """A complete plan. `longest`: new tokens of the longest completion of each option that fits `gpu`."""

    request: GRPORequest
    memories: list[GRPOMemory]
    gpu: Gpu | None
    longest: list[int]


def make_grpo_plan(request: GRPORequest) -> GRPOPlan:
    """Return the memory of every option; with a GPU, also what fits it."""
    case, size = request.case, request.size
    gpu = None if request.gpu is None else find_gpu(request.gpu)
    options = grpo_options(case, gpu)
    memories = [plan_grpo(case, option, size, request.micro_batch_tokens) for option in options]
    longest = [] if gpu is None else [longest_completion(case, option, size, gpu) for option in options]
    return GRPOPlan(request, memories, gpu, longest)


def run_grpo_plan(request: GRPORequest, *, json: Path | None, console: Console) -> None:
    """Print the plan; write JSON if asked."""
    if json is not None and (json.is_dir() or not json.parent.is_dir()):
        raise UserError(f"--json {json}: a file in a folder that exists is needed")
    plan = make_grpo_plan(request)
    show_grpo(console, plan)
    if json is not None:
        write_json(json, to_dict(plan), "free some space or choose another --json")
        console.print(Text(f"Figures: {json}"), soft_wrap=True)


def show_grpo(console: Console, plan: GRPOPlan) -> None:
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console = Console(file=console.file, width=PIPE_WIDTH)
    case, size = plan.request.case, plan.request.size
    words, what = case.family.describe(case)
    console.print(
        Text(
            f"{case.name}, {words} parameters, {case.layers} layers: GRPO, {what}, {size.slots} completions of "
            f"{size.new_tokens:,} tokens, prompts of {size.prompt:,} in groups of {size.group}, trained on "
            f"{case.tokens // case.seq} × {case.seq:,} tokens at once",
            style="bold",
        )
    )
    headings = {
        "peak": "GiB of a run that frees its cache while it trains",
        "×": "of the first row's",
        "cache": "keys and values",
        "rollout": "peak of it",
        "training": "peak of it",
        "standby": "in between",
    }
    if plan.gpu is not None:
        headings["longest"] = f"new tokens that fit {plan.gpu.name}, trained on one sequence at a time"
    caption = "; ".join(f"{name}: {meaning}" for name, meaning in headings.items())
    table = Table(caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption_justify="left")
    table.add_column("", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for i, (memory, (ratio, _)) in enumerate(zip(plan.memories, against_bf16(plan.memories), strict=True)):
        sizes = (memory.cache, max(memory.decoding, memory.prefill), memory.training, memory.standby)
        cells = [f"{memory.peak / GIB:.1f}", f"{ratio:.2f}", *(f"{size / GIB:.1f}" for size in sizes)]
        cells += [f"{plan.longest[i]:,}" if plan.longest[i] else "–"] if plan.gpu is not None else []
        too_large = plan.gpu is not None and memory.peak > plan.gpu.room * GIB
        table.add_row(memory.option.name, *cells, style="dim" if too_large else "")
    console.print(table)
    if plan.gpu is not None:
        fitting = [memory for memory in plan.memories if memory.peak <= plan.gpu.room * GIB]
        console.print(
            Text(f"{len(fitting)} of {len(plan.memories)} fit {plan.gpu.name}: {plan.gpu.room:.1f} GiB of tensors.")
        )


def to_dict(plan: GRPOPlan) -> dict[str, Any]:
    """Return all figures, in bytes except where a name says GiB."""
    case, request = plan.request.case, plan.request
    ratios = against_bf16(plan.memories)
    return {
        "model": case.name,
        "mode": "grpo",
        "size": request.size.to_dict(),
        "micro_batch_tokens": case.tokens,
        "layers": case.layers,
        "rank": case.rank,
        "config": dict(case.config),
        "gpu": None if plan.gpu is None else {"name": plan.gpu.name, "gib": plan.gpu.gib, "room_gib": plan.gpu.room},
        "options": [
            {
                **memory.to_dict(),
                "of_bf16": ratios[i][0],
                "of_two_copies": ratios[i][1],
                "longest_completion": plan.longest[i] if plan.gpu is not None else None,
            }
            for i, memory in enumerate(plan.memories)
        ],
    }
