"""A fine-tuning run, from a request to its results.

Everything that can be wrong with a request is found before the run's folder is made: model, tokenizer, data, memory. A
run that was interrupted anywhere is continued by the same function with `resume=True`.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from octavo.sft.display import Display
from octavo.sft.docstrings import read_docstrings
from octavo.sft.examples import Data, make_examples, split
from octavo.sft.memory import choose_checkpointing, show_plan
from octavo.sft.model import choose_layout, find_model, load_model, longest, read_tokenizer
from octavo.sft.quiet import quiet
from octavo.sft.session import Session
from octavo.sft.settings import SFTSettings, read_settings
from octavo.sft.sources import Source, read_source
from octavo.sft.trainer import newest_checkpoint
from octavo.support import check_fp8_support, leave_emulation_unannounced
from octavo.training.errors import UserError
from octavo.training.run_folder import find_run, new_run, read_config, resumed_run
from octavo.training.several_ranks import (
    agree_on_stops,
    check_alike,
    console_of,
    first_then_others,
    folder_of,
    met,
    nproc,
)
from octavo.training.signals import Interrupted, StopSignals


def fine_tune(
    settings: SFTSettings,
    *,
    out: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    plan: bool = False,
    console: Console | None = None,
) -> Path:
    """Fine-tune a model; return the folder with the results (`out`, or a new one below `runs/`).

    Raises `UserError` for mistakes that the user can correct and `Interrupted` after a Ctrl-C or SIGTERM; in both
    cases the folder can be resumed if it holds a checkpoint.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device='cuda': torch sees no CUDA device here; use --device cpu")
    check_strategy(settings)
    display = Display(console_of(console), settings.device)
    stop = StopSignals()
    agree_on_stops(stop)
    with stop.caught(), quiet(), met(settings.device):
        _opening(settings, display)
        name, config = first_then_others(lambda: find_model(settings))  # it may be made, or downloaded
        tokenizer = read_tokenizer(name, settings)
        seq, positions = longest(name, settings)
        settings = replace(settings, seq=seq)
        data = _read_data(settings, tokenizer, positions)
        display.say(f"Data: {data}", "dim")
        if resume:
            _check_same_run(find_run(out), settings, data)
        settings = _with_memory(settings, config, plan, display)
        model = load_model(name, settings)
        settings = replace(settings, layout=choose_layout(model, settings))
        check_alike(settings.to_dict(), data.train.digest)
        opened = partial(resumed_run, out) if resume else partial(new_run, settings.name, out, overwrite)
        with folder_of(opened) as folder:
            session = Session(folder, settings, data, model, tokenizer, display, stop)
            try:
                session.train()
                session.finish()
            except Interrupted as interrupted:
                _say_how_to_resume(folder, interrupted, display)
                raise
    return folder


def check_strategy(settings: SFTSettings) -> None:
    """Refuse shards where Accelerate makes none: on CPUs it trains whole copies instead, without a word."""
    if settings.strategy == "fsdp2" and settings.device == "cpu":
        raise UserError("--strategy fsdp2: Accelerate shards on GPUs alone; leave it out, for whole copies by ddp")


def _opening(settings: SFTSettings, display: Display) -> None:
    what = "all weights" if settings.full else f"LoRA of rank {settings.rank}"
    fp8 = ", products in FP8" if settings.full else " on weights frozen in FP8"
    precision = fp8 if settings.precision == "fp8" else " in BF16"
    display.say(f"Fine-tuning {settings.model or 'SmolLM2-135M'}: {what}{precision}; on {settings.device}", "bold")
    support = check_fp8_support(settings.device)
    if settings.precision == "fp8" and not support:
        display.say(f"FP8 products are emulated: {support.reason}", "dim")
        leave_emulation_unannounced(settings.device)


def _read_data(settings: SFTSettings, tokenizer: object, positions: int | None) -> Data:
    assert settings.seq is not None
    source = read_docstrings() if settings.data is None else read_source(settings.data, settings.split)
    examples = make_examples(source, tokenizer, settings, settings.seq, positions=positions)
    if settings.eval_data is None:
        train, held_out = split(examples, settings.held_out, settings.seed)
        return Data(train, held_out, source.description)
    other: Source = read_source(settings.eval_data, settings.split, "--eval-data")
    held_out = make_examples(other, tokenizer, settings, settings.seq, "--eval-data", positions)
    return Data(examples, held_out, f"{source.description}; evaluated on {other.description}")


def _with_memory(settings: SFTSettings, config: Path, plan: bool, display: Display) -> SFTSettings:
    """Compare the run with the memory there is, and return settings that say whether to checkpoint."""
    assert settings.seq is not None
    if plan:
        show_plan(settings, config, settings.seq, display.console)
    checkpointing, words = choose_checkpointing(settings, config, settings.seq)
    if words:
        display.say(f"Memory: {words}", "dim")
    return replace(settings, checkpointing=checkpointing)


def _check_same_run(folder: Path, settings: SFTSettings, data: Data) -> None:
    before = read_settings(folder)
    if changed := before.changes_to_curve(settings):
        name = changed[0]
        raise UserError(
            f"cannot resume {folder} with {name}={getattr(settings, name)!r}: it was started with "
            f"{getattr(before, name)!r}, and the change would alter the loss curve; leave the option out to continue "
            "as it was, or start a new run without --resume"
        )
    if read_config(folder).get("data_sha256") != data.train.digest:
        raise UserError(
            f"cannot resume {folder}: the data, or what the tokenizer makes of it, is not what the run was started "
            "with; restore it, or start a new run without --resume"
        )


def _say_how_to_resume(folder: Path, interrupted: Interrupted, display: Display) -> None:
    checkpoint = newest_checkpoint(folder)
    saved = f"saved in {checkpoint[0]}" if checkpoint else "nothing was saved yet"
    display.say(f"Stopped ({interrupted}); {saved}. Continue with: octavo sft --resume --out {folder}{nproc()}", "bold")
