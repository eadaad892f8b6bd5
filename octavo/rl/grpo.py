"""GRPO, a step from top to bottom.

    prompts      some rows of the task
    rollout      the engine completes each of them n times, with the weights as they are
    rewards      by the task's functions
    advantages   within each group of n
    pack         prompts and completions, one after another, in rows without padding
    update       log-probabilities, loss and gradients of each micro-batch, then an optimiser step
    figures      reward, KL, lengths, the gap between rollout and trainer, speed

Log-probabilities "before the update" are those of the very micro-batches of the update: where a rollout is followed by
one optimiser step, those that its own forward computes; else a pass over the same micro-batches before the first one.
So the first ratio is exactly 1, and noise of numerics never meets the clipping.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.dist.random_states import get_rng_states, set_rng_states
from octavo.hf.callback import scaling_managers
from octavo.optim import build_optimizer
from octavo.rl.batches import MicroBatch, Sample, pack
from octavo.rl.completions import Completion, Engine
from octavo.rl.learner import Learner
from octavo.rl.loss import Tokens, Totals, gap_statistics, group_advantages, grpo_loss
from octavo.rl.prompts import Prompts
from octavo.rl.rewards import Scores
from octavo.rl.settings import GRPOSettings
from octavo.rl.stops import StopTexts
from octavo.rl.tasks import Task
from octavo.training.errors import RunError, UserError


@dataclass(frozen=True)
class Rollout:
    """Completions of a step with their rewards (NaN: none), both in the order of the engine."""

    prompts: list[str]
    completions: list[Completion]
    texts: list[str]
    rewards: list[float]


class GRPO:
    """A model, what it learns from, and the engine that completes its prompts."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        task: Task,
        engine: Engine,
        settings: GRPOSettings,
        *,
        stop_ids: tuple[int, ...] | None = None,
        stop_texts: StopTexts | None = None,
        standby: bool = False,
    ) -> None:
        """Prepare the training of a model. `standby`: the engine frees its cache during updates."""
        self.learner = Learner(model)
        if settings.beta and not self.learner.is_adapted:
            raise ValueError(f"beta={settings.beta} with all weights trained: a second copy would be the reference")
        self.model, self.tokenizer, self.task, self.engine, self.settings = model, tokenizer, task, engine, settings
        self.stop_ids, self.stop_texts, self.standby = stop_ids, stop_texts, standby
        self.prompts = Prompts(task, tokenizer, self.learner, settings)
        self.optimizer = build_optimizer(
            settings.optimizer,
            self.learner.parameters,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            betas=(0.9, 0.99),
        )
        self.tokens = 0  # of all completions so far

    def step(self, number: int) -> tuple[dict[str, Any], Rollout]:
        """Take step `number`, counted from 1; return its figures and its completions."""
        settings, learner = self.settings, self.learner
        started = time.perf_counter()

        chosen = self.prompts.of_step(number)
        completions = self.complete([prompt.ids for prompt in chosen], settings.completions, number)
        if self.standby:
            self.engine.standby()
        rollout_s = time.perf_counter() - started

        rows = [prompt.row for prompt in chosen for _ in range(settings.completions)]
        texts = [self.tokenizer.decode(each.tokens, skip_special_tokens=True) for each in completions]
        scores = self.score(rows, texts, completions)

        rewards = scores.rewards.view(len(chosen), settings.completions)
        advantages = group_advantages(rewards, settings.scale_rewards).flatten().tolist()
        scored = [i for i in range(len(completions)) if not math.isnan(scores.rewards[i])]
        kept = [i for i in scored if completions[i].stopped or not settings.mask_truncated]
        samples = [
            Sample(chosen[completions[i].prompt].ids, completions[i].tokens, completions[i].logprobs, advantages[i])
            for i in kept
        ]

        set_rate(self.optimizer, settings.learning_rate(number))
        learner.model.train()
        updated = time.perf_counter()
        figures = self._update(number, samples, len(scored))
        train_s = time.perf_counter() - updated

        self.tokens += sum(len(each.tokens) for each in completions)
        row = {
            "step": number,
            **_reward_figures(rewards, scores),
            **_length_figures(completions),
            **figures,
            "left_out": len(completions) - len(samples),
            "lr": settings.learning_rate(number),
            "tokens": self.tokens,
            "rollout_tokens_per_s": sum(len(each.tokens) for each in completions) / rollout_s,
            "train_tokens_per_s": figures["train_tokens"] / train_s,
            "tokens_per_s": sum(len(each.tokens) for each in completions) / (time.perf_counter() - started),
            "rollout_s": rollout_s,
            "train_s": train_s,
        }
        shown = [prompt.text for prompt in chosen for _ in range(settings.completions)]
        return row, Rollout(shown, completions, texts, scores.rewards.tolist())

    def complete(self, prompts: Sequence[Sequence[int]], n: int, step: int) -> list[Completion]:
        """Complete prompts as step `step` does, n times each; whatever goes wrong in the engine is one clear line."""
        engine, sampling = self.engine, self.settings.sampling(step, self.stop_ids, self.stop_texts)
        self.model.eval()
        try:
            completions = engine.generate(prompts, n, sampling)
        except UserError:
            raise
        except Exception as error:  # an engine may fail in any way: out of memory, a process that died
            message = (str(error) or "no words").splitlines()[0]
            raise RunError(
                f"the {engine.name} engine failed at step {step}: {type(error).__name__}: {message}; continue with "
                "--resume, or start anew with other numbers"
            ) from error
        if [each.prompt for each in completions] != [i for i in range(len(prompts)) for _ in range(n)]:
            raise RunError(
                f"the {engine.name} engine returned {len(completions)} completions at step {step}, for {len(prompts)} "
                f"prompts: {n} of each were asked for, in order"
            )
        return completions

    def score(self, rows: Sequence[dict[str, Any]], texts: list[str], completions: Sequence[Completion]) -> Scores:
        """Reward completions, each with the row of its prompt."""
        answers: list[Any] = [
            text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
            for row, text in zip(rows, texts, strict=True)
        ]
        ids = [each.tokens for each in completions]
        return self.task.rewards.score([row["prompt"] for row in rows], answers, ids, self.task.columns(rows))

    def _update(self, number: int, samples: Sequence[Sample], scored: int) -> dict[str, Any]:
        """Learn from samples: `iterations` passes of `mini_batches` optimiser steps each.

        `scored`: completions with a reward. Truncated ones that `mask_truncated` leaves out count where a loss is a
        mean over sequences, as in TRL: each optimiser step counts its share of them.
        """
        settings = self.settings
        size = max(-(-len(samples) // settings.mini_batches), 1)
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        packed = [pack(part, settings.micro_batch_tokens, self.learner.device) for part in parts]
        # Where several optimiser steps follow, all old log-probabilities come before the first of them.
        olds: list[list[Tensor | None]] = [[None] * len(batches) for batches in packed]
        if len(packed) > 1:
            with torch.no_grad():
                olds = [[self.learner.logprobs(batch, settings.temperature) for batch in part] for part in packed]
        updates = []
        for _ in range(settings.iterations):
            for part, batches, old in zip(parts, packed, olds, strict=True):
                sequences = scored * len(part) / len(samples)
                updates.append(self._optimizer_step(number, batches, old, sequences))
        gap = gap_statistics(
            torch.cat([each for part in olds for each in part if each is not None] or [torch.empty(0)]),
            torch.cat([batch.rollout for part in packed for batch in part] or [torch.empty(0)]),
            settings,
        )
        names = updates[0] if updates else dict.fromkeys(("loss", "grad_norm", "clip_fraction", "corrected", "kl"), 0.0)
        means = {name: sum(update[name] for update in updates) / max(len(updates), 1) for name in names}
        if not settings.beta:
            means["kl"] = None  # not computed: JSON's null, and a dash in the progress
        return {**means, **gap, "train_tokens": settings.iterations * sum(b.tokens for part in packed for b in part)}

    def _optimizer_step(
        self, number: int, batches: Sequence[MicroBatch], olds: list[Tensor | None], sequences: float
    ) -> dict[str, Any]:
        """Take one optimiser step; fill in the old log-probabilities that are None: those of this very forward."""
        settings, learner = self.settings, self.learner
        tokens = sum(len(batch.targets) for batch in batches)
        totals = Totals(sequences, tokens, len(batches), settings.max_new_tokens)
        sums = torch.zeros(4, dtype=torch.float64, device=learner.device)
        for i, batch in enumerate(batches):
            logprobs = learner.logprobs(batch, settings.temperature)
            old = olds[i]
            if old is None:
                old = olds[i] = logprobs.detach()
            reference = learner.reference(batch, settings.temperature) if settings.beta else None
            given = Tokens(old, batch.rollout, reference, batch.sequence, batch.advantages, batch.lengths)
            loss, figures = grpo_loss(logprobs, given, settings, totals)
            loss.backward()
            sums += torch.stack([loss.detach(), *(figures[name] for name in ("clipped", "corrected", "kl"))])
        norm = torch.nn.utils.clip_grad_norm_(learner.parameters, settings.clip or math.inf)
        loss_sum, clipped, corrected, kl = sums.tolist()
        if not math.isfinite(loss_sum) or not math.isfinite(float(norm)):
            raise RunError(
                f"the loss or gradient of step {number} is not finite, and it was not applied: start again from the "
                f"last checkpoint with a smaller --lr (it was {settings.learning_rate(number):g}), in a new run"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "loss": loss_sum,
            "grad_norm": float(norm),
            "clip_fraction": clipped / tokens,
            "corrected": corrected / tokens,
            "kl": kl / tokens,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, besides the trained weights, the settings and the task."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaling": [manager.state_dict() for manager in scaling_managers(self.model)],
            "random": get_rng_states([self.learner.device]),
            "tokens": self.tokens,
        }

    def trained(self) -> dict[str, Tensor]:
        """Return the trained weights by their names."""
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def load_state_dict(self, trained: dict[str, Tensor], state: dict[str, Any]) -> None:
        own = self.trained()
        if own.keys() != trained.keys():
            raise RunError("the checkpoint is of another model: its trained weights have other names")
        for name, parameter in own.items():
            parameter.copy_(trained[name])
        self.optimizer.load_state_dict(state["optimizer"])
        for manager, saved in zip(scaling_managers(self.model), state["scaling"], strict=True):
            manager.load_state_dict(saved)
        set_rng_states(state["random"])
        self.tokens = state["tokens"]


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)  # torchao's optimisers keep it in a tensor
        else:
            group["lr"] = lr


def _reward_figures(rewards: Tensor, scores: Scores) -> dict[str, Any]:
    """Return the mean reward, and how many groups have something to learn from: those whose rewards differ."""
    known = rewards[rewards.isfinite()]
    equal = [len(set(group[group.isfinite()].tolist())) <= 1 for group in rewards]
    return {
        "reward": float(known.mean()),
        "reward_std": float(known.std()) if len(known) > 1 else 0.0,
        "rewards": scores.means,
        "groups": len(rewards),
        "equal_groups": sum(equal),
        "unscored": scores.unscored,
    }


def _length_figures(completions: Sequence[Completion]) -> dict[str, Any]:
    lengths = [len(each.tokens) for each in completions]
    truncated = sum(not each.stopped for each in completions)
    return {"length": sum(lengths) / len(lengths), "longest": max(lengths), "truncated": truncated / len(lengths)}
