"""Arguments that scripts give to `FastLanguageModel`, or write as they do elsewhere, reach TRL's trainers.

    model, tokenizer = FastLanguageModel.from_pretrained(name, max_seq_length=2048, ...)
    SFTTrainer(model, tokenizer=tokenizer, args=SFTConfig(...), ...)      # trains on 2,048 tokens, not on 1,024

TRL cuts sequences at `max_length` of its configuration, 1,024 if nobody says otherwise, while the trainer is built. So
`__init__` of the trainers is wrapped, once, when the first model is loaded.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import cache, wraps
from typing import Any

from transformers.utils import logging

TRAINERS = ("SFT", "DPO", "Reward", "KTO")  # those whose configurations have a `max_length`

logger = logging.get_logger(__name__)


@cache
def install() -> None:
    """Wrap the trainers that are there; without TRL, none is."""
    for kind in TRAINERS if importlib.util.find_spec("trl") is not None else ():
        modules = [f"trl.trainer.{kind.lower()}_{part}" for part in ("trainer", "config")]
        if all(importlib.util.find_spec(name) is not None for name in modules):
            trainer: Any = getattr(importlib.import_module(modules[0]), f"{kind}Trainer")
            config = getattr(importlib.import_module(modules[1]), f"{kind}Config")
            trainer.__init__ = _wrapped(trainer.__init__, config)


def _wrapped(original: Callable[..., None], config: Any) -> Callable[..., None]:
    signature = inspect.signature(original)
    defaults = {field.name: field.default for field in fields(config)}

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if "tokenizer" in kwargs:
            if kwargs.get("processing_class") is not None:
                raise TypeError("tokenizer and processing_class: the second is the new name of the first; give one")
            kwargs["processing_class"] = kwargs.pop("tokenizer")
        for name in kwargs:
            field = "max_length" if name == "max_seq_length" else name
            if name not in signature.parameters and field in defaults:
                raise TypeError(
                    f"{name}={kwargs[name]!r}: {type(self).__name__} takes it as a field of its configuration; pass "
                    f"args={config.__name__}({field}={kwargs[name]!r}, ...)"
                )
        given = signature.bind(self, *args, **kwargs)
        asked = getattr(given.arguments.get("model"), "octavo_asked_length", None)
        if asked is not None:
            _set_length(given.arguments, config, asked, defaults["max_length"])
        original(*given.args, **given.kwargs)

    return init


def _set_length(arguments: dict[str, Any], config: Any, asked: int, default: Any) -> None:
    """Set `max_length`, unless the configuration has another than TRL's own default."""
    args = arguments.get("args")
    if args is None:  # as TRL names it
        name = str(getattr(arguments["model"].config, "_name_or_path", "")).split("/")[-1] or "model"
        args = arguments["args"] = config(f"{name}-{config.__name__.removesuffix('Config')}")
    if not isinstance(args, config):
        raise ValueError(
            f"args is a {type(args).__name__}, which has no max_length for max_seq_length={asked}: pass "
            f"{config.__name__}(max_length={asked}, ...)"
        )
    if args.max_length == default != asked:
        args.max_length = asked
        logger.warning(
            f"octavo: max_length={asked}, by FastLanguageModel's max_seq_length, not TRL's default of {default}; any "
            f"other value in {config.__name__} has the last word"
        )
