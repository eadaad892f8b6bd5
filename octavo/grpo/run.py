"""A run of GRPO, from a request to its results.

Everything that can be wrong with a request is found before the run's folder is made: model, tokenizer, task, engine.
What needs no prompts is checked before they are made, which takes minutes for some tasks. A run that was interrupted
anywhere is continued by the same function with `resume=True`. A run without arguments makes the model that it starts
from, and so its folder first.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from octavo.grpo import demo
from octavo.grpo.display import Display
from octavo.grpo.model import check_engine, check_model, load, make_engine, stops
from octavo.grpo.session import Session, write_config
from octavo.grpo.settings import RunSettings
from octavo.hf.quiet import quiet_transformers
from octavo.rl.grpo import GRPO
from octavo.rl.learner import Learner
from octavo.rl.prompts import Prompts
from octavo.rl.tasks import Task, read_task
from octavo.support import check_fp8_support, leave_emulation_unannounced
from octavo.training.checkpoint import list_checkpoints
from octavo.training.errors import RunError, UserError
from octavo.training.files import replace_file
from octavo.training.run_folder import (
    BASE,
    CONFIG,
    MADE_PROMPTS,
    check_free,
    find_run,
    new_run,
    read_config,
    resumed_run,
)
from octavo.training.signals import Interrupted, StopSignals


def train_grpo(
    settings: RunSettings,
    *,
    out: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    warm_up: int = demo.STEPS,
    console: Console | None = None,
) -> Path:
    """Train a model by its rewards; return the folder with the results (`out`, or a new one below `runs/`).

    `warm_up`: steps by which the small decoder of a run without arguments is made. Raises `UserError` for mistakes
    that the user can correct and `Interrupted` after a Ctrl-C or SIGTERM; in both cases the folder can be resumed if
    it holds `config.json`, from its last checkpoint or from the start.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device='cuda': torch sees no CUDA device here; use --device cpu")
    display, stop = Display(console or Console()), StopSignals()
    with stop.caught(), quiet_transformers():
        _opening(settings, display)
        _check_without_prompts(settings, out, resume, overwrite)
        task = _read_task(settings, display, _kept_prompts(find_run(out)) if resume else None)
        display.say(f"Task: {task.description or task.name}; rewards: {', '.join(task.rewards.names)}", "dim")
        if resume:
            _check_same_prompts(find_run(out), task)
        opening = resumed_run(out) if resume else new_run(settings.name, out, overwrite)
        if settings.model is None:
            with opening as folder, demo.one_thread():
                write_config(folder, settings, _facts(task))
                grpo = _prepare(str(_base(folder, settings, warm_up, display)), settings, task, display)
                _train(folder, settings, grpo, display, stop)
        else:
            grpo = _prepare(settings.model, settings, task, display)
            with opening as folder:
                _train(folder, settings, grpo, display, stop)
    return folder


def _train(folder: Path, settings: RunSettings, grpo: GRPO, display: Display, stop: StopSignals) -> None:
    facts = {**_facts(grpo.task), "prompts_too_long": grpo.prompts.too_long}
    _keep_prompts(folder, grpo.task)
    session = Session(folder, settings, grpo, facts, display, stop)
    display.say(_plan(settings, folder), "dim")
    try:
        session.train()
        session.finish()
    except Interrupted as interrupted:
        _say_how_to_resume(folder, interrupted, display)
        raise
    except RunError as error:
        checkpoints = list_checkpoints(folder)
        if checkpoints and str(checkpoints[-1]) in str(error):  # that one is what went wrong
            raise
        raise RunError(f"{error} [{_checkpoint(folder)}]") from error


def read_settings(folder: Path) -> RunSettings:
    """Read the settings that a run was started with."""
    config = read_config(folder)
    command = config.get("command", "train")
    if command != "grpo":
        raise UserError(
            f"{folder} is a run of octavo {command}: continue it with octavo {command} --resume --out {folder}"
        )
    try:
        return RunSettings.from_dict(config)
    except (ValueError, TypeError) as error:
        raise RunError(f"{folder / CONFIG} has changed: {error}; restore it, or start anew in another --out") from error


def _opening(settings: RunSettings, display: Display) -> None:
    what = "all weights" if settings.full else f"LoRA of rank {settings.rank}"
    fp8 = ", products in FP8" if settings.full else f" on weights frozen in FP8, products {settings.products}"
    precision = fp8 if settings.precision == "fp8" else " in BF16"
    name = settings.model or "a small decoder, to sort digits"
    display.say(f"GRPO of {name}: {what}{precision}; engine {settings.engine}, on {settings.device}", "bold")
    support = check_fp8_support(settings.device)
    if settings.precision == "fp8" and not support:
        display.say(f"FP8 products are emulated: {support.reason}", "dim")
        leave_emulation_unannounced(settings.device)


def _check_without_prompts(settings: RunSettings, out: Path | None, resume: bool, overwrite: bool) -> None:
    if resume:
        _check_same_settings(find_run(out), settings)
    elif out is not None:
        check_free(out, overwrite)
    if settings.model is not None:
        check_model(settings)
    check_engine(settings)


def _read_task(settings: RunSettings, display: Display, kept: list[dict[str, Any]] | None) -> Task:
    if settings.task is None:
        return demo.sorting_task(settings.seed)
    rewards = None if settings.rewards is None else Path(settings.rewards)
    return read_task(settings.task, rewards, settings.seed, display.watch_prompts, kept)


def _keep_prompts(folder: Path, task: Task) -> None:
    """Keep prompts that took time to make for a run that is resumed."""
    if task.made:
        replace_file(folder / MADE_PROMPTS, "".join(json.dumps(row) + "\n" for row in task.rows))


def _kept_prompts(folder: Path) -> list[dict[str, Any]] | None:
    """Return the prompts that a run has kept; None if they are to be made again."""
    try:
        text = (folder / MADE_PROMPTS).read_text()
        return [json.loads(line) for line in text.splitlines()]
    except (OSError, ValueError):
        return None


def _facts(task: Task) -> dict[str, Any]:
    return {"task_found": task.description, "task_sha256": _digest(task)}


def _digest(task: Task) -> str:
    return hashlib.sha256(json.dumps(list(task.rows), sort_keys=True, default=str).encode()).hexdigest()


def _base(folder: Path, settings: RunSettings, steps: int, display: Display) -> Path:
    """Return the folder of the small decoder, which is made where it is not there yet."""
    base = folder / BASE
    if not base.exists():
        wrong = f"{100 * demo.WRONG:.0f} %"
        display.say(f"Making the model: {steps} steps on examples of which {wrong} are wrong (about a minute)", "dim")
        try:
            with display.bar("examples", steps):
                demo.make_base(base, settings.seed, steps=steps, progress=lambda _, x: display.advance(f"{x:.3f}"))
        except Interrupted as interrupted:
            _say_how_to_resume(folder, interrupted, display)
            raise
    return base


def _prepare(name: str, settings: RunSettings, task: Task, display: Display) -> GRPO:
    """Return the loop, with everything that can be wrong with it found out."""
    torch.manual_seed(settings.seed)
    model, tokenizer = load(name, settings)
    stop_ids, stop_texts = stops(model, tokenizer, settings)
    try:
        prompts = Prompts(task, tokenizer, Learner(model), settings)
    except ValueError as error:
        raise UserError(f"MODEL {name} cannot be trained: {error}") from error
    engine = make_engine(model, settings, max(len(prompt.ids) for prompt in prompts.all))
    try:
        grpo = GRPO(
            model, tokenizer, task, engine, settings, stop_ids=stop_ids, stop_texts=stop_texts, standby=settings.standby
        )
    except ModuleNotFoundError as error:  # torchao, for small states of the optimiser
        raise UserError(str(error)) from error
    if grpo.prompts.too_long:
        display.say(
            f"{grpo.prompts.too_long:,} prompts of more than {grpo.prompts.room:,} tokens are left out: the model has "
            f"{grpo.learner.positions:,} positions, {settings.max_new_tokens:,} of them for completions",
            "yellow",
        )
    return grpo


def _plan(settings: RunSettings, folder: Path) -> str:
    return (
        f"Steps: {settings.steps:,} of {settings.prompts} prompts × {settings.completions} completions of at most "
        f"{settings.max_new_tokens:,} tokens, {settings.loss_type}, correction {settings.correction}, peak rate "
        f"{settings.lr:g}; output: {folder}"
    )


def _check_same_settings(folder: Path, settings: RunSettings) -> None:
    before = read_settings(folder)
    if changed := before.changes_to_curve(settings):
        name = changed[0]
        raise UserError(
            f"cannot resume {folder} with {name}={getattr(settings, name)!r}: it was started with "
            f"{getattr(before, name)!r}, and the change would alter the rewards; leave the option out to continue as "
            "it was, or start a new run without --resume"
        )


def _check_same_prompts(folder: Path, task: Task) -> None:
    if read_config(folder).get("task_sha256") != _digest(task):
        raise UserError(
            f"cannot resume {folder}: the prompts are not those that the run was started with; restore them, or start "
            "a new run without --resume"
        )


def _checkpoint(folder: Path) -> str:
    checkpoints = list_checkpoints(folder)
    return f"{checkpoints[-1]} is intact" if checkpoints else "no checkpoint was written yet"


def _say_how_to_resume(folder: Path, interrupted: Interrupted, display: Display) -> None:
    words = f"Stopped ({interrupted}); {_checkpoint(folder)}. Continue with: octavo grpo --resume --out {folder}"
    display.say(words, "bold")
