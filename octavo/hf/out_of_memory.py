"""Errors of the Trainer of transformers when a GPU's memory runs out: what took it, and what would take less.

Callbacks do not hear of errors, so the Trainer's `training_step`, a public method that subclasses override as well, is
wrapped while it trains. It holds forward and backward, where memory runs out; the optimiser's step comes after it.
"""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from octavo.optim.out_of_memory import explained


def explain_in(trainer: Any) -> Callable[[], None]:
    """Have a Trainer's out-of-memory errors explained. Returns a function that undoes it."""
    step = trainer.training_step

    @wraps(step)
    def explained_step(*args: Any, **kwargs: Any) -> Any:
        with explained(
            trainer.model, trainer.optimizer, lambda: _ways(trainer.args), lambda: _last_checkpoint(trainer.args)
        ):
            return step(*args, **kwargs)

    trainer.training_step = explained_step

    def undo() -> None:
        trainer.training_step = step

    return undo


def _ways(args: TrainingArguments) -> dict[str, str]:
    batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    ways = {
        "activations": 'FP8TrainingConfig(activations="fp8")',
        "checkpointing": "TrainingArguments(gradient_checkpointing=True)",
        "adamw8bit": 'TrainingArguments(optim="adamw_torch_8bit")',
        "adamw4bit": 'TrainingArguments(optim="adamw_torch_4bit")',
    }
    if batch > 1:
        ways["batch"] = (
            f"TrainingArguments(per_device_train_batch_size={batch // 2}, "
            f"gradient_accumulation_steps={2 * accumulation}), for the same step"
        )
    if accumulation == 1 and args.world_size == 1:
        ways["release"] = "OctavoCallback(release_gradients=True) with TrainingArguments(max_grad_norm=0)"
    return ways


def _last_checkpoint(args: TrainingArguments) -> str:
    folder = args.output_dir
    checkpoint = get_last_checkpoint(folder) if folder and Path(folder).is_dir() else None
    return (
        f"the last checkpoint is {checkpoint}: trainer.train(resume_from_checkpoint=True) goes on from it"
        if checkpoint
        else ""
    )
