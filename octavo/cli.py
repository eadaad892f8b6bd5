"""The `octavo` command: it reads the command line and hands over to the library. Nothing is computed here.

Exit codes: 0 done; 1 the run could not go on; 2 the request cannot be met; 130 and 143 stopped by Ctrl-C and SIGTERM.
An error that a person can act on is one line on stderr, a few where memory runs out; a traceback means a bug in Octavo.
"""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from octavo import __version__
from octavo.optim import OPTIMIZERS
from octavo.tools.bench.cases import DECODERS, PRESETS, make_case
from octavo.tools.bench.contenders import AGAINST, make_contenders
from octavo.tools.bench.plan import BenchPlan
from octavo.tools.bench.plan import run_plan as run_bench
from octavo.tools.memory import show_memory
from octavo.tools.plan.gpus import GPUS
from octavo.tools.plan.request import Request
from octavo.tools.plan.run import make_plan, run_plan
from octavo.tools.report import write_report
from octavo.training.errors import RunError, UserError
from octavo.training.files import disk_errors
from octavo.training.loop import train as run_training
from octavo.training.run_folder import REPORT, find_run, read_settings
from octavo.training.settings import settings_from_options
from octavo.training.signals import Interrupted

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

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


def main() -> None:
    """The entry point."""
    try:
        app()
    except UserError as error:
        _fail(str(error), error.exit_code)
    except Interrupted as interrupted:
        sys.exit(128 + interrupted.number)
    except KeyboardInterrupt:
        _fail("interrupted", 128 + signal.SIGINT)


def _fail(message: str, code: int) -> None:
    Console(stderr=True).print(Text(f"octavo: {message}", style="red"), soft_wrap=True)
    sys.exit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def octavo(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Train PyTorch models in FP8."""


def _option(panel: str, name: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel, show_default=False)


def _per_operand(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Reads `value`, or `x,w,g` with a value each."""

    def parse(text: str) -> Any:
        values = [kind(part.strip()) for part in text.split(",")]
        return values[0] if len(values) == 1 else values

    return parse


def _operand_option(name: str, text: str, kind: Callable[[str], Any]) -> Any:
    return typer.Option(
        name, help=text, rich_help_panel="FP8", show_default=False, parser=_per_operand(kind), metavar="<x,w,g>"
    )


# None means "not given": then the defaults of the model's size and of the device hold, or the resumed run's settings.
@app.command()
def train(
    model: Annotated[str | None, _option("Model", "--model", "The architecture: bdh.")] = None,
    size: Annotated[
        str | None, _option("Model", "--size", "tiny, 25m or 100m (default: tiny on a CPU, 100m on a GPU).")
    ] = None,
    dim: Annotated[int | None, _option("Model", "--dim", "Width, instead of the size's.")] = None,
    heads: Annotated[int | None, _option("Model", "--heads", "Attention heads, instead of the size's.")] = None,
    neurons: Annotated[int | None, _option("Model", "--neurons", "Neurons per head, instead of the size's.")] = None,
    layers: Annotated[int | None, _option("Model", "--layers", "Layers, instead of the size's.")] = None,
    dropout: Annotated[float | None, _option("Model", "--dropout", "Share of neurons dropped (default: 0).")] = None,
    data: Annotated[
        str | None,
        _option("Data", "--data", "A file, folder or quoted pattern (default: the Python standard library)."),
    ] = None,
    held_out: Annotated[
        float | None, _option("Data", "--held-out", "Share kept for evaluation (default: 0.05).")
    ] = None,
    steps: Annotated[
        int | None, _option("Training", "--steps", "Optimiser steps (default: 100 for tiny, else 300).")
    ] = None,
    batch: Annotated[int | None, _option("Training", "--batch", "Sequences per micro-batch.")] = None,
    micro_batches: Annotated[
        int | None, _option("Training", "--micro-batches", "Micro-batches per step; gradients add up in FP32.")
    ] = None,
    seq: Annotated[
        int | None, _option("Training", "--seq", "Bytes per sequence (default: 128 for tiny, else 512).")
    ] = None,
    lr: Annotated[float | None, _option("Training", "--lr", "Peak learning rate.")] = None,
    warmup: Annotated[int | None, _option("Training", "--warmup", "Steps that rise to the peak rate.")] = None,
    schedule: Annotated[
        str | None,
        _option("Training", "--schedule", "After the warm-up: cosine (down to 0) or constant (default: cosine)."),
    ] = None,
    clip: Annotated[
        float | None, _option("Training", "--clip", "Largest gradient norm; 0: no limit (default: 1.0).")
    ] = None,
    optimizer: Annotated[
        str | None, _option("Training", "--optimizer", "adamw, adamw8bit, adamw4bit or adamwfp8 (default: adamw).")
    ] = None,
    weight_decay: Annotated[float | None, _option("Training", "--weight-decay", "Weight decay (default: 0.1).")] = None,
    beta1: Annotated[float | None, _option("Training", "--beta1", "Memory of the gradient (default: 0.9).")] = None,
    beta2: Annotated[float | None, _option("Training", "--beta2", "Memory of its square (default: 0.95).")] = None,
    seed: Annotated[
        int | None, _option("Training", "--seed", "Of weights, data order and rounding (default: 0).")
    ] = None,
    precision: Annotated[str | None, _option("Precision", "--precision", "fp8, bf16 or fp32 (default: fp8).")] = None,
    dtype: Annotated[
        str | None,
        _option("Precision", "--dtype", "Outside FP8 products: auto, float32 (on a CPU) or bfloat16 (on a GPU)."),
    ] = None,
    device: Annotated[str | None, _option("Precision", "--device", "auto, cpu or cuda (default: auto).")] = None,
    tf32: Annotated[
        bool | None, _option("Precision", "--tf32/--no-tf32", "TF32 for FP32 products on a GPU (default: on).")
    ] = None,
    compare: Annotated[
        bool | None, _option("Precision", "--compare/--no-compare", "Then train in BF16 too, and compare.")
    ] = None,
    recipe: Annotated[
        str | None,
        _option("FP8", "--recipe", "delayed, current, channel, block or mx; refined by the options below."),
    ] = None,
    fp8_format: Annotated[str | None, _option("FP8", "--fp8-format", "hybrid, e4m3 or e5m2 (default: hybrid).")] = None,
    amax_history_len: Annotated[
        int | None, _option("FP8", "--amax-history-len", "Steps that delayed scaling remembers (default: 32).")
    ] = None,
    amax_compute_algo: Annotated[
        str | None, _option("FP8", "--amax-compute-algo", "How they are read: max, most_recent or ema (default: max).")
    ] = None,
    margin: Annotated[
        Any, _operand_option("--margin", "Headroom, as a power of two: one number, or x,w,g (default: 0).", float)
    ] = None,
    granularity: Annotated[str | None, _option("FP8", "--granularity", "tensor, channel, block or mx.")] = None,
    scaling: Annotated[str | None, _option("FP8", "--scaling", "delayed or current.")] = None,
    amax_update_interval: Annotated[
        int | None, _option("FP8", "--amax-update-interval", "Steps between new delayed scales (default: 1).")
    ] = None,
    percentile: Annotated[
        float | None, _option("FP8", "--percentile", "Take amax at this percentile of |x|, such as 99.99.")
    ] = None,
    rounding: Annotated[
        Any, _operand_option("--rounding", "nearest or stochastic: one word, or x,w,g (default: nearest).", str)
    ] = None,
    skip: Annotated[
        list[str] | None,
        _option("FP8", "--skip", "A product to leave in high precision; repeatable (default: lm_head)."),
    ] = None,
    emulate: Annotated[
        bool | None, _option("FP8", "--emulate/--no-emulate", "Emulate FP8, or insist on tensor cores.")
    ] = None,
    out: Annotated[
        Path | None, _option("Run", "--out", "Output folder (default: a new one such as runs/bdh-tiny-001).")
    ] = None,
    resume: Annotated[bool, _option("Run", "--resume", "Continue the run in --out from its checkpoint.")] = False,
    overwrite: Annotated[bool, _option("Run", "--overwrite", "Replace the run in --out.")] = False,
    log_interval: Annotated[
        int | None, _option("Run", "--log-interval", "Steps between printed lines (default: 10).")
    ] = None,
    save_interval: Annotated[int | None, _option("Run", "--save-interval", "Steps between checkpoints.")] = None,
    evaluation_batches: Annotated[
        int | None, _option("Run", "--evaluation-batches", "Held-out batches measured at the end (default: 8).")
    ] = None,
    sample_bytes: Annotated[
        int | None, _option("Run", "--sample-bytes", "Bytes to generate at the end (default: 120).")
    ] = None,
) -> None:
    """Train a model of bytes in FP8 (emulated where there are no FP8 tensor cores), and report on it.

    Without options: BDH on the source of Python's standard library, a few minutes on any machine.
    """
    options = {name: value for name, value in locals().items() if value is not None}
    for name in ("out", "resume", "overwrite"):
        options.pop(name, None)
    fp8 = {name: options.pop(name) for name in FP8_FIELDS if name in options}
    if resume and overwrite:
        raise UserError("--resume continues the run in --out and --overwrite replaces it: give one of them")
    base = read_settings(find_run(out)) if resume else None
    try:
        settings = settings_from_options({**options, "fp8": fp8}, base)
    except ValueError as error:
        raise UserError(str(error)) from error

    console = Console()
    result = run_training(settings, out=out, resume=resume, overwrite=overwrite, console=console)
    show_memory(result.folder, console)
    try:
        with disk_errors(result.folder / REPORT):
            report = write_report(result.folder)
    except ValueError as error:
        raise RunError(f"no report: {error}; restore the file or, if it is not config.json, delete it") from error
    console.print(Text(f"Report: {report}", style="bold"), soft_wrap=True)
    if result.diverged:
        raise RunError(
            f"the run has diverged: {' and '.join(result.diverged)} ended without a finite loss; try a smaller --lr "
            f"(it is {settings.lr:g}), a longer --warmup ({settings.warmup}) or --precision bf16"
        )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


@app.command()
def bench(
    preset: Annotated[
        str | None, _option("Model", "--preset", f"{', '.join(DECODERS)}, bdh-100m, bdh-25m or bdh-tiny.")
    ] = None,
    config: Annotated[
        Path | None, _option("Model", "--config", "Or a Hugging Face config.json of a dense decoder.")
    ] = None,
    layers: Annotated[int | None, _option("Model", "--layers", "Layers, instead of the model's.")] = None,
    mode: Annotated[str, _option("Model", "--mode", "full or lora (default: full).")] = "full",
    rank: Annotated[
        int | None, _option("Model", "--rank", "Of LoRA's adapters (default: 32); 0: the frozen base alone.")
    ] = None,
    targets: Annotated[
        str | None, _option("Model", "--targets", "Linears with adapters: all, attention or mlp (default: all).")
    ] = None,
    tokens: Annotated[int | None, _option("Model", "--tokens", "Tokens a step (default: 8192; tiny: 256).")] = None,
    seq: Annotated[int | None, _option("Model", "--seq", "Tokens a sequence (default: 2048; tiny: 64).")] = None,
    recipe: Annotated[
        str | None,
        _option(
            "Contenders",
            "--recipe",
            "delayed, current, channel, block, mx: several by commas; +fp8-head, +wgrad-channel, +graphs and "
            "+fp8-activations go with one. "
            "With LoRA: block, channel, current; +weights-only multiplies in BF16.",
        ),
    ] = None,
    head: Annotated[str, _option("Contenders", "--head", "bf16, fp8 or both (default: bf16).")] = "bf16",
    wgrad: Annotated[
        str, _option("Contenders", "--wgrad", "Block recipe's weight gradient: recipe, channel or both.")
    ] = "recipe",
    against: Annotated[
        str | None, _option("Contenders", "--against", f"{', '.join(AGAINST)}: several by commas (default: all).")
    ] = None,
    compile: Annotated[
        bool, _option("Contenders", "--compile/--no-compile", "Compile decoder layers (default: yes).")
    ] = True,
    optimizer: Annotated[
        str | None,
        _option(
            "Contenders",
            "--optimizer",
            f"Whole steps, with the optimiser: {', '.join(OPTIMIZERS)}, several by commas, for ours; AdamW for others. "
            "+in-backward, +offload-optimizer and +offload-master then go with a recipe.",
        ),
    ] = None,
    gemm: Annotated[bool, _option("Parts", "--gemm", "Time the model's GEMMs instead of its step.")] = False,
    kernels: Annotated[bool, _option("Parts", "--kernels", "Time quantising instead of the step.")] = False,
    rounds: Annotated[int, _option("Run", "--rounds", "Turns of every contender (default: 3).")] = 3,
    steps: Annotated[int, _option("Run", "--steps", "Timed steps a turn (default: 5).")] = 5,
    warmup: Annotated[int, _option("Run", "--warmup", "Untimed steps before the first (default: 3).")] = 3,
    seed: Annotated[int, _option("Run", "--seed", "Of weights and tokens (default: 0).")] = 0,
    device: Annotated[str, _option("Run", "--device", "auto, cpu or cuda (default: auto).")] = "auto",
    out: Annotated[Path, _option("Run", "--out", "Folder of the result file (default: benchmarks/results).")] = Path(
        "benchmarks/results"
    ),
    force: Annotated[bool, _option("Run", "--force", "On a CPU, large models too.")] = False,
) -> None:
    """Time a training step in FP8 against BF16 and other libraries, on your own device.

    Correctness first; then every contender in a process of its own, interleaved. Random weights, nothing is downloaded.
    """
    if gemm and kernels:
        raise UserError("--gemm and --kernels time different parts: give one of them")
    if optimizer is not None and (gemm or kernels):
        part = "--gemm" if gemm else "--kernels"
        raise UserError(f"--optimizer {optimizer}: is of whole steps, and {part} times parts of one; leave one out")
    part = "gemm" if gemm else "kernels" if kernels else "step"
    try:
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
            recipes=_names(recipe or ("block,channel" if case.frozen else "delayed")),
            head=head,
            wgrad=wgrad,
            against=_names(against) if against is not None else AGAINST,
            compile=compile,
            optimizers=_names(optimizer) if optimizer is not None else (),
        )
        plan = BenchPlan(part, case, contenders, reasons, rounds, steps, warmup)
    except ValueError as error:
        raise UserError(str(error)) from error
    run_bench(plan, out=out, command=["octavo", *sys.argv[1:]], console=Console())


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=f"{', '.join(PRESETS)}; or a config.json, or a folder with one.")
    ],
    mode: Annotated[str, _option("Training", "--mode", "full, lora or grpo (to come) (default: full).")] = "full",
    batch: Annotated[int, _option("Training", "--batch", "Sequences a step (default: 4).")] = 4,
    seq: Annotated[int, _option("Training", "--seq", "Tokens a sequence (default: 2048).")] = 2048,
    layers: Annotated[int | None, _option("Training", "--layers", "Layers, instead of the model's.")] = None,
    rank: Annotated[int | None, _option("Training", "--rank", "Of LoRA's adapters (default: 32).")] = None,
    targets: Annotated[
        str | None, _option("Training", "--targets", "Linears with adapters: all, attention or mlp (default: all).")
    ] = None,
    head: Annotated[str, _option("Training", "--head", "Of FP8 options: bf16 or fp8 (default: bf16).")] = "bf16",
    compile: Annotated[
        bool, _option("Training", "--compile/--no-compile", "Compile decoder layers (default: yes).")
    ] = True,
    offload: Annotated[
        str | None,
        _option("Training", "--offload", "To host memory: none, optimizer or master (default: each is compared)."),
    ] = None,
    gpu: Annotated[
        str | None, _option("GPU", "--gpu", f"What fits: GiB such as 24, or one of {', '.join(GPUS)}.")
    ] = None,
    json: Annotated[Path | None, _option("Output", "--json", "Write all figures to this file, too.")] = None,
) -> None:
    """Say how much GPU memory a training step takes, before anything runs: no weights, no GPU, nothing to download.

    For BF16 and each FP8 option; with --gpu also the largest batch of each, and the code of the one to take.
    """
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
        found = make_plan(request)
    except ValueError as error:
        raise UserError(str(error)) from error
    run_plan(found, json=json, console=Console())


if __name__ == "__main__":
    main()
