"""A run that says nothing, and what it left."""

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from octavo.training.loop import RunResult, train
from octavo.training.settings import TrainSettings


def run(settings: TrainSettings, out: Path, **options: Any) -> RunResult:
    with Path(os.devnull).open("w") as nowhere:
        return train(settings, out=out, console=Console(file=nowhere), **options)


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def curve(folder: Path, name: str = "metrics.jsonl") -> list[tuple[Any, ...]]:
    """All that must be bit for bit the same."""
    return [(row["step"], row["loss"], row["lr"], row["grad_norm"], row["skipped"]) for row in rows(folder, name)]
