"""How far generation is from a full forward of the same model, on a few of its own tokens.

    gap         mean |Δ log p| of sampled tokens: the generator's against those of one forward over prompt and tokens
    gap_p99     its 99th percentile
    agreement   share of greedily chosen tokens that are the likeliest in a full forward, given the same tokens before
    margin      mean difference of the two likeliest logits there

With random weights, logits are nearly flat, and `margin` says how nearly: where it is small, tokens that differ say
little. A real model's gap is measured by each step of `octavo grpo`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from octavo.decoders.backbone import hidden_states
from octavo.nn.linear import weights_only
from octavo.ops import loss as ops_loss
from octavo.rl.completions import Completion
from octavo.tools.bench.rollout.generators import Generator
from octavo.tools.bench.rollout.models import causal_of
from octavo.tools.bench.rollout.ways import Way

SEQUENCES = 4
TOKENS = 64  # of each of them, greedy


def measure_gap(
    model: Any, way: Way, generator: Generator, prompts: Sequence[Sequence[int]], done: Sequence[Completion]
) -> dict[str, Any]:
    """Return the figures above. `done`: completions of a timed run, whose log-probabilities are taken if it has them.

    Octavo's own have two gaps: `gap`, to a forward with the products of the engine; `trainer_gap`, to one with FP8
    products, as training has them by default.
    """
    tokens, n = min(TOKENS, len(done[0].tokens)), len(done) // len(prompts)
    if not way.is_native:
        prompts, n = prompts[:SEQUENCES], 1
        done = generator.complete(prompts, n, tokens, logprobs=True)
    greedy = _few(generator.complete(prompts, n, tokens, greedy=True))  # in as many slots as were timed
    first = _few(done)
    forward = _Forward(model, way)
    figures: dict[str, Any] = {"gap_tokens": sum(len(each.logprobs) for each in first)}
    if figures["gap_tokens"]:
        figures |= _differences(forward, prompts, first, own=False)
        if way.recipe is not None:
            trainer = _differences(forward, prompts, first, own=True)
            figures |= {f"trainer_{name}": value for name, value in trainer.items()}
    figures |= _agreement(forward, prompts, greedy)
    return figures


def _few(done: Sequence[Completion]) -> list[Completion]:
    """The first completion of each of the first prompts."""
    return list({each.prompt: each for each in reversed(done)}.values())[::-1][:SEQUENCES]


class _Forward:
    """FP32 logits of a full forward without a cache; Octavo's own as `rl/loss.py` computes them."""

    def __init__(self, model: Any, way: Way) -> None:
        self._model, self._way = model, way

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], tokens: Sequence[int], *, own: bool) -> Tensor:
        """Return the logits `[N, V]` that predict `tokens`. `own`: with the model's products, not the engine's."""
        causal = causal_of(self._model)
        ids = torch.tensor([[*prompt, *tokens]], device=causal.lm_head.weight.device)
        chosen = slice(len(prompt) - 1, ids.shape[1] - 1)
        was_training = self._model.training
        self._model.eval()
        try:
            if not self._way.is_native:
                found: Tensor = self._model(input_ids=ids, use_cache=False).logits[0, chosen]
                return found.float()
            with self._products(own):
                hidden, _, _ = hidden_states(causal, {"input_ids": ids}, ids)
            weight = causal.lm_head.weight
            logits = torch.empty(len(tokens), len(weight), dtype=torch.float32, device=weight.device)
            ops_loss.product_(logits, hidden[0, chosen], weight.t(), add=False)
            return logits
        finally:
            self._model.train(was_training)

    def _products(self, own: bool) -> AbstractContextManager[Any]:
        return nullcontext() if own or self._way.products == "fp8" else weights_only()


def _differences(
    forward: _Forward, prompts: Sequence[Sequence[int]], done: Sequence[Completion], *, own: bool
) -> dict[str, float]:
    found = []
    for each in done:
        logits = forward.logits(prompts[each.prompt], each.tokens, own=own)
        tokens = torch.tensor(each.tokens, device=logits.device)
        full = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
        found.append((full.cpu() - torch.tensor(each.logprobs)).abs())
    delta = torch.cat(found).double()
    nth = max(round(0.99 * len(delta)), 1)
    return {"gap": float(delta.mean()), "gap_p99": float(delta.kthvalue(nth).values)}


def _agreement(forward: _Forward, prompts: Sequence[Sequence[int]], done: Sequence[Completion]) -> dict[str, float]:
    same, margins = [], []
    for each in done:
        logits = forward.logits(prompts[each.prompt], each.tokens, own=False)
        best = logits.topk(2, dim=-1)
        same.append(best.indices[:, 0].cpu() == torch.tensor(each.tokens))
        margins.append((best.values[:, 0] - best.values[:, 1]).cpu())
    return {"agreement": float(torch.cat(same).double().mean()), "margin": float(torch.cat(margins).double().mean())}
