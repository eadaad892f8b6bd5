"""Training runs: data, steps, checkpoints, and the files left in the folder at the end.

    train(settings) = for each leg (the run itself; with `compare`, then the same in BF16):
                          resume from its newest checkpoint, or start
                          steps, a row of metrics each; a checkpoint every `save_interval` steps and at the end
                      held-out losses, trained model, sample, summary

A run killed anywhere is continued by the same function with `resume=True`: a complete leg has a checkpoint at its last
step and trains no further, so only missing work is repeated. The folder of a new run holds no checkpoint.

A finished run may be extended: `resume=True` with more steps. The learning rate then follows the longer schedule.
"""

import json
import math
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from octavo.dist.checkpoint import is_sharded_checkpoint
from octavo.dist.together import from_first, rank
from octavo.dist.whole import whole_state
from octavo.nn.sharded import ranks
from octavo.optim.step_memory import StepMemory, in_words, measure_memory
from octavo.training.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    load_shards,
    model_bytes,
    read_shards_state,
    save_checkpoint,
    save_shards,
)
from octavo.training.data import ByteData, load_data
from octavo.training.display import Display, code_of, why_emulated
from octavo.training.errors import RunError, UserError
from octavo.training.files import replace_file, write_json
from octavo.training.learner import Learner, Sample
from octavo.training.memory_errors import memory_errors
from octavo.training.run_folder import (
    BF16,
    METRICS,
    METRICS_BF16,
    MODEL,
    PRODUCTS,
    SAMPLE,
    SUMMARY,
    Metrics,
    memory_of,
    new_run,
    read_config,
    read_settings,
    read_summary,
    resumed_run,
    write_config,
)
from octavo.training.settings import TrainSettings
from octavo.training.several_ranks import (
    agree_on_stops,
    check_alike,
    console_of,
    folder_of,
    met,
    nproc,
    saved_by_others,
)
from octavo.training.signals import Interrupted, StopSignals
from octavo.training.step_rows import WARM_UP, StepRows, Taken, median_speed


@dataclass(frozen=True)
class LegResult:
    """Results of one training of the model.

    `final_loss` is the mean over the last 10 % of the steps, `held_out_loss` that on text never trained on. Speed is
    the median of the steps, `memory` their peak, since the run began or resumed; both without the first steps, which
    compile. `memory` is None if it was not measured.
    """

    final_loss: float
    held_out_loss: float
    tokens_per_s: float
    ms_per_step: float
    skipped: int
    memory: StepMemory | None

    @property
    def diverged(self) -> bool:
        return not (math.isfinite(self.final_loss) and math.isfinite(self.held_out_loss))

    def to_dict(self) -> dict[str, Any]:
        """Return values ready for JSON, which has no NaN."""
        plain = asdict(self)
        return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in plain.items()}


@dataclass(frozen=True)
class RunResult:
    """Folder of a run, and its results by precision."""

    folder: Path
    results: dict[str, LegResult]

    @property
    def diverged(self) -> list[str]:
        """Precisions whose model ended without a finite loss."""
        return [name for name, result in self.results.items() if result.diverged]


@dataclass(frozen=True)
class Leg:
    """One training of the model: its settings, and where its metrics and checkpoints go."""

    settings: TrainSettings
    metrics: Metrics
    checkpoints: Path


def train(
    settings: TrainSettings,
    *,
    out: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> RunResult:
    """Train, and leave all results in a folder (`out`, or a new one below `runs/`).

    Raises `UserError` for mistakes the user can correct and `Interrupted` after a Ctrl-C or SIGTERM; in both cases the
    folder can be resumed if it holds a checkpoint.
    """
    display = Display(console_of(console))
    stop = StopSignals()
    agree_on_stops(stop)
    with stop.caught(), met(settings.device):
        display.opening(settings)
        data = load_data(settings.data, sequence=settings.seq, held_out=settings.held_out)
        check_alike(settings.to_dict(), data.digest)
        learner = _new_learner(settings, data)  # before the folder is made: an impossible request leaves nothing behind
        opened = partial(resumed_run, out) if resume else partial(new_run, settings.name, out, overwrite)
        with folder_of(opened) as folder:
            legs = _legs(settings, folder)
            if resume:
                _check_resumable(legs, data, folder)
            start = _load_newest(legs[0], learner, display) if resume else 0
            if rank() == 0:
                write_config(folder, settings, _machine_facts(settings, data))
            display.model_and_data(settings, data, folder)
            ready = [learner]
            del learner  # a reference here would keep it in memory during the BF16 leg, and count in its peak
            try:
                return _train_legs(legs, data, ready, start, folder, display, stop)
            except Interrupted as interrupted:
                _say_how_to_resume(folder, interrupted, display)
                raise


def _legs(settings: TrainSettings, folder: Path) -> list[Leg]:
    writes = rank() == 0
    legs = [Leg(settings, Metrics(folder / METRICS, writes=writes), folder)]
    if settings.compare:
        legs.append(Leg(settings.in_bf16(), Metrics(folder / METRICS_BF16, writes=writes), folder / BF16))
    return legs


def _train_legs(
    legs: list[Leg],
    data: ByteData,
    ready: list[Learner],
    start: int,
    folder: Path,
    display: Display,
    stop: StopSignals,
) -> RunResult:
    """Train every leg. `ready`: the learner of the first leg at step `start`, which is removed from the list."""
    leg, learner = legs[0], ready.pop()
    with memory_errors(learner, leg.checkpoints, folder):
        taken = _train_leg(leg, learner, start, display, stop)
        results = {leg.settings.precision: _result(leg, learner, taken, folder)}
        parameters = whole_state(learner.model)
        if rank() == 0:
            replace_file(folder / MODEL, model_bytes(parameters, _model_metadata(leg.settings)))
        del parameters
        sample = _sample(learner)
    if sample is not None and rank() == 0:
        write_json(folder / SAMPLE, asdict(sample))
    for leg in legs[1:]:
        code = code_of(leg.settings)
        display.say(f"The same in BF16{code and ', ' + code}, for comparison", "bold")
        del learner
        learner = _new_learner(leg.settings, data)
        start = _load_newest(leg, learner, display)
        with memory_errors(learner, leg.checkpoints, folder):
            taken = _train_leg(leg, learner, start, display, stop)
            results[leg.settings.precision] = _result(leg, learner, taken, folder)

    if rank() == 0:
        write_json(folder / SUMMARY, {name: result.to_dict() for name, result in results.items()})
    display.sample(sample)
    display.results({name: asdict(result) for name, result in results.items()}, legs[0].settings)
    return RunResult(folder, results)


def _new_learner(settings: TrainSettings, data: ByteData) -> Learner:
    """Build a learner, and count its peak of memory from here."""
    if settings.device == "cuda" and torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        return Learner(settings, data)
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"out of GPU memory before the first step: the model's {settings.shape.parameter_count:,} parameters take "
            f"{in_words(4 * settings.shape.parameter_count)}; use a smaller --size, or a GPU that nothing else uses"
        ) from error


def _train_leg(leg: Leg, learner: Learner, start: int, display: Display, stop: StopSignals) -> int:
    """Train `learner` from after step `start` to the last step; return the number of steps taken."""
    settings = leg.settings
    leg.metrics.cut_back(start)
    rows = StepRows(settings, leg.metrics, display)
    with stop.deferred(), display.training(settings, done=start):
        for number in range(start + 1, settings.steps + 1):
            began = time.perf_counter()
            step = learner.step(number)
            seconds = time.perf_counter() - began
            log = number == 1 or number % settings.log_interval == 0 or number == settings.steps
            scaling = learner.scaling.statistics(reset=True) if log and learner.scaling is not None else None
            rows.add(Taken(number, step, seconds, log, scaling))
            if number == start + WARM_UP < settings.steps and settings.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            asked = stop.asked()
            if number % settings.save_interval == 0 or number == settings.steps or asked:
                rows.write()
                _save(leg, learner, number)
            if asked:
                raise Interrupted(asked)
    return settings.steps - start


def _save(leg: Leg, learner: Learner, number: int) -> None:
    leg.metrics.sync()
    state: dict[str, Any] = {"step": number, "settings": leg.settings.to_dict()}
    if ranks() > 1:
        save_shards(leg.checkpoints, number, learner, state)
    else:
        save_checkpoint(leg.checkpoints, number, learner.model.state_dict(), {**state, **learner.state_dict()})
    if learner.report is not None and rank() == 0:
        write_json(leg.checkpoints / PRODUCTS, learner.report.to_dict())


def _load_newest(leg: Leg, learner: Learner, display: Display) -> int:
    """Load the newest checkpoint into the learner; return its step, or 0 if there is none."""
    newest = _newest(leg, learner.device)
    if newest is None:
        return 0
    path, parameters, state = newest
    if parameters is None:
        saved_by = load_shards(path, learner)
    else:
        learner.load_state_dict(parameters, state)
        saved_by = 1
    if saved_by != ranks():
        display.say(saved_by_others(saved_by))
    step, planned = int(state["step"]), int(state["settings"]["steps"])
    display.say(f"Resuming after step {step:,}", "bold")
    settings = leg.settings
    if settings.schedule == "cosine" and planned < settings.steps:
        rate = settings.learning_rate(step + 1)
        display.say(
            f"Extending a run of {planned:,} steps to {settings.steps:,}: the rate is now that of a cosine over "
            f"{settings.steps:,} steps, {rate:.2e} at step {step + 1:,}"
        )
    return step


def _newest(leg: Leg, device: torch.device) -> tuple[Path, dict[str, Tensor] | None, dict[str, Any]] | None:
    """Return the newest checkpoint of a leg, its parameters unless it is one of several ranks, and its state.

    Raises if the settings do not allow to continue it.
    """
    checkpoints = from_first(list_checkpoints(leg.checkpoints))
    if not checkpoints:
        return None
    path: Path = checkpoints[-1]
    if is_sharded_checkpoint(path):
        parameters, state = None, read_shards_state(path)
    else:
        parameters, state = load_checkpoint(path, device)
    before = TrainSettings.from_dict(state["settings"])
    _check_same_run(before, leg.settings, path)
    steps, reached, planned = leg.settings.steps, state["step"], before.steps
    if reached > steps:
        raise UserError(f"steps={steps}: {path} is past that; give --steps {reached} or more")
    if leg.settings.schedule == "cosine" and steps != planned and reached != planned:
        raise UserError(
            f"cannot resume {path} with steps={steps}: it was started with {planned}, and a cosine over another number "
            f"of steps would alter the loss curve; finish it with --steps {planned}, then extend it"
        )
    return path, parameters, state


def _say_how_to_resume(folder: Path, interrupted: Interrupted, display: Display) -> None:
    checkpoints = list_checkpoints(folder / "bf16") or list_checkpoints(folder)
    saved = f"saved in {checkpoints[-1]}" if checkpoints else "nothing was saved yet"
    display.say(
        f"Stopped ({interrupted}); {saved}. Continue with: octavo train --resume --out {folder}{nproc()}", "bold"
    )


def _check_resumable(legs: list[Leg], data: ByteData, folder: Path) -> None:
    """Raise for everything that prevents a resume, before a step is taken or config.json is written."""
    _check_same_run(read_settings(folder), legs[0].settings, folder)
    _check_same_data(folder, data)
    for leg in legs[1:]:
        _newest(leg, torch.device("cpu"))


def _check_same_run(before: TrainSettings, now: TrainSettings, where: Path) -> None:
    changed = before.changes_to_curve(now)
    if changed:
        name = changed[0]
        old, new = before.to_dict()[name], now.to_dict()[name]
        if isinstance(old, dict):  # name the field of the model's shape or of the FP8 recipe
            inner = next(key for key in old if old[key] != new[key])
            name, old, new = f"{name}.{inner}", old[inner], new[inner]
        raise UserError(
            f"cannot resume {where} with {name}={new!r}: it was started with {old!r}, and the change would alter the "
            "loss curve; leave the option out to continue as it was, or start a new run without --resume"
        )


def _check_same_data(folder: Path, data: ByteData) -> None:
    if read_config(folder).get("data_sha256") != data.digest:
        raise UserError(
            f"cannot resume {folder}: {data.source} does not hold the bytes the run was started with; restore them, or "
            "start a new run without --resume"
        )


def _machine_facts(settings: TrainSettings, data: ByteData) -> dict[str, Any]:
    """Return the facts that config.json records besides the settings."""
    return {
        "emulated": settings.precision == "fp8" and bool(why_emulated(settings)),
        "data_found": str(data),
        "data_sha256": data.digest,
        "parameters": settings.shape.parameter_count,
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
    }


def _model_metadata(settings: TrainSettings) -> dict[str, str]:
    # One entry: safetensors writes several in random order, and equal models should be equal files.
    return {settings.model: json.dumps(asdict(settings.shape))}


def _sample(learner: Learner) -> Sample | None:
    """Return a sample, or None if the model's logits are non-finite."""
    try:
        return learner.sample()
    except FloatingPointError:
        return None


def _result(leg: Leg, learner: Learner, taken: int, folder: Path) -> LegResult:
    # Measured before anything else is computed, on rank 0; without new steps, the earlier measurement stands.
    memory = measure_memory(learner.model, learner.optimizer) if taken else None
    held_out_loss = learner.evaluate()
    result: LegResult = from_first(_figures(leg, memory, held_out_loss, folder) if rank() == 0 else None)
    return result


def _figures(leg: Leg, memory: StepMemory | None, held_out_loss: float, folder: Path) -> LegResult:
    rows = leg.metrics.rows()
    speed = median_speed(rows)
    last_losses = [row["loss"] for row in rows[-max(len(rows) // 10, 1) :] if not row["skipped"]]
    return LegResult(
        final_loss=statistics.fmean(last_losses) if last_losses else math.nan,
        held_out_loss=held_out_loss,
        tokens_per_s=speed,
        ms_per_step=1000 * leg.settings.tokens_per_step / speed,
        skipped=sum(row["skipped"] for row in rows),
        memory=memory or _measured_before(folder, leg.settings.precision),
    )


def _measured_before(folder: Path, precision: str) -> StepMemory | None:
    if not (folder / SUMMARY).exists():
        return None
    return memory_of(read_summary(folder).get(precision, {}))
