"""Prompts in, completions out: what every rollout engine takes and returns.

The trainer owns the weights; an engine owns a cache of keys and values, and nothing else. So an engine has four
methods: complete prompts with the weights as they are now, give the cache's memory back, take it again, and say what
the last rollout cost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.rl.stops import StopTexts

LEAST_TEMPERATURE = 1e-6  # above 0; logits of 1e4 still have 28 orders of magnitude to go in FP32


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    `temperature`: 0 takes the likeliest token (greedy). `top_k`: so many of the likeliest tokens; `top_p`: as many
    as have this much probability together; `min_p`: those with this share of the likeliest one's. `stop_ids`: tokens
    that end a completion; None means the ends of sequence that the model names (`generation_config`, then `config`),
    and () none. `stop_texts`: texts that end one. `seed`: None draws one from torch's default CPU generator, so that
    `torch.manual_seed` decides.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop_ids: tuple[int, ...] | None = None
    stop_texts: StopTexts | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_int(self.max_new_tokens) or self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens!r} must be a positive integer")
        if not (isinstance(self.temperature, int | float) and 0 <= self.temperature < math.inf):
            raise ValueError(f"temperature={self.temperature!r} must be a finite number of at least 0 (0: greedy)")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature!r} is below {LEAST_TEMPERATURE:g}, and logits divided by it may not be "
                "finite; set 0, which takes the likeliest token, or at least that much"
            )
        if self.top_k is not None and (not _is_int(self.top_k) or self.top_k < 1):
            raise ValueError(f"top_k={self.top_k!r} must be a positive integer, or None for all tokens")
        if self.top_p is not None and not (isinstance(self.top_p, int | float) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p={self.top_p!r} must be above 0 and at most 1, or None for all tokens")
        if self.min_p is not None and not (isinstance(self.min_p, int | float) and 0 <= self.min_p <= 1):
            raise ValueError(f"min_p={self.min_p!r} must be from 0 to 1, or None for all tokens")
        if self.stop_ids is not None and not all(_is_int(token) and token >= 0 for token in self.stop_ids):
            raise ValueError(f"stop_ids={self.stop_ids!r} must be token ids: integers of at least 0")
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < 2**63):
            raise ValueError(f"seed={self.seed!r} must be an integer from 0 to 2**63 - 1, or None")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncation(self) -> str:
        """The options that leave tokens out, such as `top_k=20, min_p=0.1`; empty if none does."""
        if self.is_greedy:
            return ""
        given = {
            "top_k": self.top_k,
            "top_p": self.top_p if self.top_p is not None and self.top_p < 1 else None,
            "min_p": self.min_p or None,
        }
        return ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are left out: log-probabilities are then not those that were sampled from."""
        return bool(self.truncation)


@dataclass(frozen=True)
class Completion:
    """One completion of one prompt.

    `prompt`: the index of its prompt. `tokens`: with the stop token or those of the text that ended it, if one did.
    `logprobs`: of each token, the log-softmax over the whole vocabulary of FP32 logits divided by the temperature
    (greedy: by 1). `stopped`: whether a stop token or text ended it; otherwise its length did.
    """

    prompt: int
    tokens: list[int]
    logprobs: list[float]
    stopped: bool


class Engine(Protocol):
    """Completes prompts with the weights of a model that somebody else owns. `name`: "native" or "vllm"."""

    name: str

    @property
    def max_length(self) -> int | None:
        """Tokens of a prompt and its completion together, at which completions end; None: any number."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> list[Completion]:
        """Complete each prompt n times: completions of the first prompt, of the second, and so on."""
        ...

    def standby(self) -> None:
        """Give the memory of the cache back."""
        ...

    def wake(self) -> None:
        """Take the memory of the cache again; `generate` does so itself."""
        ...

    def statistics(self) -> dict[str, float]:
        """Figures of the last `generate`: prefills (distinct prompts), tokens, seconds."""
        ...


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
