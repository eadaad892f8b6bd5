"""Arguments that scripts give to `FastLanguageModel`, or write as they do elsewhere, reach TRL's trainers.

    model, tokenizer = FastLanguageModel.from_pretrained(name, max_seq_length=2048, ...)
    SFTTrainer(model, tokenizer=tokenizer, args=SFTConfig(...), ...)      # trains on 2,048 tokens, not on 1,024

TRL cuts sequences at `max_length` of its configuration, 1,024 if nobody says otherwise, while the trainer is built. So
`__init__` of the trainers is wrapped, once a model is loaded. What `get_peft_model` was told about gradient
checkpointing holds against TRL's default, too. Trainers without labels refuse a model that has nothing to train: nobody
else would. Fields that TRL's configurations no longer have are errors that name what replaces them.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import cache, partial, wraps
from typing import Any

from transformers.utils import logging

from octavo.decoders.causal_lm import nothing_is_trained
from octavo.hf.when_imported import when_imported

WITH_LENGTH = ("SFT", "DPO", "Reward", "KTO")  # trainers whose configurations have a `max_length`
WITHOUT_LABELS = ("GRPO", "RLOO")
# Fields that scripts give to configurations, and what to do instead: where there is a max_length, and elsewhere.
_TOO_LONG = "leave long prompts out of the dataset"
GONE = {
    "max_prompt_length": (
        "max_length is that of prompts and answers together: leave it out",
        f"TRL truncates no prompts: leave it out, and {_TOO_LONG}",
    ),
    "max_seq_length": ("it is called max_length", f"max_completion_length is that of completions, and {_TOO_LONG}"),
    "vllm_sampling_params": (
        "leave it out: this trainer samples nothing",
        "leave it out: temperature, top_p, top_k and min_p are fields of this configuration",
    ),
    "warmup_ratio": ("warmup_steps takes it: a number below 1 is a share of all steps",) * 2,
}

logger = logging.get_logger(__name__)


@cache
def install() -> None:
    """Wrap the trainers and their configurations, each when it is imported."""
    for kind in (*WITH_LENGTH, *WITHOUT_LABELS):
        when_imported(f"trl.trainer.{kind.lower()}_trainer", partial(_wrap_trainer, kind))
        when_imported(f"trl.trainer.{kind.lower()}_config", partial(_wrap_config, kind))


def _wrap_trainer(kind: str, module: Any) -> None:
    trainer, config = getattr(module, f"{kind}Trainer"), getattr(module, f"{kind}Config")
    trainer.__init__ = _wrapped(trainer.__init__, config)


def _wrap_config(kind: str, module: Any) -> None:
    config = getattr(module, f"{kind}Config")
    config.__init__ = _naming_what_is_gone(config.__init__, config)


def _naming_what_is_gone(original: Callable[..., None], config: Any) -> Callable[..., None]:
    known = {field.name for field in fields(config)}

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() & GONE.keys() - known:
            why = GONE[name]["max_length" not in known]
            raise TypeError(f"{name}={kwargs[name]!r}: no field of {config.__name__}; {why}")
        original(self, *args, **kwargs)

    return init


def _wrapped(original: Callable[..., None], config: Any) -> Callable[..., None]:
    signature = inspect.signature(original)
    defaults = {field.name: field.default for field in fields(config)}

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        take_tokenizer(kwargs)
        for name in kwargs:
            field = "max_length" if name == "max_seq_length" else name
            if name not in signature.parameters and field in defaults:
                raise TypeError(
                    f"{name}={kwargs[name]!r}: {type(self).__name__} takes it as a field of its configuration; pass "
                    f"args={config.__name__}({field}={kwargs[name]!r}, ...)"
                )
        given = signature.bind(self, *args, **kwargs)
        model = given.arguments.get("model")
        asked = getattr(model, "octavo_asked_length", None)
        if asked is not None and "max_length" in defaults:
            _set_length(given.arguments, config, asked, defaults["max_length"])
        if getattr(model, "octavo_checkpointing", None) is False and defaults["gradient_checkpointing"] is True:
            _leave_checkpointing_off(given.arguments, config)
        original(*given.args, **given.kwargs)
        without_labels = config.__name__.removesuffix("Config") in WITHOUT_LABELS
        if without_labels and _is_ours(self.model) and not any(p.requires_grad for p in self.model.parameters()):
            raise ValueError(nothing_is_trained(type(self.model).__name__, "by rewards"))

    return init


def take_tokenizer(kwargs: dict[str, Any]) -> None:
    """Give the argument `tokenizer` its new name."""
    if "tokenizer" in kwargs:
        if kwargs.get("processing_class") is not None:
            raise TypeError("tokenizer and processing_class: the second is the new name of the first; give one")
        kwargs["processing_class"] = kwargs.pop("tokenizer")


def _is_ours(model: Any) -> bool:
    """Whether FastLanguageModel has loaded a model."""
    return hasattr(model, "octavo_asked_length")


def _own_config(arguments: dict[str, Any], config: Any) -> Any:
    """The configuration of a call, which is made, and named as TRL does, where there is none."""
    if arguments.get("args") is None:
        name = str(getattr(arguments["model"].config, "_name_or_path", "")).split("/")[-1] or "model"
        arguments["args"] = config(f"{name}-{config.__name__.removesuffix('Config')}")
    return arguments["args"]


def _leave_checkpointing_off(arguments: dict[str, Any], config: Any) -> None:
    args = _own_config(arguments, config)
    if args.gradient_checkpointing:
        args.gradient_checkpointing = False
        logger.warning(
            f"octavo: gradient_checkpointing=False, by get_peft_model's use_gradient_checkpointing, which has the last "
            f"word: {config.__name__} has True by default"
        )


def _set_length(arguments: dict[str, Any], config: Any, asked: int, default: Any) -> None:
    """Set `max_length`, unless the configuration has another than TRL's own default."""
    args = _own_config(arguments, config)
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
