"""The model of a run with its adapters, its tokenizer, and the engine that completes its prompts."""

from typing import Any

import torch
from transformers import AutoConfig
from transformers.utils import find_adapter_config_file

from octavo.grpo.settings import RunSettings
from octavo.hf import reading
from octavo.hf.fast import FastLanguageModel
from octavo.nn.sharded import own_gpu
from octavo.rl.completions import Engine
from octavo.rl.engine import NativeEngine
from octavo.rl.products import PRODUCTS
from octavo.training.errors import UserError


def check_model(name: str) -> None:
    """Refuse a model whose configuration or tokenizer does not load, long before its weights do."""
    try:
        reading.check_name(name, {})
        if find_adapter_config_file(name) is None:  # adapters are loaded onto the model that they name
            AutoConfig.from_pretrained(name)
        reading.read_tokenizer(name, {})
    except (OSError, ValueError) as error:
        raise _not_trained(name, error) from error


def load(name: str, settings: RunSettings) -> tuple[Any, Any]:
    """Load the model, in FP8 unless the settings say otherwise, and its tokenizer."""
    fp8 = settings.recipe if settings.precision == "fp8" else False
    try:
        model, tokenizer = FastLanguageModel.from_pretrained(
            name,
            load_in_fp8=fp8,
            full_finetuning=settings.full,
            fp8_products=PRODUCTS[settings.products] if fp8 and not settings.full else None,
            device_map={"": own_gpu() if settings.device == "cuda" else "cpu"},
            dtype=torch.bfloat16,
        )
        if not settings.full:
            model = FastLanguageModel.get_peft_model(
                model,
                r=settings.rank,
                lora_alpha=settings.alpha,
                random_state=settings.seed,
                use_gradient_checkpointing=settings.checkpointing,
            )
        elif settings.checkpointing:
            model.gradient_checkpointing_enable()
    except (OSError, ValueError) as error:
        raise _not_trained(name, error) from error
    return model, tokenizer


def _not_trained(name: str, error: Exception) -> UserError:
    return UserError(f"MODEL {name} cannot be trained: {str(error).splitlines()[0]}")


def stop_ids(model: Any, tokenizer: Any, settings: RunSettings) -> tuple[int, ...]:
    """Return the tokens that end a completion: the one that is asked for, or those of model and tokenizer."""
    if settings.stop is not None:
        ids: list[int] = tokenizer(settings.stop, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise UserError(f"--stop {settings.stop!r} is {len(ids)} tokens: completions end by a single one")
        return (ids[0],)
    found: list[int] = []
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        eos = getattr(holder, "eos_token_id", None)
        found += eos if isinstance(eos, list | tuple) else [] if eos is None else [eos]
    if not found:
        raise UserError(
            "the model and its tokenizer have no end of text (eos_token_id): every completion would have "
            f"{settings.max_new_tokens} tokens; name a token that ends one: --stop TOKEN"
        )
    return tuple(dict.fromkeys(found))


def make_engine(model: Any, settings: RunSettings, longest_prompt: int) -> Engine:
    """Return the engine, with room for the longest prompt and its completion."""
    room = longest_prompt + settings.max_new_tokens
    exact = settings.correction != "none"
    try:
        if settings.engine == "native":
            return NativeEngine(
                model, slots=settings.slots, max_length=room, kv_dtype=settings.kv_dtype, exact_logprobs=exact
            )
        from octavo.rl.vllm import VLLMEngine

        engine: Engine = VLLMEngine(
            model, slots=settings.slots, max_length=room, can_stand_by=settings.standby, exact_logprobs=exact
        )
    except ImportError as error:
        raise UserError(f"engine='vllm' needs vLLM ({error}): install it, or use --engine native") from error
    except (ValueError, RuntimeError) as error:
        raise UserError(f"the {settings.engine} engine cannot run this model: {str(error).splitlines()[0]}") from error
    return engine
