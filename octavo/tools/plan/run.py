"""From a request to what is printed and written."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from octavo.tools.plan.advice import advise, notes
from octavo.tools.plan.gpus import find_gpu, largest_batch
from octavo.tools.plan.memory import plan_memory
from octavo.tools.plan.options import options_of
from octavo.tools.plan.request import make_request
from octavo.tools.plan.show import Plan, show, to_dict
from octavo.training.errors import UserError
from octavo.training.files import write_json


def make_plan(
    model: str,
    *,
    mode: str,
    batch: int,
    seq: int,
    layers: int | None = None,
    rank: int | None = None,
    targets: str | None = None,
    gpu: str | None = None,
    fp8_head: bool = False,
    compiled: bool = True,
) -> Plan:
    """What every option takes for this step; with a GPU, what fits it."""
    case = make_request(model, mode=mode, batch=batch, seq=seq, layers=layers, rank=rank, targets=targets)
    options = options_of(case, compiled=compiled, fp8_head=fp8_head)
    found = None if gpu is None else find_gpu(gpu)
    memories = [plan_memory(case, option) for option in options]
    return Plan(
        model,
        case,
        memories,
        found,
        [] if found is None else [largest_batch(case, option, found) for option in options],
        None if found is None else advise(model, case, options, found),
        notes(case, memories, found),
    )


def run_plan(plan: Plan, *, json: Path | None, console: Console) -> None:
    if json is not None and (json.is_dir() or not json.parent.is_dir()):
        raise UserError(f"--json {json}: a file in a folder that exists is needed")
    show(console, plan)
    if json is not None:
        write_json(json, to_dict(plan), "free some space or choose another --json")
        console.print(Text(f"Figures: {json}"), soft_wrap=True)
