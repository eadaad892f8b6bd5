"""Numbers of a GRPO run: one frozen dataclass, complete and checked at construction."""

import hashlib
import math
from dataclasses import dataclass

from octavo.numerics.checks import check_choice, check_positive_int
from octavo.rl.completions import Sampling
from octavo.rl.loss import GRPOLoss
from octavo.rl.stops import StopTexts

SCHEDULES = ("constant", "linear", "cosine")
OPTIMIZERS = ("adamw", "adamw8bit", "adamw4bit")


@dataclass(frozen=True)
class GRPOSettings(GRPOLoss):
    """How a model learns from rewards; `GRPOLoss` has the fields of the loss.

    Fields:
        steps: rollouts, each with the updates that follow from it.
        prompts, completions: prompts of a step, and how often each is completed.
        max_new_tokens, temperature, top_k, top_p: of the rollout. Top-k and top-p need `correction="none"`: tokens are
            then drawn from another distribution than that of the log-probabilities.
        iterations, mini_batches: passes over a rollout, and optimiser steps of a pass.
        micro_batch_tokens: tokens that go through the model at once, prompts included.
        mask_truncated: leave completions that no stop token ended out of the loss. The loss types `grpo` and `dr_grpo`
            still divide by their number, as in TRL.
        lr, warmup, schedule: peak rate, steps that rise to it, then `constant`, `linear` or `cosine`, down to 0.
        clip, optimizer, weight_decay: largest gradient norm, 0 for any; `adamw`, `adamw8bit` or `adamw4bit`.
        seed: of the order of prompts and of what is sampled.
    """

    steps: int = 200
    prompts: int = 8
    completions: int = 8
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    iterations: int = 1
    mini_batches: int = 1
    micro_batch_tokens: int = 8192
    mask_truncated: bool = False
    lr: float = 2e-5
    warmup: int = 0
    schedule: str = "constant"
    clip: float = 1.0
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "prompts", "completions", "iterations", "mini_batches", "micro_batch_tokens"):
            check_positive_int(name, getattr(self, name))
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        self._check("completions", self.completions >= 2, "at least 2: a group is compared with itself")
        self._check("prompts", self.prompts % self.mini_batches == 0, f"a multiple of mini_batches={self.mini_batches}")
        self._check("temperature", self.temperature > 0, "above 0: greedy completions of a prompt are all the same")
        self._check("lr", 0 < self.lr < math.inf, "a number above 0")
        for name in ("clip", "weight_decay"):
            self._check(name, 0 <= getattr(self, name) < math.inf, "a number, 0 or more")
        for name in ("warmup", "seed"):
            value = getattr(self, name)
            self._check(name, isinstance(value, int) and 0 <= value < 2**63, "a whole number, 0 or more, below 2**63")
        if self.sampling(1).is_truncated and self.correction != "none":
            raise ValueError(
                f"{self.sampling(1).truncation} with correction={self.correction!r}: log-probabilities are "
                "not those that tokens are drawn from, and correct nothing; leave top-k and top-p out, or set "
                "correction='none'"
            )

    def _check(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)!r}: {wanted}")

    def sampling(
        self, step: int, stop_ids: tuple[int, ...] | None = None, stop_texts: StopTexts | None = None
    ) -> Sampling:
        """Return how the completions of a step are drawn."""
        return Sampling(
            self.max_new_tokens,
            self.temperature,
            self.top_k,
            self.top_p,
            stop_ids=stop_ids,
            stop_texts=stop_texts,
            seed=seed_of(self.seed, "completions", step),
        )

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        share = (step - self.warmup) / max(self.steps - self.warmup, 1)
        factors = {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}
        # The last step would have a rate of 0, and be in vain.
        return self.lr * max(factors[self.schedule], 1e-2)


def seed_of(*parts: object) -> int:
    """Return a seed that depends on all of these, and on nothing else."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=7).digest())
