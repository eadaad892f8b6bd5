"""`octavo plan`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from octavo.cli.bench import PRESETS
from octavo.cli.options import option
from octavo.tools.plan.gpus import GPUS
from octavo.training.errors import UserError


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=f"{', '.join(PRESETS)}; or a config.json, or a folder with one.")
    ],
    mode: Annotated[str, option("Training", "--mode", "full or lora (default: full).")] = "full",
    batch: Annotated[int, option("Training", "--batch", "Sequences a step (default: 4).")] = 4,
    seq: Annotated[
        int | None, option("Training", "--seq", "Tokens a sequence (default: 2048, or the model's positions).")
    ] = None,
    layers: Annotated[int | None, option("Training", "--layers", "Layers, instead of the model's.")] = None,
    rank: Annotated[int | None, option("Training", "--rank", "Rank of LoRA's adapters (default: 32).")] = None,
    targets: Annotated[
        str | None, option("Training", "--targets", "Linears with adapters: all, attention or mlp (default: all).")
    ] = None,
    head: Annotated[str, option("Training", "--head", "Head of FP8 options: bf16 or fp8 (default: bf16).")] = "bf16",
    compile: Annotated[
        bool, option("Training", "--compile/--no-compile", "Compile decoder layers (default: yes).")
    ] = True,
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
    """Print the GPU memory of a training step before anything runs: no weights, no GPU, nothing to download.

    For BF16 and each FP8 option; with --gpu also the largest batch of each, and the code of the advised one.
    """
    from octavo.tools.plan.request import Request
    from octavo.tools.plan.run import make_plan, run_plan

    try:
        request = Request(
            model,
            mode=mode,
            batch=batch,
            seq=seq,
            layers=layers,
            rank=rank,
            targets=targets,
            head=head,
            compiled=compile,
            offload=offload,
            gpu=gpu,
        )
        result = make_plan(request)
    except ValueError as error:
        raise UserError(str(error)) from error
    run_plan(result, json=json, console=Console(), everything=all)
