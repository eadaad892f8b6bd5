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
from octavo.rl.completions import Engine

logger = logging.getLogger("octavo")
_TRAINERS = ("GRPO", "RLOO")
STOPS = "stop_strings"  # of generation_kwargs


@cache
def take_trainers_own_vllm() -> None:
    """Wrap the trainers, each when it is imported."""
    for kind in _TRAINERS:
        when_imported(f"trl.trainer.{kind.lower()}_trainer", partial(_wrap, kind))


def _wrap(kind: str, module: Any) -> None:
    trainer = getattr(module, f"{kind}Trainer")
    trainer.__init__ = _wrapped(trainer.__init__, kind)


def _wrapped(original: Callable[..., None], kind: str) -> Callable[..., None]:
    signature = inspect.signature(original)

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind_partial(self, *args, **{n: v for n, v in kwargs.items() if n in signature.parameters})
        model: Any = given.arguments.get("model")
        engine = attached(model) if hasattr(model, "config") else None
        config: Any = given.arguments.get("args")
        leave_vllm_out(config, engine, kind)
        if engine is not None and not hasattr(self, "takes_stop_strings"):
            _check_stops(config, kind)
        original(self, *args, **kwargs)

    return init


def leave_vllm_out(config: Any, engine: Engine | None, kind: str) -> None:
    """Have a trainer start no vLLM of its own where the model has an engine."""
    if engine is None or not getattr(config, "use_vllm", False):
        return
    config.use_vllm = False
    correction = "; OctavoGRPOTrainer hands its log-probabilities to TRL's correction" if kind == "GRPO" else ""
    logger.warning(
        "octavo: use_vllm=False: rollouts are by the %s engine on the model's own weights%s", engine.name, correction
    )


def _check_stops(config: Any, kind: str) -> None:
    """Refuse stop strings, which `generate` finds with a tokenizer alone, and TRL hands it none."""
    batched = getattr(config, "use_transformers_continuous_batching", False)  # which calls something else
    if STOPS in (getattr(config, "generation_kwargs", None) or {}) and not batched:
        fix = "use octavo.rl.trainer.OctavoGRPOTrainer" if kind == "GRPO" else "leave it out"
        raise ValueError(f"generation_kwargs[{STOPS!r}]: {kind}Trainer hands generate no tokenizer for it; {fix}")
