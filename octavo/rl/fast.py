"""`octavo.FastLanguageModel`: loading models as `hf/fast.py` does, and rollouts on what was loaded.

    model, tokenizer = FastLanguageModel.from_pretrained(name, load_in_fp8=True, fast_inference=True)
    model = FastLanguageModel.get_peft_model(model, r=64)
    model.generate(...)                     # by the engine, with the adapters as they are now
    model.fast_generate(["Why?"], sampling_params)[0].outputs[0].text

`fast_inference=True` takes vLLM if it is installed and the native engine otherwise, and says which; `engine` decides.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from octavo.decoders import match
from octavo.hf import fast, reading
from octavo.nn.report import REPORT, ConversionReport
from octavo.numerics.checks import check_positive_int
from octavo.rl import vllm
from octavo.rl.attach import attach, attached
from octavo.rl.completions import Completion, Engine, Sampling
from octavo.rl.engine import NativeEngine
from octavo.rl.loras import LIVE, adapters_for, give_adapters_methods
from octavo.rl.policy import ends_of
from octavo.rl.stops import StopTexts
from octavo.rl.trl_vllm import take_trainers_own_vllm

logger = logging.getLogger("octavo")
# Fields of SamplingParams that are followed elsewhere, or that change no token.
_FOLLOWED = {
    "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
    "all_stop_token_ids", "detokenize", "flat_logprobs", "logprobs", "num_logprobs", "output_kind",
    "output_text_buffer_length", "sampling_type", "skip_clone", "skip_reading_prefix_cache",
    "spaces_between_special_tokens", "stream_interval",
}  # fmt: skip
# Others change what is sampled, unless they have these values, or None, False, 0 or nothing in them.
_NEUTRAL = {
    "repetition_penalty": 1.0, "best_of": 1,
}  # fmt: skip
_WAYS = "temperature, top_k, top_p and min_p"
_FIELDS = {"n": 1, "max_tokens": 16, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None}


class FastLanguageModel(fast.FastLanguageModel):
    """Loading, adapting and sampling from causal language models. Nothing to instantiate."""

    @classmethod
    def _check_engine(cls, model_name: str, rollouts: fast.Rollouts, options: dict[str, Any]) -> None:
        if _chosen(rollouts) != "native":
            return
        try:
            kind = reading.causal_class(model_name, options)
        except (OSError, ValueError):  # whatever it is, loading the model says it
            return
        if kind is not None and kind not in {f"{family}ForCausalLM" for family in match.FAMILIES}:
            raise ValueError(
                f"fast_inference=True: the native engine does not know {kind} ({', '.join(match.FAMILIES)}); leave it "
                "out, and transformers generates, or install vLLM"
            )

    @classmethod
    def _add_engine(cls, model: Any, tokenizer: Any, rollouts: fast.Rollouts) -> None:
        give_adapters_methods()
        take_trainers_own_vllm()
        engine, why = start_engine(model, rollouts)
        said = f"rollouts by the {engine.name} engine: {why}"
        logger.warning("octavo: %s", said)
        report: ConversionReport | None = model.__dict__.get(REPORT)
        if report is not None:
            report.fused.append(said)
        attach(model, StandingBy(engine) if rollouts.standby else engine)
        model.fast_generate = partial(_FastGenerate(tokenizer), model)


def start_engine(model: Any, rollouts: fast.Rollouts) -> tuple[Engine, str]:
    """Return the engine that is asked for, for this model, and why it is this one."""
    chosen = _chosen(rollouts)
    why = (
        f"engine={chosen!r}" if rollouts.engine is not None
        else "vLLM is installed" if chosen == "vllm"
        else "vLLM is not installed"
    )  # fmt: skip
    if chosen == "vllm":  # which allocates its cache for sequences as long as they may become
        engine = vllm.VLLMEngine(
            model, can_stand_by=rollouts.standby, max_length=model.max_seq_length, memory_share=rollouts.memory_share
        )
        return engine, why
    return NativeEngine(model, memory_share=rollouts.memory_share), why


def _chosen(rollouts: fast.Rollouts) -> str:
    return rollouts.engine or ("vllm" if vllm.is_installed() else "native")


class StandingBy:
    """An engine that gives the memory of its cache back after each rollout."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.name, self.max_length = engine, engine.name, engine.max_length

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Completion]:
        """Complete each prompt n times, and free the cache, whether that worked or not."""
        try:
            return self.engine.generate(prompts, n, sampling)
        finally:
            self.engine.standby()

    def standby(self) -> None:
        self.engine.standby()

    def wake(self) -> None:
        self.engine.wake()

    def statistics(self) -> dict[str, float]:
        return self.engine.statistics()


@dataclass(frozen=True)
class FastCompletion:
    """One completion, with the names that vLLM gives its parts."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


@dataclass(frozen=True)
class FastOutput:
    """The completions of one prompt, with the names that vLLM gives its parts."""

    prompt: str
    prompt_token_ids: list[int]
    outputs: list[FastCompletion]


@dataclass(frozen=True)
class _Shown:
    """How the text of a completion is shown, with or without the stop that ended it."""

    tokenizer: Any
    stop_texts: StopTexts | None
    with_stop: bool
    skip_special_tokens: bool

    def text(self, one: Completion) -> str:
        """Return the text of a completion."""
        tokens, rest = one.tokens, ""
        if self.stop_texts is not None and self.stop_texts.are_in(tokens):
            whole, rest = self.stop_texts.cut(tokens, with_stop=self.with_stop)
            if not self.tokenizer.decode(tokens[whole : whole + 1], skip_special_tokens=self.skip_special_tokens):
                rest = ""  # part of a token that is not shown
            tokens = tokens[:whole]
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=self.skip_special_tokens)
        return text + rest


class _FastGenerate:
    """`model.fast_generate`, as scripts for vLLM call it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(
        self,
        model: Any,
        prompts: str | Sequence[str],
        sampling_params: Any = None,
        lora_request: Any = LIVE,
        use_tqdm: Any = True,  # noqa: ARG002
        **others: Any,
    ) -> list[FastOutput]:
        """Complete texts. `sampling_params`: vLLM's, or anything with its fields.

        `lora_request`: the adapters of `model.load_lora(folder)`, or None for the base alone; not given, those of the
        model as they are now. `use_tqdm`: of vLLM's, and without effect.
        """
        for name in others:
            raise TypeError(
                f"{name}: not an argument of fast_generate; how to sample is said by sampling_params, which is "
                f"vllm.SamplingParams or an object with its fields ({', '.join(_FIELDS)}, …)"
            )
        engine = attached(model)
        if engine is None:
            raise ValueError("fast_generate: no engine is attached to this model, which may be a copy; use generate")
        if self.tokenizer is None:
            raise ValueError("fast_generate takes text, and the model was loaded with tokenizer=False: use generate")
        texts = [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"prompts={prompts!r}: fast_generate takes a text, or a list of texts")
        ids = [self._ids(text) for text in texts]
        stop = getattr(sampling_params, "stop", None)
        stop_texts = None if stop in (None, [], ()) else StopTexts(self.tokenizer, stop)
        ends = [] if getattr(sampling_params, "ignore_eos", False) else ends_of(model)
        n, sampling = self._sampling(sampling_params, ends, stop_texts, engine.max_length)
        with adapters_for(model, lora_request):
            done = engine.generate(ids, n, sampling)
        shown = _Shown(
            self.tokenizer,
            stop_texts,
            with_stop=getattr(sampling_params, "include_stop_str_in_output", False),
            skip_special_tokens=getattr(sampling_params, "skip_special_tokens", True),
        )
        outputs = [
            FastCompletion(i % n, shown.text(one), one.tokens, one.logprobs, "stop" if one.stopped else "length")
            for i, one in enumerate(done)
        ]
        return [FastOutput(text, ids[i], outputs[i * n : (i + 1) * n]) for i, text in enumerate(texts)]

    def _ids(self, text: str) -> list[int]:
        """The tokens of a text. A chat template has written the start of the sequence already, where there is one."""
        start = self.tokenizer.bos_token
        begun = bool(start) and text.startswith(start)
        ids: list[int] = self.tokenizer(text, add_special_tokens=not begun)["input_ids"]
        return ids

    def _sampling(
        self, params: Any, ends: Sequence[int], stop_texts: StopTexts | None, longest: int | None
    ) -> tuple[int, Sampling]:
        """How many completions, and how tokens are chosen, by the fields of vLLM's SamplingParams.

        `ends`: the model's own ends of sequence, which end a completion besides what is named there. `longest`: how
        many tokens a sequence may have, which is what `max_tokens=None` means.
        """
        is_one = any(hasattr(params, name) for name in _FIELDS) and not hasattr(params, "max_new_tokens")
        if params is not None and not is_one:
            raise TypeError(
                f"sampling_params={params!r}: fast_generate takes one vllm.SamplingParams for all prompts, or an "
                f"object with its fields ({', '.join(_FIELDS)}, …)"
            )
        get: dict[str, Any] = dict(_FIELDS)
        get |= {name: value for name in get if (value := getattr(params, name, None)) is not None}
        if hasattr(params, "max_tokens") and params.max_tokens is None:
            if longest is None:
                raise ValueError("sampling_params.max_tokens=None: the model names no number of positions; set it")
            get["max_tokens"] = longest
        for name in _names_in(params):
            value = getattr(params, name)
            if name in _FIELDS or name in _FOLLOWED or callable(value) or not value or value == _NEUTRAL.get(name):
                continue
            raise ValueError(f"sampling_params.{name}={value!r}: the engine samples by {_WAYS}")
        check_positive_int("sampling_params.n", get["n"])
        stop_ids = [*(getattr(params, "stop_token_ids", None) or ()), *ends]
        return get["n"], Sampling(
            max_new_tokens=get["max_tokens"],
            temperature=get["temperature"],
            top_k=None if get["top_k"] in (0, -1) else get["top_k"],  # in vLLM, both mean all tokens
            top_p=None if get["top_p"] == 1 else get["top_p"],
            min_p=get["min_p"] or None,
            stop_ids=tuple(stop_ids),
            stop_texts=stop_texts,
            seed=get["seed"],
        )


def _names_in(params: Any) -> set[str]:
    """Return the names of what an object holds, as vLLM's SamplingParams, or with attributes of itself or its class."""
    declared = (getattr(type(params), name, ()) for name in ("__struct_fields__", "__dataclass_fields__"))
    own = {*chain(*declared), *getattr(params, "__dict__", {})}
    kinds = (vars(kind).items() for kind in type(params).__mro__)
    # Methods, properties and the places of fields have a `__get__`; values do not.
    of_class = {name for items in kinds for name, value in items if not hasattr(value, "__get__")}
    return {name for name in own | of_class if not name.startswith("_") and name != "model_config"}
