"""The Trainer that is calling a callback right now.

transformers hands a callback the model, the optimiser and the logs, but neither the Trainer nor the checkpoint it
resumes from, and it calls reporters (TensorBoard and the like) before the callbacks of the user. Both are on the call
stack, in public methods that have kept their names: read from there, nothing has to be patched, and a user passes the
callback like any other. Where the stack has no Trainer, as in a loop of one's own, the answers are None.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from transformers import Trainer


def running_trainer() -> Any:
    """The Trainer among the callers, or None."""
    return next((frame.f_locals["self"] for frame in _trainer_frames()), None)


def resumed_from() -> str | None:
    """The checkpoint folder that the running Trainer resumes from, or None."""
    for frame in _trainer_frames():
        folder = frame.f_locals.get("resume_from_checkpoint")
        if isinstance(folder, str):
            return folder
    return None


def put_first(trainer: Any, callback: object) -> None:
    """Have a callback called before all others, so that what it adds to the logs reaches them.

    In place, and safe while the list is being walked: the callbacks that were called already move up by one, into the
    place that this one leaves.
    """
    callbacks = trainer.callback_handler.callbacks
    callbacks.remove(callback)
    callbacks.insert(0, callback)


def _trainer_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), Trainer):
            yield frame
        frame = frame.f_back
