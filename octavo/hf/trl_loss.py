"""The loss of TRL's `SFTTrainer`, computed by Octavo while it trains.

TRL multiplies the hidden states by the head's weight itself, in tiles, and reads three figures from the device in every
step. The model's own forward does the former with fewer products, in FP8 if the head is, and goes through all that
Octavo has for a decoder (`decoders/causal_lm.py`). So `compute_loss`, a public method that subclasses override as well,
is wrapped while such a model trains.

TRL's `entropy` and `mean_token_accuracy` need its own log-probabilities: evaluations have them as before, logs of
training do not. Whatever the model's forward would compute from whole logits is left to TRL.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from octavo.decoders.classes import HEAD
from octavo.decoders.hooks import is_hooked
from octavo.decoders.match import has_default_loss, is_head
from octavo.numerics.cross_entropy import IGNORED


def use_own_loss(trainer: Any) -> Callable[[], None] | None:
    """Have an `SFTTrainer` train on the model's own loss. Returns what undoes it; None where the loss stays TRL's."""
    if not _takes_own_loss(trainer):
        return None
    original = trainer.compute_loss

    @wraps(original)
    def compute_loss(
        model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not trainer.model.training or return_outputs:
            return original(model, inputs, return_outputs, num_items_in_batch)
        given = num_items_in_batch is not None
        count = num_items_in_batch if given else (inputs["labels"][..., 1:] != IGNORED).sum()
        count = torch.as_tensor(count).clamp(min=1)  # as TRL has it: a batch without labels has a loss of 0
        # With a cache, transformers lets packed sequences attend to one another.
        loss = model(**{**inputs, "use_cache": False}, num_items_in_batch=count).loss
        if given and trainer.args.average_tokens_across_devices:
            loss = loss * trainer.accelerator.num_processes  # their sum is the count, and gradients are averaged
        return loss

    trainer.compute_loss = compute_loss

    def undo() -> None:
        trainer.compute_loss = original

    return undo


def _takes_own_loss(trainer: Any) -> bool:
    """Whether the trainer is TRL's, its loss the plain one, and the model one that computes it in chunks."""
    if not any(cls.__module__.startswith("trl.") and cls.__name__ == "SFTTrainer" for cls in type(trainer).__mro__):
        return False
    args = trainer.args
    plain = args.loss_type == "nll" and not args.label_smoothing_factor and trainer.compute_loss_func is None
    base = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    head = getattr(base, "lm_head", None)
    own = HEAD in base.__dict__ and is_head(head) and not is_hooked(head) and has_default_loss(base)
    return plain and own and not trainer.aux_loss_enabled and trainer.accelerator.parallelism_config is None
