"""The folder of a run, and what is in it.

    config.json         the settings, complete; with versions and what was found on this machine
    metrics.jsonl       one line per step: loss, learning rate, gradient norm, speed; scaling statistics now and then
    checkpoint-000150/  the newest two (see checkpoint.py)
    model.safetensors   the trained parameters
    products.json       every matrix product of the model: in FP8 or not, and why
    sample.txt          text that the trained model wrote
    summary.json        final and held-out losses, speed, memory
    report.html         all of it on one page

A comparison adds `metrics_bf16.jsonl` and `bf16/checkpoint-…`. A folder holds a run when it has a `config.json`.
"""

import itertools
import json
import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

from octavo.training.errors import RunError, UserError
from octavo.training.files import disk_errors, replace_file, write_json
from octavo.training.settings import TrainSettings

RUNS = Path("runs")
CONFIG = "config.json"
MODEL = "model.safetensors"
PRODUCTS = "products.json"
SAMPLE = "sample.txt"
SUMMARY = "summary.json"
REPORT = "report.html"
PATTERNS = ("metrics*.jsonl", "checkpoint-*", "bf16/checkpoint-*")


def new_run_folder(name: str, out: Path | None, overwrite: bool) -> Path:
    """A folder for a new run: `out`, or the next free `runs/<name>-001`, `-002`, …"""
    if out is None:
        return _next_free(name)
    if (out / CONFIG).exists():
        if not overwrite:
            raise UserError(f"{out} already holds a run: continue it with --resume, or replace it with --overwrite")
        _clear(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {out}: {error.strerror}; choose another --out") from error
    return out


def find_run(out: Path | None) -> Path:
    """The folder of a run to resume."""
    if out is None:
        latest = max(RUNS.glob(f"*/{CONFIG}"), key=lambda path: path.stat().st_mtime, default=None)
        hint = f"the latest run is {latest.parent}" if latest else f"there is no run in {RUNS}/ yet"
        raise UserError(f"--resume needs --out and the folder of the run: {hint}")
    if not (out / CONFIG).is_file():
        raise UserError(f"{out} holds no run to resume (it has no {CONFIG}): check --out, or leave --resume out")
    return out


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}; restore it, or start anew in another --out") from error
    if not isinstance(config, dict):
        raise RunError(f"{path} is not a run's configuration; restore it, or start anew in another --out")
    return config


def read_settings(folder: Path) -> TrainSettings:
    """The settings a run was started with."""
    known = {f.name for f in fields(TrainSettings)}
    try:
        return TrainSettings.from_dict({name: v for name, v in read_config(folder).items() if name in known})
    except (ValueError, TypeError) as error:
        raise RunError(f"{folder / CONFIG} has changed: {error}; restore it, or start anew in another --out") from error


def write_config(folder: Path, settings: TrainSettings, found: dict[str, Any]) -> None:
    write_json(folder / CONFIG, {"name": folder.resolve().name, **settings.to_dict(), **found})


class Metrics:
    """`metrics.jsonl`. Each row is handed to the system at once, so a kill loses at most the row it hits."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._lines()]

    def append(self, row: dict[str, Any]) -> None:
        with disk_errors(self.path), self.path.open("ab") as file:
            file.write(json.dumps(row).encode() + b"\n")

    def sync(self) -> None:
        """Wait until every row is on the disk: a checkpoint must not be newer than the rows it needs."""
        with disk_errors(self.path), self.path.open("ab") as file:
            os.fsync(file.fileno())

    def cut_back(self, step: int) -> None:
        """Leave the rows of steps 1 to `step`: those after the checkpoint will be computed, and written, again."""
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

    def _lines(self) -> list[bytes]:
        if not self.path.exists():
            return []
        return self.path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is a row cut short


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


def _clear(folder: Path) -> None:
    """Remove what a run wrote, and nothing else that may be in the folder. The config goes first: no half a run."""
    with disk_errors(folder, hint="remove it by hand, or choose another --out"):
        for pattern in (CONFIG, MODEL, PRODUCTS, SAMPLE, SUMMARY, REPORT, *PATTERNS):
            for path in folder.glob(pattern):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
