"""`model.generate` by an engine: what stock TRL, and any script that calls `generate`, then uses.

    attach(model, engine)     model.generate(...) samples with the engine, where the call asks for what it can do
    detach(model)             model.generate is transformers' again

The rule: a call goes to the engine if it is greedy or samples, by temperature, top-k, top-p and min-p, from rows of
tokens that are padded on the left, and asks for tokens alone. Anything else (beams, penalties, processors, scores,
images, …) goes to transformers' `generate` as before, and a warning says so once for each reason. Rows with equal
prompts are one group, and go through the model once.
"""

import logging
from collections import Counter
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor

from octavo.decoders.hooks import changes_calls
from octavo.rl.completions import Completion, Engine, Sampling
from octavo.rl.stops import StopTexts

logger = logging.getLogger("octavo")

_GENERATE = "generate"
# Fields of transformers' GenerationConfig that the engine follows, and what `stop_strings` become; then those that do
# not change what is sampled.
_FOLLOWED = {
    "max_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "eos_token_id",
    "pad_token_id", "num_return_sequences", "stop_texts",
}  # fmt: skip
_IRRELEVANT = {
    "bos_token_id", "decoder_start_token_id", "use_cache", "disable_compile", "compile_config", "cache_implementation",
    "cache_config", "max_matching_ngram_size", "transformers_version", "generation_kwargs", "is_assistant",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
    "target_lookbehind", "assistant_early_exit", "prefill_chunk_size", "length_penalty", "early_stopping",
}  # fmt: skip
# Values that ask for nothing; so do None, False and whatever is empty.
_NEUTRAL = {
    "num_beams": 1, "num_beam_groups": 1, "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0,
    "typical_p": 1.0, "renormalize_logits": False, "diversity_penalty": 0.0, "min_length": 0, "guidance_scale": 1.0,
}  # fmt: skip
_OF_ROWS = ("inputs", "input_ids", "attention_mask")
_LONGEST = 20  # new tokens, where nobody says how many: transformers' own default
_TOP_K = 50  # likewise
_POSITIONAL = (
    "inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus",
    "assistant_model", "streamer", "negative_prompt_ids", "negative_prompt_attention_mask", "custom_generate",
)  # fmt: skip


def attach(model: Any, engine: Engine) -> None:
    """Have `model.generate` use an engine, which was made for this model. The model may be PEFT's or get adapters."""
    inner = base_of(model)
    if not callable(getattr(inner, _GENERATE, None)):
        raise ValueError(f"{type(inner).__name__} has no generate: attach an engine to a causal language model")
    detach(model)
    inner.__dict__[_GENERATE] = _Generate(inner, engine)


def detach(model: Any) -> None:
    """Give a model its own `generate` back; nothing happens if it has it."""
    inner = base_of(model)
    if isinstance(inner.__dict__.get(_GENERATE), _Generate):
        del inner.__dict__[_GENERATE]


def attached(model: Any) -> Engine | None:
    """Return the engine that `model.generate` uses; None if there is none."""
    found = base_of(model).__dict__.get(_GENERATE)
    return found.engine if isinstance(found, _Generate) else None


def fallbacks(model: Any) -> Counter[str]:
    """Return how many calls of `model.generate` went to transformers instead of the engine, by reason."""
    found = base_of(model).__dict__.get(_GENERATE)
    return Counter(found.fallbacks) if isinstance(found, _Generate) else Counter()


def base_of(model: Any) -> Any:
    """Return the model of transformers inside PEFT's, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class _Generate:
    """In the place of a model's `generate`. A copy of the model has its own again."""

    def __init__(self, model: Any, engine: Engine) -> None:
        self.model, self.engine = model, engine
        self.fallbacks: Counter[str] = Counter()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(_POSITIONAL, args, strict=False)) | kwargs
        settings = _settings(self.model, named)
        tokens = self.model.get_input_embeddings().weight.shape[0]
        strings, tokenizer = settings.pop("stop_strings", None), named.get("tokenizer")
        if strings and tokenizer is None:
            settings["stop_strings"] = strings
        settings["stop_texts"] = StopTexts(tokenizer, strings) if strings and tokenizer is not None else None
        settings["eos_token_id"] = tuple(t for t in _as_tuple(settings.get("eos_token_id")) if 0 <= t < tokens)
        reason = _why_not(self.model, named, settings) or _refused(settings, named)
        if reason:
            self._note(reason)
            return self._original()(*args, **kwargs)
        ids, mask = _ids(named), _mask(named, settings)
        long = _too_long(self.engine, ids, mask, settings)
        if not long.any():
            return _completed(self.engine, ids, mask, settings)
        self._note(f"prompts and new tokens are longer than the engine's {self.engine.max_length}")
        return self._original()(*args, **kwargs) if long.all() else self._split(named, settings, long)

    def _note(self, reason: str) -> None:
        self.fallbacks[reason] += 1
        if self.fallbacks[reason] == 1:
            logger.warning("octavo: model.generate runs without the engine: %s", reason)

    def _split(self, named: dict[str, Any], settings: dict[str, Any], long: Tensor) -> Tensor:
        """Complete rows that are too long for the engine by transformers, and the others by the engine."""
        ids, mask = _ids(named), _mask(named, settings)
        rows = {name: named[name][long] for name in _OF_ROWS if isinstance(named.get(name), Tensor)}
        theirs = self._original()(**named | rows)
        ours = _completed(self.engine, ids[~long], None if mask is None else mask[~long], settings)
        long = long.repeat_interleave(settings.get("num_return_sequences") or 1)
        both = ids.new_full((len(long), max(theirs.shape[1], ours.shape[1])), _fill(settings))
        both[long, : theirs.shape[1]], both[~long, : ours.shape[1]] = theirs, ours
        return both

    def _original(self) -> Any:
        cls: Any = type(self.model)
        return MethodType(cls.generate, self.model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied: Any = memo[id(self.model)]
        return MethodType(type(copied).generate, copied)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an engine is attached to this model, which cannot be pickled: call octavo.rl.detach(model)")


def _settings(model: Any, named: dict[str, Any]) -> dict[str, Any]:
    """The fields of a generation configuration: as given by name, else as given whole, else as the model has them."""
    given = named.get("generation_config")
    layers = [model.generation_config.to_dict(), {} if given is None else given.to_dict()]
    merged = {name: value for layer in layers for name, value in layer.items() if value is not None}
    return merged | {name: value for name, value in named.items() if name in layers[0]}


def _ids(named: dict[str, Any]) -> Any:
    return named.get("input_ids") if named.get("inputs") is None else named["inputs"]


def _why_not(model: Any, named: dict[str, Any], settings: dict[str, Any]) -> str:
    """Why a call is not the engine's to answer; empty if it is."""
    known = {*_POSITIONAL[:2], "input_ids", "attention_mask", "stop_strings", "tokenizer", *settings}
    if settings.get("stop_strings"):
        return "stop_strings are given without tokenizer"
    for name, value in named.items():
        if name not in known and value is not None and value is not False:
            return f"{name} is given"
    for name, value in settings.items():
        if name in _FOLLOWED or name in _IRRELEVANT or name.startswith("_"):
            continue
        is_token = name.endswith("_token_id") and isinstance(value, int) and value is not False
        if (value or is_token) and value != _NEUTRAL.get(name):
            return f"{name}={value!r}"
    prepare = model.__dict__.get("prepare_inputs_for_generation")
    if prepare is not None and getattr(prepare, "__self__", None) is not model:
        return "prepare_inputs_for_generation is replaced, as by adapters that learn a prompt"
    if changes_calls(model):
        return f"{type(model).__name__} has a hook or another forward, which the engine does not call"
    ids = _ids(named)
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        return "input_ids is no matrix of tokens"
    if not ids.numel():
        return "input_ids is empty"
    mask = _mask(named, settings)
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
        return "attention_mask has another shape than input_ids"
    if mask is not None and not bool(mask.bool().int().diff(dim=1).ge(0).all()):
        return "rows are not padded on the left alone"
    if mask is not None and not bool(mask.bool().any(dim=1).all()):
        return "a row is padding alone"
    if any(hasattr(module, "lora_A") and module._forward_pre_hooks for module in model.modules()):
        return "rows have adapters of their own (adapter_names)"
    return ""


def _mask(named: dict[str, Any], settings: dict[str, Any]) -> Any:
    """The mask of a call; as transformers does, one that is not given is inferred from padding."""
    given, pad = named.get("attention_mask"), settings.get("pad_token_id")
    if given is not None or pad is None or pad in settings["eos_token_id"]:
        return given
    return _ids(named).ne(pad)


def _too_long(engine: Engine, ids: Tensor, mask: Tensor | None, settings: dict[str, Any]) -> Tensor:
    """Rows whose completions may be longer than the engine's, which would end early.

    Where a prompt alone is too long, the engine says so.
    """
    new, limit = _new_tokens(settings, ids.shape[1]), engine.max_length
    lengths = torch.full(ids.shape[:1], ids.shape[1]) if mask is None else mask.bool().sum(1).cpu()
    if limit is None:
        return torch.zeros_like(lengths, dtype=torch.bool)
    return (lengths < limit) & (lengths + new > limit)


def _refused(settings: dict[str, Any], named: dict[str, Any]) -> str:
    """Why no engine samples in this way, such as a temperature of 1e-7; empty if they do."""
    try:
        _sampling(settings, _ids(named).shape[1])
    except ValueError as error:
        return str(error)
    return ""


def _completed(engine: Engine, ids: Tensor, mask: Tensor | None, settings: dict[str, Any]) -> Tensor:
    """Rows with their completions, padded on the right, as `generate` returns them."""
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    prompts = [row[kept].tolist() for row, kept in zip(ids.cpu(), real.cpu(), strict=True)]
    n = settings.get("num_return_sequences") or 1
    sampling, fill = _sampling(settings, ids.shape[1]), _fill(settings)
    completions = [
        _as_transformers(each, prompts[each.prompt], sampling) for each in engine.generate(prompts, n, sampling)
    ]
    longest = max(map(len, completions))
    rows = [[*tokens, *[fill] * (longest - len(tokens))] for tokens in completions]
    new = torch.tensor(rows, dtype=ids.dtype, device=ids.device)
    return torch.cat([ids.repeat_interleave(n, dim=0), new], dim=1)


def _as_transformers(completion: Completion, prompt: list[int], sampling: Sampling) -> list[int]:
    """The tokens of a completion. To transformers, a stop string may begin in the prompt."""
    texts = sampling.stop_texts
    return completion.tokens[: None if texts is None else texts.end_from(prompt, completion.tokens)]


def _fill(settings: dict[str, Any]) -> int:
    """Return the token that fills rows behind the end of their completion."""
    stops, pad = settings["eos_token_id"], settings.get("pad_token_id")
    return int(pad if pad is not None else stops[0] if stops else 0)


def _sampling(settings: dict[str, Any], length: int) -> Sampling:
    """How the engine is to sample. `length`: of the rows with their padding, which `max_length` counts, too."""
    sampled = bool(settings.get("do_sample"))
    given = settings.get("temperature")  # None changes nothing, as in transformers
    temperature = 0.0 if not sampled else 1.0 if given is None else given
    top_k, top_p = settings.get("top_k", _TOP_K), settings.get("top_p")
    return Sampling(
        max_new_tokens=_new_tokens(settings, length),
        temperature=temperature,
        top_k=top_k if sampled and top_k and top_k > 0 else None,
        top_p=top_p if sampled and top_p is not None and top_p < 1 else None,
        min_p=(settings.get("min_p") or None) if sampled else None,
        stop_ids=settings["eos_token_id"],
        stop_texts=settings["stop_texts"],
    )


def _new_tokens(settings: dict[str, Any], length: int) -> int:
    """How many tokens a completion may have, where rows have this length."""
    new, whole = settings.get("max_new_tokens"), settings.get("max_length")
    return int(new) if new is not None else _LONGEST if whole is None else whole - length


def _as_tuple(tokens: Any) -> tuple[int, ...]:
    if tokens is None:
        return ()
    if isinstance(tokens, Tensor):
        tokens = tokens.tolist()
    return tuple(map(int, tokens)) if isinstance(tokens, list | tuple) else (int(tokens),)
