"""A run whose GPU has no memory left: it ends with what took it, what would take less, and where it can go on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from octavo.optim.out_of_memory import explain
from octavo.training.checkpoint import list_checkpoints
from octavo.training.errors import RunError
from octavo.training.learner import Learner


@contextmanager
def memory_errors(learner: Learner, checkpoints: Path, folder: Path) -> Iterator[None]:
    """`checkpoints`: where those of this training are; `folder`: of the run."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        kept = _kept(checkpoints, folder)
        raise RunError(explain(error, learner.model, learner.optimizer, _ways(learner), kept)) from error


def _ways(learner: Learner) -> dict[str, str]:
    settings = learner.settings
    if settings.batch > 1:
        half = f"--batch {settings.batch // 2} --micro-batches {2 * settings.micro_batches}, as many bytes in a step"
    else:
        half = f"--seq {max(settings.seq // 2, 1)}"
    return {"batch": half, **{name: f"--optimizer {name}" for name in ("adamw8bit", "adamw4bit")}}


def _kept(checkpoints: Path, folder: Path) -> str:
    found = list_checkpoints(checkpoints)
    if not found:
        return f"there is no checkpoint yet; with other settings start anew: --out {folder} --overwrite"
    return (
        f"the last checkpoint, {found[-1]}, is intact: where more memory is free, octavo train --resume --out {folder} "
        "goes on from it; with other settings it is another run, with an --out of its own"
    )
