"""`octavo plan`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from octavo.cli.bench import PRESETS
from octavo.cli.options import check_mode, option, refuse
from octavo.tools.plan.gpus import GPUS
from octavo.training.errors import UserError


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=f"{', '.join(PRESETS)}; or a config.json, or a folder with one.")
    ],
    mode: Annotated[str, option("Training", "--mode", "full, lora or grpo (default: full).")] = "full",
    batch: Annotated[int | None, option("Training", "--batch", "Sequences a step (default: 4).")] = None,
    seq: Annotated[
        int | None, option("Training", "--seq", "Tokens a sequence (default: 2048, or the model's positions).")
    ] = None,
    layers: Annotated[int | None, option("Training", "--layers", "Layers, instead of the model's.")] = None,
    rank: Annotated[int | None, option("Training", "--rank", "Rank of LoRA's adapters (default: 32).")] = None,
    targets: Annotated[
        str | None, option("Training", "--targets", "Linears with adapters: all, attention or mlp (default: all).")
    ] = None,
    slots: Annotated[int | None, option("GRPO", "--slots", "Completions of a step (default: 64).")] = None,
    prompt: Annotated[int | None, option("GRPO", "--prompt", "Tokens of a prompt (default: 128).")] = None,
    new_tokens: Annotated[int | None, option("GRPO", "--new-tokens", "Tokens of a completion (default: 512).")] = None,
    group: Annotated[int | None, option("GRPO", "--group", "Completions of a prompt (default: 8).")] = None,
    micro_batch_tokens: Annotated[
        int | None, option("GRPO", "--micro-batch-tokens", "Tokens that are trained on at once (default: 8192).")
    ] = None,
    head: Annotated[
        str | None, option("Training", "--head", "Head of FP8 options: bf16 or fp8 (default: bf16).")
    ] = None,
    compile: Annotated[
        bool | None, option("Training", "--compile/--no-compile", "Compile decoder layers (default: yes).")
    ] = None,
    offload: Annotated[
        str | None,
        option("Training", "--offload", "To host memory: none, optimizer or master (default: each is compared)."),
    ] = None,
    gpu: Annotated[
        str | None, option("GPU", "--gpu", f"GPU to fit: GiB such as 24, or one of {', '.join(GPUS)}.")
    ] = None,
    all: Annotated[bool, option("Output", "--all", "Show every option, with its memory by kind.")] = False,
    json: Annotated[Path | None, option("Output", "--json", "Also write all figures to this file.")] = None,
) -> None:
    """Print the GPU memory of training or of GRPO before anything runs: no weights, no GPU, nothing to download.

    For BF16 and each FP8 option; with --gpu also the largest batch of each, and the code of the advised one.
    """
    check_mode(mode, ("full", "lora", "grpo"))
    of_grpo = {
        "slots": slots, "prompt": prompt, "new-tokens": new_tokens, "group": group,
        "micro-batch-tokens": micro_batch_tokens,
    }  # fmt: skip
    if mode == "grpo":
        of_step = {"batch": batch, "seq": seq, "head": head, "compile": compile, "offload": offload}
        refuse(of_step, "--mode grpo has none; leave it out")
        model_options = {"layers": layers, "rank": rank, "targets": targets, "gpu": gpu}
        _plan_grpo(model, model_options, of_grpo, json=json)
        return
    refuse(of_grpo, "is of --mode grpo; leave it out")

    from octavo.tools.plan.request import Request
    from octavo.tools.plan.run import make_plan, run_plan

    try:
        request = Request(
            model,
            mode=mode,
            batch=4 if batch is None else batch,
            seq=seq,
            layers=layers,
            rank=rank,
            targets=targets,
            head="bf16" if head is None else head,
            compiled=compile is not False,
            offload=offload,
            gpu=gpu,
        )
        result = make_plan(request)
    except ValueError as error:
        raise UserError(str(error)) from error
    run_plan(result, json=json, console=Console(), everything=all)


def _plan_grpo(model: str, model_options: dict[str, Any], options: dict[str, int | None], *, json: Path | None) -> None:
    from octavo.tools.plan.grpo_run import GRPORequest, run_grpo_plan

    given: dict[str, Any] = {name.replace("-", "_"): value for name, value in options.items() if value is not None}
    try:
        request = GRPORequest(model, **model_options, **given)
    except ValueError as error:
        raise UserError(str(error)) from error
    run_grpo_plan(request, json=json, console=Console())
