"""`octavo bench`."""

import sys
from pathlib import Path
from typing import Annotated

from rich.console import Console

from octavo.cli.options import RECIPES, names, option
from octavo.training.errors import UserError

# These repeat octavo.tools.bench and octavo.optim, which take long to import; a test compares them.
PRESETS = (
    *("tiny", "135m", "360m", "1b", "3b", "8b", "70b", "qwen3-0.6b", "qwen3-8b", "qwen3-32b"),
    *("bdh-100m", "bdh-25m", "bdh-tiny"),
)
AGAINST = ("bf16-eager", "bf16-compiled", "octavo-bf16", "torchao", "torchao-row", "te", "unsloth", "peft")
FIXED = "fixed"
WORKLOADS = (FIXED, "padded", "packed", "trainer", "sft")
OPTIMIZERS = ("adamw", "adamw8bit", "adamw4bit", "adamwfp8")


def bench(
    preset: Annotated[str | None, option("Model", "--preset", f"{', '.join(PRESETS)}.")] = None,
    config: Annotated[
        Path | None, option("Model", "--config", "Or a Hugging Face config.json of a dense decoder.")
    ] = None,
    layers: Annotated[int | None, option("Model", "--layers", "Layers, instead of the model's.")] = None,
    mode: Annotated[str, option("Model", "--mode", "full or lora (default: full).")] = "full",
    rank: Annotated[
        int | None, option("Model", "--rank", "Rank of LoRA's adapters (default: 32); 0: the frozen base alone.")
    ] = None,
    targets: Annotated[
        str | None, option("Model", "--targets", "Linears with adapters: all, attention or mlp (default: all).")
    ] = None,
    tokens: Annotated[int | None, option("Model", "--tokens", "Tokens a step (default: 8192; tiny: 256).")] = None,
    seq: Annotated[int | None, option("Model", "--seq", "Tokens a sequence (default: 2048; tiny: 64).")] = None,
    recipe: Annotated[
        str | None,
        option(
            "Contenders",
            "--recipe",
            f"{', '.join(RECIPES)}: several by commas; +fp8-head, +wgrad-channel, +graphs and "
            "+fp8-activations go with one. "
            "With LoRA: block, channel, current; +weights-only multiplies in BF16.",
        ),
    ] = None,
    head: Annotated[str, option("Contenders", "--head", "bf16, fp8 or both (default: bf16).")] = "bf16",
    wgrad: Annotated[
        str, option("Contenders", "--wgrad", "Block recipe's weight gradient: recipe, channel or both.")
    ] = "recipe",
    against: Annotated[
        str | None,
        option(
            "Contenders",
            "--against",
            f"{', '.join(AGAINST)}: several by commas, or none (default: all but peft; with a workload the first four, "
            "and peft with LoRA).",
        ),
    ] = None,
    compile: Annotated[
        bool | None,
        option(
            "Contenders",
            "--compile/--no-compile",
            "Compile decoder layers (default: yes; with a workload Octavo's own are not compiled).",
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        option(
            "Contenders",
            "--optimizer",
            f"Whole steps, with the optimiser: {', '.join(OPTIMIZERS)}, several by commas, for ours; AdamW for others. "
            "+in-backward, +offload-optimizer and +offload-master then go with a recipe.",
        ),
    ] = None,
    workload: Annotated[
        str,
        option(
            "Workload",
            "--workload",
            f"{', '.join(WORKLOADS)}: batches of one length; rows padded to the longest; documents packed into one "
            "row; padded, by the stock Trainer of transformers, or by TRL's SFTTrainer (default: fixed).",
        ),
    ] = FIXED,
    lengths: Annotated[
        str | None,
        option(
            "Workload",
            "--lengths",
            "lognormal, median 400, or uniform from 200, both up to 2,048 for a --seq of that, or full: all of that "
            "length (default: lognormal).",
        ),
    ] = None,
    gemm: Annotated[bool, option("Parts", "--gemm", "Time the model's GEMMs instead of its step.")] = False,
    kernels: Annotated[bool, option("Parts", "--kernels", "Time quantising instead of the step.")] = False,
    rounds: Annotated[int | None, option("Run", "--rounds", "Turns of every contender (default: 3).")] = None,
    steps: Annotated[
        int | None, option("Run", "--steps", "Timed steps a turn (default: 5), or of a workload (default: 24).")
    ] = None,
    warmup: Annotated[int, option("Run", "--warmup", "Untimed steps before the first (default: 3).")] = 3,
    seed: Annotated[int, option("Run", "--seed", "Seed of weights and tokens (default: 0).")] = 0,
    device: Annotated[str, option("Run", "--device", "auto, cpu or cuda (default: auto).")] = "auto",
    out: Annotated[
        Path | None,
        option("Run", "--out", "Folder or .json file of the result (default: benchmarks/results, if there, or here)."),
    ] = None,
    force: Annotated[bool, option("Run", "--force", "On a CPU, large models too.")] = False,
) -> None:
    """Time a training step in FP8 against BF16 and other libraries, on your own device.

    Correctness first; then every contender in a process of its own, interleaved. Random weights, nothing is downloaded.
    """
    from octavo.tools.bench.contenders import default_against, make_contenders
    from octavo.tools.bench.request import BenchRequest, run_request
    from octavo.tools.bench.workload import make_workload
    from octavo.tools.shapes import make_case

    if gemm and kernels:
        raise UserError("--gemm and --kernels time different parts: give one of them")
    if optimizer is not None and (gemm or kernels):
        part = "--gemm" if gemm else "--kernels"
        raise UserError(f"--optimizer {optimizer}: is of whole steps, and {part} times parts of one; leave one out")
    kind = "gemm" if gemm else "kernels" if kernels else "step"
    if workload != FIXED and kind != "step":
        raise UserError(f"--workload {workload}: is of whole steps, and --{kind} times parts of one; leave one out")
    try:
        batches = make_workload(workload, lengths, rounds)
        case = make_case(
            preset=preset,
            config=config,
            layers=layers,
            tokens=tokens,
            seq=seq,
            seed=seed,
            device=device,
            force=force,
            mode=mode,
            rank=rank,
            targets=targets,
        )
        contenders, reasons = make_contenders(
            case,
            recipes=names(recipe or ("block,channel" if case.frozen else "delayed")),
            head=head,
            wgrad=wgrad,
            against=_names(against) if against is not None else default_against(case, workload),
            compile=compile is not False,
            compile_ours=compile if compile is not None else workload == FIXED,
            optimizers=names(optimizer) if optimizer is not None else (),
            workload=workload,
        )
        steps = (5 if batches is None else 24) if steps is None else steps
        rounds = 3 if rounds is None else rounds
        request = BenchRequest(kind, case, contenders, reasons, rounds, steps, warmup, batches)
    except ValueError as error:
        raise UserError(str(error)) from error
    run_request(request, out=out, command=["octavo", *sys.argv[1:]], console=Console())


def _names(against: str) -> list[str]:
    return [] if against == "none" else names(against)
