"""The model of a run with its adapters, its tokenizer, and the engine that completes its prompts."""

from typing import Any

import torch

from octavo.grpo.settings import RunSettings
from octavo.hf import reading
from octavo.hf.fast import FastLanguageModel
from octavo.hf.kept_adapters import has_adapters
from octavo.hf.lora import set_checkpointing
from octavo.nn.sharded import own_gpu
from octavo.rl import vllm
from octavo.rl.completions import Engine
from octavo.rl.engine import NativeEngine
from octavo.rl.products import PRODUCTS
from octavo.rl.stops import StopTexts
from octavo.training.errors import UserError


def check_model(settings: RunSettings) -> None:
    """Refuse a model whose configuration or tokenizer does not load, before prompts are made."""
    name = settings.model
    assert name is not None
    try:
        reading.check_name(name, {})
        adapters = reading.read_adapter_config(name, {})
        base, options = (None, {}) if adapters is None else reading.base_of_adapters(name, adapters, {})
        reading.read_config(base or name, **options)
        place = reading.place_of_tokenizer(name, base, {})
        reading.read_tokenizer(place, options if place == base else {})
    except (OSError, ValueError) as error:
        raise _not_trained(name, error) from error
    if adapters is not None:
        _check_adapters(adapters, name, settings)


def _check_adapters(config: dict[str, Any], name: str, settings: RunSettings) -> None:
    """Refuse adapters that the settings are not for. `config`: of PEFT."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UserError(f"MODEL {name}: adapters of kind {kind}, and octavo grpo trains LoRA; merge them first")
    if settings.full:
        raise UserError(f"full=True with MODEL {name}: these are adapters; leave --full out, or merge them first")
    for option, value in (("rank", config.get("r")), ("alpha", config.get("lora_alpha"))):
        if getattr(settings, option) != value:
            raise UserError(
                f"{option}={getattr(settings, option)} with MODEL {name}: its adapters have {value}; give "
                f"--{option} {value} to go on with them"
            )
    if settings.beta:
        raise UserError(
            f"beta={settings.beta} with MODEL {name}: the reference would be the model without its adapters, which is "
            "not what the run starts from; give --beta 0, or merge the adapters first"
        )


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
        if has_adapters(model):
            set_checkpointing(model.get_base_model(), settings.checkpointing)
        elif not settings.full:
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


def stops(model: Any, tokenizer: Any, settings: RunSettings) -> tuple[tuple[int, ...], StopTexts | None]:
    """Return the tokens and the texts that end a completion: ends of sequence, and what is asked for."""
    texts = StopTexts(tokenizer, settings.stop) if settings.stop else None
    found: list[int] = []
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        eos = getattr(holder, "eos_token_id", None)
        found += eos if isinstance(eos, list | tuple) else [] if eos is None else [eos]
    if not found and texts is None:
        raise UserError(
            "the model and its tokenizer have no end of text (eos_token_id): every completion would have "
            f"{settings.max_new_tokens} tokens; name a text that ends one: --stop TEXT"
        )
    return tuple(dict.fromkeys(found)), texts


def check_engine(settings: RunSettings) -> None:
    """Refuse vLLM where it is not installed."""
    if settings.engine == "vllm" and not vllm.is_installed():
        raise UserError("engine='vllm': vLLM is not installed; install it, or use --engine native")


def make_engine(model: Any, settings: RunSettings, longest_prompt: int) -> Engine:
    """Return the engine, with room for the longest prompt and its completion."""
    room = longest_prompt + settings.max_new_tokens
    exact = settings.correction != "none"
    try:
        if settings.engine == "native":
            return NativeEngine(
                model, slots=settings.slots, max_length=room, kv_dtype=settings.kv_dtype, exact_logprobs=exact
            )
        engine: Engine = vllm.VLLMEngine(
            model, slots=settings.slots, max_length=room, can_stand_by=settings.standby, exact_logprobs=exact
        )
    except ImportError as error:
        raise UserError(f"engine='vllm' needs vLLM ({error}): install it, or use --engine native") from error
    except (ValueError, RuntimeError) as error:
        raise UserError(f"the {settings.engine} engine cannot run this model: {str(error).splitlines()[0]}") from error
    return engine
