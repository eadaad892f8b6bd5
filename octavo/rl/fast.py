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
from types import MethodType
from typing import Any

from octavo.hf import fast
from octavo.nn.report import REPORT, ConversionReport
from octavo.rl import vllm
from octavo.rl.attach import attach, attached
from octavo.rl.completions import Completion, Engine, Sampling
from octavo.rl.engine import NativeEngine
from octavo.rl.policy import ends_of

logger = logging.getLogger("octavo")
# Fields of SamplingParams that change what is sampled, with the values that do not.
_NEUTRAL = {
    "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "bad_words": [],
    "logit_bias": None, "allowed_token_ids": None, "min_tokens": 0, "structured_outputs": None,
}  # fmt: skip


class FastLanguageModel(fast.FastLanguageModel):
    """Loading, adapting and sampling from causal language models. Nothing to instantiate."""

    @classmethod
    def _add_engine(cls, model: Any, tokenizer: Any, rollouts: fast.Rollouts) -> None:
        engine, why = start_engine(model, rollouts)
        said = f"rollouts by the {engine.name} engine: {why}"
        logger.warning("octavo: %s", said)
        report: ConversionReport | None = model.__dict__.get(REPORT)
        if report is not None:
            report.fused.append(said)
        attach(model, StandingBy(engine) if rollouts.standby else engine)
        model.fast_generate = MethodType(_FastGenerate(tokenizer), model)


def start_engine(model: Any, rollouts: fast.Rollouts) -> tuple[Engine, str]:
    """Return the engine that is asked for, for this model, and why it is this one."""
    chosen = rollouts.engine or ("vllm" if vllm.is_installed() else "native")
    why = (
        f"engine={chosen!r}" if rollouts.engine is not None
        else "vLLM is installed" if chosen == "vllm"
        else "vLLM is not installed"
    )  # fmt: skip
    shared = {"max_length": model.max_seq_length, "memory_share": rollouts.memory_share}
    if chosen == "vllm":
        return vllm.VLLMEngine(model, can_stand_by=rollouts.standby, **shared), why
    return NativeEngine(model, **shared), why


class StandingBy:
    """An engine that gives the memory of its cache back after each rollout."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.name = engine, engine.name

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


class _FastGenerate:
    """`model.fast_generate`, as scripts for vLLM call it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(
        self, model: Any, prompts: str | Sequence[str], sampling_params: Any = None, lora_request: Any = None, **_: Any
    ) -> list[FastOutput]:
        """Complete texts. `sampling_params`: vLLM's, or anything with its fields; adapters are those of the model."""
        engine = attached(model)
        if engine is None:
            raise ValueError("fast_generate: no engine is attached to this model, which may be a copy; use generate")
        if self.tokenizer is None:
            raise ValueError("fast_generate takes text, and the model was loaded with tokenizer=False: use generate")
        if lora_request is not None:
            raise ValueError(
                "lora_request: the engine computes with the model's own adapters, as they are now; leave it out"
            )
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        ids = [self.tokenizer(text)["input_ids"] for text in texts]
        n, sampling = self._sampling(sampling_params, ends_of(model))
        done = engine.generate(ids, n, sampling)
        return [
            FastOutput(text, ids[i], [self._output(j, one) for j, one in enumerate(done[i * n : (i + 1) * n])])
            for i, text in enumerate(texts)
        ]

    def _output(self, index: int, one: Completion) -> FastCompletion:
        text = self.tokenizer.decode(one.tokens, skip_special_tokens=True)
        return FastCompletion(index, text, one.tokens, one.logprobs, "stop" if one.stopped else "length")

    def _sampling(self, params: Any, ends: Sequence[int]) -> tuple[int, Sampling]:
        """How many completions, and how tokens are chosen, by the fields of vLLM's SamplingParams.

        `ends`: the model's own ends of sequence, which end a completion besides those that are named there.
        """
        get: dict[str, Any] = {"n": 1, "max_tokens": 16, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": None}
        get |= {name: value for name in get if (value := getattr(params, name, None)) is not None}
        for name, neutral in _NEUTRAL.items():
            value = getattr(params, name, None)
            if value and value != neutral:
                raise ValueError(f"sampling_params.{name}={value!r}: the engine samples by temperature, top_k, top_p")
        stop_ids = [*(getattr(params, "stop_token_ids", None) or ()), *self._stops(getattr(params, "stop", None))]
        if not getattr(params, "ignore_eos", False):
            stop_ids += ends
        return int(get["n"]), Sampling(
            max_new_tokens=get["max_tokens"],
            temperature=get["temperature"],
            top_k=get["top_k"] if get["top_k"] > 0 else None,
            top_p=get["top_p"] if get["top_p"] < 1 else None,
            stop_ids=tuple(stop_ids),
            seed=get["seed"],
        )

    def _stops(self, texts: str | Sequence[str] | None) -> list[int]:
        """Tokens of texts that end a completion; each has to be one token."""
        known = self.tokenizer.get_vocab()
        given = [texts] if isinstance(texts, str) else list(texts or ())
        for text in given:
            if text not in known:
                raise ValueError(f"sampling_params.stop={text!r}: no token of the tokenizer; engines stop at tokens")
        return [known[text] for text in given]
