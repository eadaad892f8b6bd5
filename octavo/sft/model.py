"""The model of a run, its tokenizer, and how its batches are laid out."""

from pathlib import Path
from typing import Any

import torch

from octavo.decoders.match import FAMILIES
from octavo.hf import reading
from octavo.hf.fast import FastLanguageModel
from octavo.nn.sharded import own_gpu
from octavo.sft.settings import MAX_SEQ, SFTSettings
from octavo.sft.small_model import small_model
from octavo.training.errors import UserError


def find_model(settings: SFTSettings) -> tuple[str, Path]:
    """Return the name or folder to load a model by, and its `config.json`."""
    if settings.model is None:
        folder = small_model()
        return str(folder), folder / "config.json"
    try:
        reading.check_name(settings.model, {})
    except ValueError as error:
        raise UserError(str(error).replace("model_name=", "MODEL ", 1)) from error
    from transformers.utils.hub import cached_file

    config = cached_file(settings.model, "config.json", _raise_exceptions_for_missing_entries=False)
    if config is None:
        raise UserError(f"MODEL {settings.model}: adapters without their model; give the model itself")
    _config_of(settings.model)
    return settings.model, Path(config)


def _config_of(name: str) -> Any:
    try:
        return reading.read_config(name)
    except (OSError, ValueError) as error:
        raise UserError(f"MODEL {name} cannot be trained: {str(error).splitlines()[0]}") from error


def read_tokenizer(name: str, settings: SFTSettings) -> Any:
    """Return the tokenizer, with the chat template that the settings name."""
    try:
        tokenizer = reading.read_tokenizer(name, {})
    except ValueError as error:
        raise UserError(f"MODEL {name} has no tokenizer that loads: {str(error).splitlines()[0]}") from error
    if tokenizer.pad_token is None:
        raise UserError(f"MODEL {name}: its tokenizer has neither a padding token nor an end of text; add one there")
    if settings.chat_template is not None:
        try:
            tokenizer.chat_template = Path(settings.chat_template).read_text("utf-8")
        except OSError as error:
            raise UserError(f"--chat-template {settings.chat_template}: {error.strerror}") from error
    return tokenizer


def longest(name: str, settings: SFTSettings) -> tuple[int, int | None]:
    """Return the tokens of an example (as asked, or 2,048) and the positions of the model, which are not exceeded."""
    positions = getattr(_config_of(name).get_text_config(), "max_position_embeddings", None)
    if settings.seq is None:
        return min(MAX_SEQ, positions or MAX_SEQ), positions
    if positions is not None and settings.seq > positions:
        raise UserError(f"seq={settings.seq}: MODEL {name} has {positions:,} positions; give --seq {positions} or less")
    return settings.seq, positions


def load_model(name: str, settings: SFTSettings) -> Any:
    """Load the model in FP8, with adapters unless all of it is trained."""
    fp8 = settings.precision == "fp8" and (settings.recipe or True)
    try:
        model, _ = FastLanguageModel.from_pretrained(
            name,
            load_in_fp8=fp8,
            full_finetuning=settings.full,
            device_map={"": own_gpu() if settings.device == "cuda" else "cpu"},
            dtype=torch.float32 if settings.trains_fp32_shards else torch.bfloat16,
            tokenizer=False,
        )
        if settings.full:
            return model
        return FastLanguageModel.get_peft_model(
            model,
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            random_state=settings.seed,
            use_gradient_checkpointing=bool(settings.checkpointing),
        )
    except (OSError, ValueError) as error:
        raise UserError(f"MODEL {name} cannot be trained: {str(error).splitlines()[0]}") from error


def choose_layout(model: Any, settings: SFTSettings) -> str:
    """Return how batches are laid out. Examples in one row must not see each other: known decoders keep them apart."""
    base = model if settings.full else model.get_base_model()
    known = type(base).__name__ in {f"{family}ForCausalLM" for family in FAMILIES}
    if settings.layout is None:
        return "padding-free" if known else "padded"
    if settings.layout != "padded" and not known:
        raise UserError(
            f"layout={settings.layout!r}: whether {type(base).__name__} keeps examples in one row apart is not known; "
            f"it is of {', '.join(FAMILIES)}; give --padded"
        )
    return settings.layout
