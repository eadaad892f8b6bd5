"""Out-of-memory errors of a run: what took the memory, what would take less, and where the run can continue."""

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
    """Turn an out-of-memory error into a `RunError`. `checkpoints`: folder of this training's; `folder`: of the run."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        last_checkpoint = _last_checkpoint(checkpoints, folder)
        raise RunError(explain(error, learner.model, learner.optimizer, _ways(learner), last_checkpoint)) from error


def _ways(learner: Learner) -> dict[str, str]:
    settings = learner.settings
    if settings.batch > 1:
        half = f"--batch {settings.batch // 2} --micro-batches {2 * settings.micro_batches}, as many bytes in a step"
    else:
        half = f"--seq {max(settings.seq // 2, 1)}"
    return {"batch": half, **{name: f"--optimizer {name}" for name in ("adamw8bit", "adamw4bit")}}


def _last_checkpoint(checkpoints: Path, folder: Path) -> str:
    saved = list_checkpoints(checkpoints)
    if not saved:
        return f"there is no checkpoint yet; with other settings start anew: --out {folder} --overwrite"
    return (
        f"the last checkpoint, {saved[-1]}, is intact: where more memory is free, octavo train --resume --out {folder} "
        "goes on from it; with other settings it is another run, with an --out of its own"
    )
