"""`octavo bench`."""

import sys
from pathlib import Path
from typing import Annotated

from rich.console import Console

from octavo.cli.bench_rollout import ROLLOUT_MODES, bench_rollouts
from octavo.cli.options import RECIPES, check_mode, names, option, refuse
from octavo.training.errors import UserError

# These repeat octavo.tools.bench and octavo.optim, which take long to import; a test compares them.
PRESETS = (
    *("tiny", "135m", "360m", "1b", "3b", "8b", "70b", "qwen3-0.6b", "qwen3-8b", "qwen3-32b"),
    *("bdh-100m", "bdh-25m", "bdh-tiny"),
)
AGAINST = ("bf16-eager", "bf16-compiled", "octavo-bf16", "torchao", "torchao-row", "te", "unsloth", "peft")
FIXED = "fixed"
ROLLOUT_AGAINST = ("generate", "generate_batch", "bf16")
WORKLOADS = (FIXED, "padded", "packed", "trainer", "sft")
OPTIMIZERS = ("adamw", "adamw8bit", "adamw4bit", "adamwfp8")


def bench(
    preset: Annotated[str | None, option("Model", "--preset", f"{', '.join(PRESETS)}.")] = None,
    config: Annotated[
        Path | None, option("Model", "--config", "Or a Hugging Face config.json of a dense decoder.")
    ] = None,
    layers: Annotated[int | None, option("Model", "--layers", "Layers, instead of the model's.")] = None,
    mode: Annotated[
        str,
        option("Model", "--mode", "full, lora, rollout (generation) or grpo (whole steps of it); default: full."),
    ] = "full",
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
            "With LoRA: block, channel, current; +weights-only multiplies in BF16. "
            "Rollouts: channel, block; +fp8-kv, +fp8-products; grpo also +weights-only, +fp8-dgrad.",
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
            f"and peft with LoRA). Rollouts: {', '.join(ROLLOUT_AGAINST)}, or none (default: all; grpo: bf16).",
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
    slots: Annotated[
        str | None, option("Rollout", "--slots", "Completions at once: several by commas (default: 64; tiny: 4).")
    ] = None,
    prompt: Annotated[int | None, option("Rollout", "--prompt", "Tokens of a prompt (default: 128; tiny: 16).")] = None,
    new_tokens: Annotated[
        int | None, option("Rollout", "--new-tokens", "Tokens of a completion (default: 512; tiny: 16).")
    ] = None,
    group: Annotated[
        int | None, option("Rollout", "--group", "Completions of a prompt, or fewer with fewer slots (default: 8).")
    ] = None,
    peer_tokens: Annotated[
        int | None,
        option("Rollout", "--peer-tokens", "New tokens of transformers' own, instead of as many as ours."),
    ] = None,
    mini_batches: Annotated[
        int | None,
        option("Rollout", "--mini-batches", "grpo: updates of a step; from 2 on after a pass of its own (default: 2)."),
    ] = None,
    micro_batch_tokens: Annotated[
        int | None,
        option("Rollout", "--micro-batch-tokens", "grpo: tokens that are trained on at once (default: 8192)."),
    ] = None,
    standby: Annotated[
        bool | None,
        option("Rollout", "--standby/--no-standby", "grpo: free the cache while training (default: yes)."),
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
    """Time a training step in FP8 against BF16 and other libraries, on your own device; or generation.

    Correctness first; then every contender in a process of its own, interleaved. Random weights, nothing is downloaded.
    """
    from octavo.tools.bench.contenders import default_against, make_contenders
    from octavo.tools.bench.request import BenchRequest, run_request
    from octavo.tools.bench.workload import make_workload
    from octavo.tools.shapes import make_case

    check_mode(mode, ("full", "lora", *ROLLOUT_MODES))
    of_rollout = {
        "slots": slots, "prompt": prompt, "new-tokens": new_tokens, "group": group, "peer-tokens": peer_tokens,
        "mini-batches": mini_batches, "micro-batch-tokens": micro_batch_tokens, "standby": standby,
    }  # fmt: skip
    if mode in ROLLOUT_MODES:
        of_step = {
            "tokens": tokens, "seq": seq, "compile": compile, "optimizer": optimizer, "lengths": lengths,
            "steps": steps, "head": head if head != "bf16" else None, "wgrad": wgrad if wgrad != "recipe" else None,
            "workload": workload if workload != FIXED else None, "gemm": gemm or None, "kernels": kernels or None,
            "warmup": warmup if warmup != 3 else None,
        }  # fmt: skip
        refuse(of_step, f"--mode {mode} has none; leave it out")
        model = {
            "preset": preset, "config": config, "layers": layers, "rank": rank, "targets": targets, "seed": seed,
            "device": device, "force": force,
        }  # fmt: skip
        bench_rollouts(mode, model, of_rollout, recipe=recipe, against=against, rounds=rounds, out=out)
        return
    refuse(of_rollout, "is of rollouts; add --mode rollout or --mode grpo, or leave it out")
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
