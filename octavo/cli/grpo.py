"""`octavo grpo`."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from octavo.cli.options import option
from octavo.training.environment import launched_ranks
from octavo.training.errors import UserError

NEEDED = ("transformers", "peft")


# None means "not given": then a default holds, or the resumed run's setting.
def grpo(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A name on the Hugging Face Hub, or a folder.", show_default=False),
    ] = None,
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="[TASK]",
            help="A .jsonl of prompts, a .py with PROMPTS and reward functions, or a task of reasoning-gym with its "
            "options: chain_sum,max_terms=2.",
            show_default=False,
        ),
    ] = None,
    rewards: Annotated[
        str | None, option("Task", "--rewards", "A Python file of reward functions, called as TRL calls them.")
    ] = None,
    prompts: Annotated[int | None, option("Task", "--prompts", "Prompts of a step (default: 8).")] = None,
    completions: Annotated[
        int | None, option("Task", "--completions", "Completions of each prompt, a group (default: 8).")
    ] = None,
    max_new_tokens: Annotated[
        int | None, option("Task", "--max-new-tokens", "Tokens of a completion, at most (default: 256).")
    ] = None,
    temperature: Annotated[
        float | None, option("Task", "--temperature", "Temperature of the rollout (default: 1).")
    ] = None,
    top_k: Annotated[
        int | None, option("Task", "--top-k", "Sample from so many tokens; needs --correction none.")
    ] = None,
    top_p: Annotated[
        float | None, option("Task", "--top-p", "Sample from this much probability; needs --correction none.")
    ] = None,
    stop: Annotated[
        list[str] | None,
        option("Task", "--stop", "A text that ends completions, besides the end of text; may be given several times."),
    ] = None,
    engine: Annotated[
        str | None, option("Engine", "--engine", "native, vllm, or auto: vLLM if installed (default: native).")
    ] = None,
    slots: Annotated[int | None, option("Engine", "--slots", "Completions written at once (default: 64).")] = None,
    kv_dtype: Annotated[
        str | None, option("Engine", "--kv-dtype", "Keys and values: auto, as the model, or fp8 (default: auto).")
    ] = None,
    standby: Annotated[bool | None, option("Engine", "--standby", "Free the engine's cache during updates.")] = None,
    loss_type: Annotated[
        str | None, option("GRPO", "--loss-type", "grpo, dapo, bnpo or dr_grpo (default: dapo).")
    ] = None,
    scale_rewards: Annotated[
        str | None, option("GRPO", "--scale-rewards", "By the deviation of group, batch or none (default: group).")
    ] = None,
    beta: Annotated[
        float | None, option("GRPO", "--beta", "Weight of the KL from the model without adapters (default: 0).")
    ] = None,
    epsilon: Annotated[
        float | None, option("GRPO", "--epsilon", "Ratios are clipped below 1 − this (default: 0.2).")
    ] = None,
    epsilon_high: Annotated[
        float | None, option("GRPO", "--epsilon-high", "And above 1 + this (default: as --epsilon).")
    ] = None,
    correction: Annotated[
        str | None, option("GRPO", "--correction", "Of rollout against trainer: tis, mis or none (default: tis).")
    ] = None,
    correction_level: Annotated[
        str | None, option("GRPO", "--correction-level", "Of each token, or of a sequence (default: token).")
    ] = None,
    correction_max: Annotated[
        float | None, option("GRPO", "--correction-max", "Largest correction (default: 2).")
    ] = None,
    correction_min: Annotated[
        float | None, option("GRPO", "--correction-min", "Smallest correction (default: none).")
    ] = None,
    iterations: Annotated[int | None, option("GRPO", "--iterations", "Passes over a rollout (default: 1).")] = None,
    mini_batches: Annotated[
        int | None, option("GRPO", "--mini-batches", "Optimiser steps of a pass (default: 1).")
    ] = None,
    mask_truncated: Annotated[
        bool | None, option("GRPO", "--mask-truncated", "Do not learn from completions that did not end.")
    ] = None,
    full: Annotated[bool | None, option("Training", "--full", "Train all weights (default: LoRA).")] = None,
    rank: Annotated[int | None, option("Training", "--rank", "Rank of LoRA's adapters (default: 32).")] = None,
    alpha: Annotated[
        float | None, option("Training", "--alpha", "Adapters are scaled by alpha / rank (default: rank).")
    ] = None,
    steps: Annotated[int | None, option("Training", "--steps", "Rollouts (default: 200).")] = None,
    lr: Annotated[
        float | None, option("Training", "--lr", "Peak learning rate (default: 2e-5; with --full 1e-6).")
    ] = None,
    warmup: Annotated[int | None, option("Training", "--warmup", "Steps that rise to it (default: 0).")] = None,
    schedule: Annotated[
        str | None, option("Training", "--schedule", "Then constant, linear or cosine (default: constant).")
    ] = None,
    clip: Annotated[
        float | None, option("Training", "--clip", "Largest gradient norm; 0: no limit (default: 1).")
    ] = None,
    optimizer: Annotated[
        str | None, option("Training", "--optimizer", "adamw, adamw8bit or adamw4bit (default: adamw).")
    ] = None,
    weight_decay: Annotated[float | None, option("Training", "--weight-decay", "Weight decay (default: 0).")] = None,
    micro_batch_tokens: Annotated[
        int | None, option("Training", "--micro-batch-tokens", "Tokens through the model at once (default: 8192).")
    ] = None,
    checkpointing: Annotated[
        bool | None, option("Training", "--checkpointing", "Compute activations again in backward.")
    ] = None,
    seed: Annotated[int | None, option("Training", "--seed", "Seed of everything that is drawn (default: 0).")] = None,
    precision: Annotated[str | None, option("Precision", "--precision", "fp8 or bf16 (default: fp8).")] = None,
    recipe: Annotated[
        str | None, option("Precision", "--recipe", "Scales per channel or block (default: channel).")
    ] = None,
    products: Annotated[
        str | None,
        option("Precision", "--products", "In training: fp8, weights-only or fp8-dgrad (default: fp8-dgrad)."),
    ] = None,
    device: Annotated[str | None, option("Precision", "--device", "auto, cpu or cuda (default: auto).")] = None,
    out: Annotated[Path | None, option("Run", "--out", "Output folder (default: a new one below runs/).")] = None,
    resume: Annotated[bool, option("Run", "--resume", "Continue the run in --out from its checkpoint.")] = False,
    overwrite: Annotated[bool, option("Run", "--overwrite", "Replace the run in --out.")] = False,
    log_interval: Annotated[
        int | None, option("Run", "--log-interval", "Steps between printed lines (default: 1).")
    ] = None,
    save_interval: Annotated[
        int | None, option("Run", "--save-interval", "Steps between checkpoints (default: a tenth of the run).")
    ] = None,
) -> None:
    """Train a language model by rewards of its completions (GRPO): LoRA on a base in FP8, or all of it with --full.

    The engine that completes prompts runs on the trainer's own weights: there is one copy of them. Without arguments:
    a small decoder learns to sort digits, two minutes on a CPU.
    """
    options = {name: value for name, value in locals().items() if value not in (None, [])}
    for name in ("out", "resume", "overwrite"):
        options.pop(name, None)
    if (ranks := launched_ranks()) > 1:
        raise UserError(f"octavo grpo runs in one process, and a launcher has started {ranks}: leave torchrun out")
    if resume and overwrite:
        raise UserError("--resume continues the run in --out and --overwrite replaces it: give one of them")
    if (model is None) != (task is None) and not resume:
        raise UserError("give MODEL and TASK, or neither, for a small run on a CPU")
    if rewards is not None and task is None and not resume:
        raise UserError("--rewards without TASK: give the prompts that they belong to")
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise UserError(f"octavo grpo needs {' and '.join(missing)}: pip install 'octavo[hf]'")

    from octavo.grpo.run import read_settings, train_grpo
    from octavo.grpo.settings import settings_from_options
    from octavo.training.run_folder import find_run

    base = read_settings(find_run(out)) if resume else None
    try:
        settings = settings_from_options(options, base)
    except ValueError as error:
        raise UserError(str(error)) from error
    train_grpo(settings, out=out, resume=resume, overwrite=overwrite, console=Console())
