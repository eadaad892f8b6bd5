"""`octavo sft`."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from octavo.cli.launcher import launch, planned_ranks
from octavo.cli.options import option
from octavo.training.errors import UserError

NEEDED = ("transformers", "peft", "trl", "datasets")


# None means "not given": then a default holds, or the resumed run's setting.
def sft(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A name on the Hugging Face Hub, or a folder.", show_default=False),
    ] = None,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="[DATA]",
            help="A .jsonl, .json, .csv, .parquet or text file, a folder of them, or a dataset on the Hub.",
            show_default=False,
        ),
    ] = None,
    columns: Annotated[
        str | None, option("Data", "--columns", "Other names of columns: prompt=question,completion=answer.")
    ] = None,
    split: Annotated[str | None, option("Data", "--split", "Split of a dataset (default: train).")] = None,
    eval_data: Annotated[str | None, option("Data", "--eval-data", "Evaluate on this, not on a share of DATA.")] = None,
    held_out: Annotated[
        float | None, option("Data", "--held-out", "Share of DATA to evaluate on; 0: none (default: 0.05).")
    ] = None,
    seq: Annotated[
        int | None, option("Data", "--seq", "Tokens of an example; longer ones are cut (default: 2048).")
    ] = None,
    chat: Annotated[bool | None, option("Data", "--chat", "prompt and completion are turns of a conversation.")] = None,
    chat_template: Annotated[
        str | None, option("Data", "--chat-template", "A Jinja file, in place of the tokenizer's template.")
    ] = None,
    loss: Annotated[
        str | None, option("Data", "--loss", "Loss of completion, or of all tokens (default: completion).")
    ] = None,
    packing: Annotated[
        bool | None, option("Data", "--packing", "Rows of --seq tokens, each with several examples.")
    ] = None,
    padded: Annotated[
        bool | None, option("Data", "--padded", "Pad the examples of a batch (default: padding-free).")
    ] = None,
    full: Annotated[bool | None, option("Training", "--full", "Train all weights (default: LoRA).")] = None,
    rank: Annotated[int | None, option("Training", "--rank", "Rank of LoRA's adapters (default: 32).")] = None,
    alpha: Annotated[
        float | None, option("Training", "--alpha", "Adapters are scaled by alpha / rank (default: rank).")
    ] = None,
    dropout: Annotated[
        float | None, option("Training", "--dropout", "Dropout before adapters (default: 0, the fastest).")
    ] = None,
    epochs: Annotated[float | None, option("Training", "--epochs", "Passes over the data (default: 1).")] = None,
    steps: Annotated[int | None, option("Training", "--steps", "Optimiser steps, instead of --epochs.")] = None,
    batch: Annotated[int | None, option("Training", "--batch", "Examples of a micro-batch (default: 8).")] = None,
    micro_batches: Annotated[
        int | None, option("Training", "--micro-batches", "Micro-batches of a step (default: 1).")
    ] = None,
    lr: Annotated[
        float | None, option("Training", "--lr", "Peak learning rate (default: 2e-4; with --full 1e-5).")
    ] = None,
    warmup: Annotated[
        int | None, option("Training", "--warmup", "Steps that rise to it (default: a twentieth).")
    ] = None,
    schedule: Annotated[
        str | None, option("Training", "--schedule", "Then cosine, linear or constant (default: cosine).")
    ] = None,
    clip: Annotated[
        float | None, option("Training", "--clip", "Largest gradient norm; 0: no limit (default: 1.0).")
    ] = None,
    optimizer: Annotated[
        str | None, option("Training", "--optimizer", "adamw, adamw8bit or adamw4bit (default: adamw).")
    ] = None,
    weight_decay: Annotated[float | None, option("Training", "--weight-decay", "Weight decay (default: 0).")] = None,
    checkpointing: Annotated[
        bool | None,
        option("Training", "--checkpointing/--no-checkpointing", "Gradient checkpointing (default: if needed)."),
    ] = None,
    seed: Annotated[int | None, option("Training", "--seed", "Seed of adapters and data order (default: 0).")] = None,
    precision: Annotated[str | None, option("Precision", "--precision", "fp8 or bf16 (default: fp8).")] = None,
    recipe: Annotated[
        str | None, option("Precision", "--recipe", "Scales per channel, block or tensor (default: the fastest).")
    ] = None,
    device: Annotated[str | None, option("Precision", "--device", "auto, cpu or cuda (default: auto).")] = None,
    nproc: Annotated[
        int | None, option("Several GPUs", "--nproc", "Processes of this machine that share each step, one a GPU.")
    ] = None,
    strategy: Annotated[
        str | None, option("Several GPUs", "--strategy", "ddp (whole copies) or fsdp2 (shards) (default: ddp).")
    ] = None,
    out: Annotated[Path | None, option("Run", "--out", "Output folder (default: a new one below runs/).")] = None,
    resume: Annotated[bool, option("Run", "--resume", "Continue the run in --out from its checkpoint.")] = False,
    overwrite: Annotated[bool, option("Run", "--overwrite", "Replace the run in --out.")] = False,
    plan: Annotated[bool, option("Run", "--plan", "First print the memory of a step, as octavo plan does.")] = False,
    merge: Annotated[
        str | None, option("Run", "--merge", "Also write the model with adapters merged in: fp8 or 16bit.")
    ] = None,
    log_interval: Annotated[
        int | None, option("Run", "--log-interval", "Steps between printed lines (default: 1; on a GPU 10).")
    ] = None,
    save_interval: Annotated[
        int | None, option("Run", "--save-interval", "Steps between checkpoints (default: a tenth of the run).")
    ] = None,
    sample_tokens: Annotated[
        int | None, option("Run", "--sample-tokens", "Tokens to generate at the end (default: 48).")
    ] = None,
) -> None:
    """Fine-tune a language model: LoRA on a base in FP8, or all of it with --full, by TRL's SFTTrainer.

    DATA has a column text, messages, or prompt and completion. Without arguments: SmolLM2-135M on docstrings of
    Python's standard library, three minutes on a CPU.
    """
    options = {name: value for name, value in locals().items() if value is not None}
    ranks = planned_ranks(nproc)
    for name in ("out", "resume", "overwrite", "plan", "nproc"):
        options.pop(name, None)
    if resume and overwrite:
        raise UserError("--resume continues the run in --out and --overwrite replaces it: give one of them")
    if (model is None) != (data is None) and not resume:
        raise UserError("give MODEL and DATA, or neither, for a small run on a CPU")
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise UserError(f"octavo sft needs {' and '.join(missing)}: pip install 'octavo[hf]'")

    from octavo.sft.settings import read_settings, settings_from_options
    from octavo.training.run_folder import find_run

    options["ranks"] = ranks
    base = read_settings(find_run(out)) if resume else None
    try:
        settings = settings_from_options(options, base)
    except ValueError as error:
        raise UserError(str(error)) from error
    if launch(ranks):
        return

    from octavo.sft.run import fine_tune

    fine_tune(settings, out=out, resume=resume, overwrite=overwrite, plan=plan, console=Console())
