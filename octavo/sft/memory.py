"""Memory of a run before its model is loaded: what `octavo plan` says of a step, and what to change if it does not fit.

The plan knows some families of decoders. For others there is none, and the run says so.
"""

from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from octavo.sft.settings import SFTSettings
from octavo.tools.plan.fits import fits, largest_batch, longest_sequence
from octavo.tools.plan.gpus import Gpu
from octavo.tools.plan.memory import plan_memory
from octavo.tools.plan.options import Option, why_bf16_products
from octavo.tools.plan.request import FAMILIES, Request
from octavo.tools.plan.run import make_plan, run_plan
from octavo.tools.plan.timeline import GIB
from octavo.tools.shapes import Case, read_config
from octavo.training.errors import UserError


def show_plan(settings: SFTSettings, config: Path, seq: int, console: Console) -> None:
    """Print the answer of `octavo plan`, for this GPU if there is one."""
    if settings.strategy == "fsdp2":
        raise UserError(f"--plan: of one GPU, not of shards; leave it out, and see {_plan_of_shards(settings, config)}")
    _require_known(config)
    request = _request(settings, config, seq)
    if settings.device == "cuda":
        request = replace(request, gpu=f"{_free():.1f}")
    run_plan(make_plan(request), json=None, console=console)


def choose_checkpointing(settings: SFTSettings, config: Path, seq: int) -> tuple[bool, str]:
    """Return whether to checkpoint, and what the plan says. Raises a `UserError` if the run would not fit the GPU."""
    if settings.device == "cpu":
        return bool(settings.checkpointing), ""
    if settings.strategy == "fsdp2":
        return settings.checkpointing is not False, f"not planned here; see {_plan_of_shards(settings, config)}"
    if (why := _unknown(config)) is not None:
        return settings.checkpointing is not False, f"no plan of its memory: {why}"
    case = _request(settings, config, seq).case
    gpu = _this_gpu()
    tried = [settings.checkpointing] if settings.checkpointing is not None else [False, True]
    for checkpointing in tried:
        option = _option(settings, case, gpu, checkpointing)
        if fits(case, option, gpu):
            how = ", with gradient checkpointing" if checkpointing else ""
            return checkpointing, f"{plan_memory(case, option).peak_gib:.1f} GiB planned, {gpu.gib:.1f} free{how}"
    option = _option(settings, case, gpu, tried[-1])
    needed = plan_memory(case, option).peak_gib
    raise UserError(
        f"the run would take {needed:.1f} GiB, and {gpu.room:.1f} of {gpu.name} are free for tensors: "
        f"{_advice(settings, case, gpu)}"
    )


def _plan_of_shards(settings: SFTSettings, config: Path) -> str:
    mode = "" if settings.full else " --mode lora"
    return f"octavo plan {settings.model or config.parent}{mode} --gpus {settings.ranks} --strategy fsdp2"


def _advice(settings: SFTSettings, case: Case, gpu: Gpu) -> str:
    """Return the options that would fit."""
    if settings.checkpointing is False and fits(case, _option(settings, case, gpu, True), gpu):
        return "leave --no-checkpointing out"
    option = _option(settings, case, gpu, settings.checkpointing is not False)
    batch = largest_batch(case, option, gpu)
    if batch:
        more = -(-settings.batch * settings.micro_batches // batch)
        return f"--batch {batch} --micro-batches {more} would fit"
    length = longest_sequence(case, option, gpu)
    if length:
        return f"--batch 1 --seq {length} would fit"
    return "not even a short sequence would fit" + ("; train adapters instead, without --full" if settings.full else "")


def _request(settings: SFTSettings, config: Path, seq: int) -> Request:
    mode = "full" if settings.full else "lora"
    rank = None if settings.full else settings.rank
    return Request(str(config), mode=mode, batch=settings.own_batch, seq=seq, rank=rank, compiled=False)


def _option(settings: SFTSettings, case: Case, gpu: Gpu, checkpointing: bool) -> Option:
    """Return the run as the plan describes it."""
    kind = "layers" if checkpointing else "none"
    option = Option("own", optimizer=settings.optimizer, checkpointing=kind, compiled=False, masters=settings.full)
    if settings.precision == "bf16":
        return option
    recipes = {"channel": "channel", "block": "block", "tensor": "delayed", None: "channel"}
    if settings.full:
        return replace(option, code="fp8", recipe="delayed" if settings.recipe is None else recipes[settings.recipe])
    recipe = "block" if settings.recipe == "block" else "channel"
    return replace(option, code="fp8", recipe=recipe, adapter_bytes=4, fp8_products=not why_bf16_products(case, gpu))


def _require_known(config: Path) -> None:
    if (why := _unknown(config)) is not None:
        raise UserError(f"--plan: {why}; leave it out")


def _unknown(config: Path) -> str | None:
    """Return why there is no plan for a model; None if there is one."""
    try:
        kind = read_config(config, f"MODEL {config}")["model_type"]
    except UserError as error:  # not a dense decoder
        return str(error)
    return None if kind in FAMILIES else f"octavo plan knows {', '.join(FAMILIES)}, not {kind}"


def _this_gpu() -> Gpu:
    return Gpu(torch.cuda.get_device_name(), _free(), torch.cuda.get_device_capability())


def _free() -> float:
    """Return the GiB of the GPU that nobody uses."""
    return torch.cuda.mem_get_info()[0] / GIB
