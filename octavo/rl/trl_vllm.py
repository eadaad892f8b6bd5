"""`use_vllm=True` of TRL's trainers, for a model that has an engine already.

Scripts for other libraries set it, and mean the engine that `fast_inference=True` has started. TRL would start a vLLM
with weights of its own.
"""

import inspect
import logging
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

from octavo.hf.when_imported import when_imported
from octavo.rl.attach import attached

logger = logging.getLogger("octavo")
_TRAINERS = ("GRPO", "RLOO")


@cache
def take_trainers_own_vllm() -> None:
    """Wrap the trainers, each when it is imported."""
    for kind in _TRAINERS:
        when_imported(f"trl.trainer.{kind.lower()}_trainer", partial(_wrap, kind))


def _wrap(kind: str, module: Any) -> None:
    trainer = getattr(module, f"{kind}Trainer")
    trainer.__init__ = _wrapped(trainer.__init__)


def _wrapped(original: Callable[..., None]) -> Callable[..., None]:
    names = list(inspect.signature(original).parameters)[1:]

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        model, config = given.get("model"), given.get("args")
        engine = attached(model) if hasattr(model, "config") else None
        if engine is not None and getattr(config, "use_vllm", False):
            config.use_vllm = False  # type: ignore[union-attr]
            logger.warning(
                "octavo: use_vllm=False: rollouts are by the %s engine on the model's own weights; OctavoGRPOTrainer "
                "hands its log-probabilities to TRL's correction",
                engine.name,
            )
        original(self, *args, **kwargs)

    return init
