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
    gpus: Annotated[
        str | None, option("Several GPUs", "--gpus", "How many: a number, or several (default: 8,64,512).")
    ] = None,
    strategy: Annotated[
        str | None, option("Several GPUs", "--strategy", "ddp, fsdp2 or zero3 (default: fsdp2).")
    ] = None,
    recipe: Annotated[
        str | None, option("Several GPUs", "--recipe", "delayed or block; with LoRA channel or block (default: first).")
    ] = None,
    checkpointing: Annotated[
        str | None, option("Several GPUs", "--checkpointing", "none or layers (default: where it has to be).")
    ] = None,
    bandwidth: Annotated[
        str | None,
        option("Several GPUs", "--bandwidth", "Bus bandwidth in GB/s, or by GPUs (default: 8:370,64:320,…,512:245)."),
    ] = None,
    network: Annotated[
        float | None, option("Several GPUs", "--network", "GB/s of a GPU's own network card (default: 48).")
    ] = None,
    slowdown: Annotated[
        float | None,
        option("Several GPUs", "--slowdown", "Speed that computing and NCCL lose while both run (default: 0.12)."),
    ] = None,
    tflops: Annotated[
        str | None, option("Several GPUs", "--tflops", "TFLOP/s of BF16 and FP8 (default: an H200's, as measured).")
    ] = None,
    all: Annotated[bool, option("Output", "--all", "Show every option, with its memory by kind.")] = False,
    json: Annotated[Path | None, option("Output", "--json", "Also write all figures to this file.")] = None,
) -> None:
    """Print the GPU memory of training or of GRPO before anything runs: no weights, no GPU, nothing to download.

    For BF16 and each FP8 option; with --gpu also the largest batch of each, and the code of the advised one. With
    --gpus or --strategy: memory, bytes on the wire and time of a step on several GPUs.
    """
    check_mode(mode, ("full", "lora", "grpo"))
    on_several = {
        "recipe": recipe, "checkpointing": checkpointing, "bandwidth": bandwidth, "network": network,
        "slowdown": slowdown, "tflops": tflops,
    }  # fmt: skip
    of_grpo = {
        "slots": slots, "prompt": prompt, "new-tokens": new_tokens, "group": group,
        "micro-batch-tokens": micro_batch_tokens,
    }  # fmt: skip
    if gpus is None and strategy is None:
        refuse(on_several, "is of several GPUs; add --gpus, or leave it out")
    else:
        of_one = {"head": head, "compile": compile, "offload": offload, "all": all or None, **of_grpo}
        refuse(of_one, "is planned for one GPU alone; leave it or --gpus out")
        if mode == "grpo":
            raise UserError("--mode grpo: is planned for one GPU alone; leave --gpus and --strategy out")
        of_model = {"mode": mode, "batch": batch, "seq": seq, "layers": layers, "rank": rank, "targets": targets}
        _plan_scale(model, {**of_model, "gpus": gpus, "strategy": strategy, "gpu": gpu, **on_several}, json=json)
        return
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


def _plan_scale(model: str, options: dict[str, Any], *, json: Path | None) -> None:
    from octavo.tools.plan.scale.assumptions import Assumptions, parse_bandwidth, parse_tflops
    from octavo.tools.plan.scale.plan import make_scale_plan
    from octavo.tools.plan.scale.request import ScaleRequest, parse_gpus
    from octavo.tools.plan.scale.show import run_scale_plan

    given = {name: value for name, value in options.items() if value is not None}
    parsers = {"gpus": parse_gpus, "bandwidth": parse_bandwidth, "tflops": parse_tflops}
    given |= {name: parse(given[name]) for name, parse in parsers.items() if name in given}
    assumed = {name: given.pop(name) for name in ("bandwidth", "network", "slowdown", "tflops") if name in given}
    try:
        request = ScaleRequest(model, **given, assumed=Assumptions(**assumed))
        result = make_scale_plan(request)
    except ValueError as error:
        raise UserError(str(error)) from error
    run_scale_plan(result, json=json, console=Console())
