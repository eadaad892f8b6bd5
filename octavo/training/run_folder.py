"""Folder of a run, and its files.

    octavo-run.json     the marker: this folder is a run of Octavo. Locked while a process trains in it
    config.json         the complete settings, versions, and facts about this machine and the data
    metrics.jsonl       one line per step: loss, learning rate, gradient norm, speed; scaling statistics now and then
    checkpoint-000150/  the newest two (see checkpoint.py)
    model.safetensors   the trained parameters
    products.json       every matrix product of the model: in FP8 or not, and why
    sample.json         a held-out line, and the trained model's continuation
    summary.json        final and held-out losses, speed, memory
    report.html         all of it on one page

A comparison adds `metrics_bf16.jsonl` and `bf16/checkpoint-…`. A run of `octavo sft` has `checkpoints/`, `adapter/` and
`model/` instead of checkpoints and model (`octavo/sft/session.py`); `octavo/grpo/session.py` has what `octavo grpo`
leaves.

A run is recognised by its marker alone: a `config.json` or a `model.safetensors` may be anyone's, such as a model of
Hugging Face. A new run never replaces a file in a folder without the marker, and `--overwrite` removes only the files
of a run from a folder with it.
"""

import fcntl
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from octavo.optim.step_memory import StepMemory
from octavo.training.checkpoint import foreign_files, written_checkpoints
from octavo.training.errors import RunError, UserError
from octavo.training.files import disk_errors, read_object, replace_file, write_json
from octavo.training.settings import TrainSettings

RUNS = Path("runs")
MARKER = "octavo-run.json"
CONFIG = "config.json"
METRICS, METRICS_BF16 = "metrics.jsonl", "metrics_bf16.jsonl"
MODEL = "model.safetensors"
PRODUCTS = "products.json"
SAMPLE, SAMPLES = "sample.json", "samples.json"
SUMMARY = "summary.json"
REPORT = "report.html"
MADE_PROMPTS = "made-prompts.jsonl"
BF16 = "bf16"
# Folders of `octavo sft` and `octavo grpo`.
CHECKPOINTS, ADAPTER, WHOLE_MODEL, BASE = "checkpoints", "adapter", "model", "base"
FOLDERS = (CHECKPOINTS, ADAPTER, WHOLE_MODEL, BASE)
FILES = (CONFIG, METRICS, METRICS_BF16, MODEL, PRODUCTS, SAMPLE, SAMPLES, SUMMARY, REPORT, MADE_PROMPTS)


@contextmanager
def new_run(name: str, out: Path | None, overwrite: bool) -> Iterator[Path]:
    """Lock a folder for a new run: `out`, or the next free `runs/<name>-001`, `-002`, …"""
    folder = _next_free(name) if out is None else out
    check_free(folder, overwrite)  # before anything is created in a folder that may be someone else's
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}; choose another --out") from error
    with _locked(folder):
        check_free(folder, overwrite)  # another process may have started there meanwhile
        _clear(folder)
        yield folder


@contextmanager
def resumed_run(out: Path | None) -> Iterator[Path]:
    """Lock the folder of a run to resume."""
    folder = find_run(out)
    with _locked(folder):
        yield folder


def find_run(out: Path | None) -> Path:
    """Return the folder of a run to resume."""
    if out is None:
        latest = max(RUNS.glob(f"*/{MARKER}"), key=lambda path: path.stat().st_mtime, default=None)
        hint = f"the latest run is {latest.parent}" if latest else f"there is no run in {RUNS}/ yet"
        raise UserError(f"--resume needs --out and the folder of the run: {hint}")
    return check_run(out, "check --out, or leave --resume out")


def check_run(folder: Path, hint: str) -> Path:
    """Return the folder if it holds a readable run, else raise."""
    for name in (MARKER, CONFIG):
        if not (folder / name).is_file():
            raise UserError(f"{folder} holds no run of Octavo (it has no {name}): {hint}")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    return read_object(folder / CONFIG, "restore it, or start anew in another --out")


def read_settings(folder: Path) -> TrainSettings:
    """Read the settings a run of `octavo train` was started with."""
    command = read_config(folder).get("command", "train")
    if command != "train":
        raise UserError(
            f"{folder} is a run of octavo {command}: continue it with octavo {command} --resume --out {folder}"
        )
    known = {f.name for f in fields(TrainSettings)}
    try:
        return TrainSettings.from_dict({name: v for name, v in read_config(folder).items() if name in known})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunError(f"{folder / CONFIG} has changed: {error}; restore it, or start anew in another --out") from error


def read_summary(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the results of a finished run, by precision."""
    path = folder / SUMMARY
    hint = "delete it, and octavo train --resume writes it again"
    summary = read_object(path, hint)
    try:
        for result in summary.values():
            memory_of(result)
    except (AttributeError, TypeError) as error:
        raise RunError(f"{path} is damaged: {error}; {hint}") from error
    return summary


def memory_of(result: dict[str, Any]) -> StepMemory | None:
    """Return the memory in one of the summary's results, if it was measured."""
    values = result.get("memory")
    return None if values is None else StepMemory.from_dict(values)


def write_config(folder: Path, settings: TrainSettings, facts: dict[str, Any]) -> None:
    write_json(folder / CONFIG, {"name": folder.resolve().name, **settings.to_dict(), **facts})


class Metrics:
    """Rows of `metrics.jsonl`. Each row is written at once, so a kill loses at most the row it hits."""

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path = path
        self._writes = writes  # of several ranks, the first alone

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._lines()]

    def append(self, row: dict[str, Any]) -> None:
        if not self._writes:
            return
        with disk_errors(self.path), self.path.open("ab") as file:
            file.write(json.dumps(row).encode() + b"\n")

    def sync(self) -> None:
        """Wait until every row is on the disk: a checkpoint must not be newer than the rows it needs."""
        if not self._writes:
            return
        with disk_errors(self.path), self.path.open("ab") as file:
            os.fsync(file.fileno())

    def cut_back(self, step: int) -> None:
        """Keep the rows of steps 1 to `step`; later ones will be computed and written again."""
        if not self._writes:
            return
        lines = self._lines()[:step]
        try:
            complete = [json.loads(line)["step"] for line in lines] == list(range(1, step + 1))
        except (ValueError, KeyError, TypeError):
            complete = False
        if not complete:
            raise RunError(
                f"{self.path} does not hold the rows of steps 1 to {step} that the checkpoint continues; restore it, "
                "or start anew in another --out"
            )
        replace_file(self.path, b"".join(line + b"\n" for line in lines))

    def keep(self, step: int) -> None:
        """Drop rows of steps after `step`, which will be computed and written again."""
        if not self._writes:
            return
        lines = [line for line in self._lines() if json.loads(line)["step"] <= step]
        replace_file(self.path, b"".join(line + b"\n" for line in lines))

    def _lines(self) -> list[bytes]:
        if not self.path.exists():
            return []
        return self.path.read_bytes().split(b"\n")[:-1]  # text after the last newline is an incomplete row


def _next_free(name: str) -> Path:
    with disk_errors(RUNS, hint="choose another place with --out"):
        RUNS.mkdir(exist_ok=True)
        for number in itertools.count(1):
            folder = RUNS / f"{name}-{number:03d}"
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            break
    return folder


def check_free(folder: Path, overwrite: bool) -> None:
    """Raise if a run would replace files in the folder; with `overwrite`, files of a run may be replaced."""
    with disk_errors(folder, hint="choose another --out"):
        paths = _written(folder)
        foreign = [file for path in _checkpoints(folder) for file in foreign_files(path)]
    if not paths:
        return
    if not (folder / MARKER).is_file():
        names = ", ".join(str(path.relative_to(folder)) for path in paths[:3])
        raise UserError(
            f"{folder} is not a run of Octavo (it has no {MARKER}) and holds {names}, which a run would replace: "
            "nothing was touched; choose another --out"
        )
    if overwrite and foreign:
        raise UserError(f"{foreign[0]} was not written by a run: nothing was touched; move it, or choose another --out")
    if overwrite:
        return
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"{folder} holds what is left of a run ({paths[0].relative_to(folder)}, but no {CONFIG}): restore {CONFIG} "
            "and continue with --resume, or replace the run with --overwrite"
        )
    raise UserError(f"{folder} already holds a run: continue it with --resume, or replace it with --overwrite")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Mark the folder as a run, and lock it against other processes until this one ends."""
    path = folder / MARKER
    with disk_errors(path, hint="choose another --out, on a file system that can lock files"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{folder} is in use: another process trains in it; wait until it has ended, or choose another --out"
            ) from error
        except OSError as error:
            raise RunError(
                f"cannot lock {path}: {error.strerror}; choose another --out, on a file system that can lock files"
            ) from error
        with disk_errors(path):
            if os.fstat(descriptor).st_size == 0:
                os.write(descriptor, b'{"octavo_run": 1}\n')
        yield
    finally:
        os.close(descriptor)


def _written(folder: Path) -> list[Path]:
    """Return the files and folders of a run that are in the folder; CONFIG first."""
    names = [folder / name for name in (*FILES, *FOLDERS)]
    return [path for path in names if path.exists()] + _checkpoints(folder)


def _checkpoints(folder: Path) -> list[Path]:
    return [path for run in (folder, folder / BF16) for path in written_checkpoints(run)]


def _clear(folder: Path) -> None:
    """Remove the files of a run, and no others. The config goes first, so that no half run remains."""
    with disk_errors(folder, hint="remove it by hand, or choose another --out"):
        for path in _written(folder):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
