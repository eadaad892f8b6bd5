"""A plan from a request, printed and written."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from octavo.tools.plan.advice import advise, notes
from octavo.tools.plan.fits import largest_batch, longest_sequence
from octavo.tools.plan.gpus import find_gpu
from octavo.tools.plan.memory import plan_memory
from octavo.tools.plan.request import Request
from octavo.tools.plan.show import Plan, show, to_dict
from octavo.training.errors import UserError
from octavo.training.files import write_json


def make_plan(request: Request) -> Plan:
    """Return the memory of every option for this step; with a GPU, also what fits it."""
    case = request.case
    fp8_head = request.head == "fp8"
    family = case.family
    gpu = None if request.gpu is None else find_gpu(request.gpu)
    options = family.options(case, compiled=request.compiled, fp8_head=fp8_head, offload=request.offload, gpu=gpu)
    memories = [plan_memory(case, option) for option in options]
    return Plan(
        request.model,
        case,
        memories,
        gpu,
        [] if gpu is None else [largest_batch(case, option, gpu) for option in options],
        [longest_sequence(case, option, gpu) for option in options] if gpu and family.plans_sequences else [],
        None if gpu is None else advise(request.model, case, options, gpu),
        notes(case, memories, gpu),
        family.background(case, memories),
    )


def run_plan(plan: Plan, *, json: Path | None, console: Console, everything: bool = False) -> None:
    """Print the short answer, or with `everything` each option and its memory by kind; write JSON if asked."""
    if json is not None and (json.is_dir() or not json.parent.is_dir()):
        raise UserError(f"--json {json}: a file in a folder that exists is needed")
    show(console, plan, everything)
    if json is not None:
        write_json(json, to_dict(plan), "free some space or choose another --json")
        console.print(Text(f"Figures: {json}"), soft_wrap=True)
