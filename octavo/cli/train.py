"""`octavo train`."""

from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.text import Text

from octavo.cli.launcher import launch, planned_ranks
from octavo.cli.options import GRANULARITIES, RECIPES, in_words, operand_option, option
from octavo.training.errors import RunError, UserError

# Options that are fields of FP8TrainingConfig; the others are options of `settings_from_options`.
FP8_FIELDS = (
    "fp8_format",
    "amax_history_len",
    "amax_compute_algo",
    "margin",
    "granularity",
    "scaling",
    "amax_update_interval",
    "percentile",
    "rounding",
    "skip",
    "emulate",
)


# None means "not given": then the defaults of the model's size and of the device hold, or the resumed run's settings.
def train(
    model: Annotated[str | None, option("Model", "--model", "The architecture: bdh.")] = None,
    size: Annotated[
        str | None, option("Model", "--size", "tiny, 25m or 100m (default: tiny on a CPU, 100m on a GPU).")
    ] = None,
    dim: Annotated[int | None, option("Model", "--dim", "Width, instead of the size's.")] = None,
    heads: Annotated[int | None, option("Model", "--heads", "Attention heads, instead of the size's.")] = None,
    neurons: Annotated[int | None, option("Model", "--neurons", "Neurons per head, instead of the size's.")] = None,
    layers: Annotated[int | None, option("Model", "--layers", "Layers, instead of the size's.")] = None,
    dropout: Annotated[float | None, option("Model", "--dropout", "Share of neurons dropped (default: 0).")] = None,
    data: Annotated[
        str | None,
        option("Data", "--data", "A file, folder or quoted pattern (default: the Python standard library)."),
    ] = None,
    held_out: Annotated[
        float | None, option("Data", "--held-out", "Share kept for evaluation (default: 0.05).")
    ] = None,
    steps: Annotated[
        int | None, option("Training", "--steps", "Optimiser steps (default: 100 for tiny, else 300).")
    ] = None,
    batch: Annotated[int | None, option("Training", "--batch", "Sequences per micro-batch.")] = None,
    micro_batches: Annotated[
        int | None, option("Training", "--micro-batches", "Micro-batches per step; gradients add up in FP32.")
    ] = None,
    seq: Annotated[
        int | None, option("Training", "--seq", "Bytes per sequence (default: 128 for tiny, else 512).")
    ] = None,
    lr: Annotated[float | None, option("Training", "--lr", "Peak learning rate.")] = None,
    warmup: Annotated[int | None, option("Training", "--warmup", "Steps that rise to the peak rate.")] = None,
    schedule: Annotated[
        str | None,
        option("Training", "--schedule", "After the warm-up: cosine (down to 0) or constant (default: cosine)."),
    ] = None,
    clip: Annotated[
        float | None, option("Training", "--clip", "Largest gradient norm; 0: no limit (default: 1.0).")
    ] = None,
    optimizer: Annotated[
        str | None, option("Training", "--optimizer", "adamw, adamw8bit, adamw4bit or adamwfp8 (default: adamw).")
    ] = None,
    weight_decay: Annotated[float | None, option("Training", "--weight-decay", "Weight decay (default: 0.1).")] = None,
    beta1: Annotated[float | None, option("Training", "--beta1", "Memory of the gradient (default: 0.9).")] = None,
    beta2: Annotated[float | None, option("Training", "--beta2", "Memory of its square (default: 0.95).")] = None,
    seed: Annotated[
        int | None, option("Training", "--seed", "Seed of weights, data order and rounding (default: 0).")
    ] = None,
    precision: Annotated[str | None, option("Precision", "--precision", "fp8, bf16 or fp32 (default: fp8).")] = None,
    dtype: Annotated[
        str | None,
        option("Precision", "--dtype", "Outside FP8 products: auto, float32 (on a CPU) or bfloat16 (on a GPU)."),
    ] = None,
    device: Annotated[str | None, option("Precision", "--device", "auto, cpu or cuda (default: auto).")] = None,
    tf32: Annotated[
        bool | None, option("Precision", "--tf32/--no-tf32", "TF32 for FP32 products on a GPU (default: on).")
    ] = None,
    compare: Annotated[
        bool | None, option("Precision", "--compare/--no-compare", "Then train in BF16 too, and compare.")
    ] = None,
    fused: Annotated[
        bool | None,
        option("Precision", "--fused/--no-fused", "Fused FP8 layers (default: on with FP8 tensor cores)."),
    ] = None,
    compile: Annotated[
        bool | None,
        option("Precision", "--compile/--no-compile", "torch.compile, where layers are not fused (default: on a GPU)."),
    ] = None,
    recipe: Annotated[
        str | None,
        option("FP8", "--recipe", f"{in_words(RECIPES)}; refined by the options below."),
    ] = None,
    fp8_format: Annotated[str | None, option("FP8", "--fp8-format", "hybrid, e4m3 or e5m2 (default: hybrid).")] = None,
    amax_history_len: Annotated[
        int | None, option("FP8", "--amax-history-len", "Steps that delayed scaling remembers (default: 32).")
    ] = None,
    amax_compute_algo: Annotated[
        str | None, option("FP8", "--amax-compute-algo", "How they are read: max, most_recent or ema (default: max).")
    ] = None,
    margin: Annotated[
        Any, operand_option("--margin", "Headroom, as a power of two: one number, or x,w,g (default: 0).", float)
    ] = None,
    granularity: Annotated[str | None, option("FP8", "--granularity", f"{in_words(GRANULARITIES)}.")] = None,
    scaling: Annotated[str | None, option("FP8", "--scaling", "delayed or current.")] = None,
    amax_update_interval: Annotated[
        int | None, option("FP8", "--amax-update-interval", "Steps between new delayed scales (default: 1).")
    ] = None,
    percentile: Annotated[
        float | None, option("FP8", "--percentile", "Take amax at this percentile of |x|, such as 99.99.")
    ] = None,
    rounding: Annotated[
        Any, operand_option("--rounding", "nearest or stochastic: one word, or x,w,g (default: nearest).", str)
    ] = None,
    skip: Annotated[
        list[str] | None,
        option("FP8", "--skip", "A product to leave in high precision; repeatable (default: lm_head)."),
    ] = None,
    emulate: Annotated[
        bool | None, option("FP8", "--emulate/--no-emulate", "Emulate FP8, or insist on tensor cores.")
    ] = None,
    nproc: Annotated[
        int | None, option("Several GPUs", "--nproc", "Processes of this machine that share each step, one a GPU.")
    ] = None,
    strategy: Annotated[
        str | None, option("Several GPUs", "--strategy", "ddp (whole copies) or fsdp2 (shards) (default: ddp).")
    ] = None,
    out: Annotated[
        Path | None, option("Run", "--out", "Output folder (default: a new one such as runs/bdh-tiny-001).")
    ] = None,
    resume: Annotated[bool, option("Run", "--resume", "Continue the run in --out from its checkpoint.")] = False,
    overwrite: Annotated[bool, option("Run", "--overwrite", "Replace the run in --out.")] = False,
    log_interval: Annotated[
        int | None, option("Run", "--log-interval", "Steps between printed lines (default: 10).")
    ] = None,
    save_interval: Annotated[int | None, option("Run", "--save-interval", "Steps between checkpoints.")] = None,
    evaluation_batches: Annotated[
        int | None, option("Run", "--evaluation-batches", "Held-out batches measured at the end (default: 8).")
    ] = None,
    sample_bytes: Annotated[
        int | None, option("Run", "--sample-bytes", "Bytes to generate at the end (default: 120).")
    ] = None,
) -> None:
    """Train a model of bytes in FP8 (emulated where there are no FP8 tensor cores), and write a report.

    Without options: BDH on the source of Python's standard library, a few minutes on any machine.
    """
    options = {name: value for name, value in locals().items() if value is not None}
    ranks = planned_ranks(nproc)

    from octavo.training.run_folder import find_run, read_settings
    from octavo.training.settings import settings_from_options

    for name in ("out", "resume", "overwrite", "nproc"):
        options.pop(name, None)
    fp8 = {name: options.pop(name) for name in FP8_FIELDS if name in options}
    if resume and overwrite:
        raise UserError("--resume continues the run in --out and --overwrite replaces it: give one of them")
    options["ranks"] = ranks
    base = read_settings(find_run(out)) if resume else None
    try:
        settings = settings_from_options({**options, "fp8": fp8}, base)
    except ValueError as error:
        raise UserError(str(error)) from error
    if launch(ranks):
        return

    from octavo.training.loop import train as run_training
    from octavo.training.several_ranks import console_of, is_first

    console = console_of(Console())
    result = run_training(settings, out=out, resume=resume, overwrite=overwrite, console=console)
    if is_first():
        _report(result.folder, console)
    if result.diverged:
        raise RunError(
            f"the run has diverged: {' and '.join(result.diverged)} ended without a finite loss; try a smaller --lr "
            f"(it is {settings.lr:g}), a longer --warmup ({settings.warmup}) or --precision bf16"
        )


def _report(folder: Path, console: Console) -> None:
    from octavo.tools.html_report import write_report
    from octavo.tools.run_memory import show_memory
    from octavo.training.files import disk_errors
    from octavo.training.run_folder import REPORT

    show_memory(folder, console)
    try:
        with disk_errors(folder / REPORT):
            report = write_report(folder)
    except ValueError as error:
        raise RunError(f"no report: {error}; restore the file or, if it is not config.json, delete it") from error
    console.print(Text(f"Report: {report}", style="bold"), soft_wrap=True)
