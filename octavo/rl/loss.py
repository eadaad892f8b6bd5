"""The loss of GRPO: log-probabilities in chunks, advantages within groups, clipped ratios, and a corrected rollout.

Shapes: N tokens of completions, flat, of S sequences; K width, V vocabulary; G groups of n completions.

    log π_t    = l_t[token] − log Σ exp l_t          l = h · wᵀ / temperature, in FP32
    A_s        = (r_s − mean of its group) / (σ + 1e-4)
    ratio_t    = exp(log π_t − log π_old_t)          π_old: the trainer before the update
    policy_t   = −min(ratio_t · A, clip(ratio_t, 1 − ε_low, 1 + ε_high) · A) · c_t
    loss_t     = policy_t + β · (exp d_t − d_t − 1)  d = log π_ref − log π; π_ref: the model without its adapters

Tokens were drawn by an engine whose log-probabilities differ a little from the trainer's, by numerics alone. The
correction c is the ratio of the two, π_old / π_rollout: of each token, or of a sequence, the product of its tokens'.

    tis    c = min(max(c, low), high)                truncated importance sampling: large weights are cut
    mis    c = c where low ≤ c ≤ high, else 0        masked: what the trainer would hardly have drawn counts nothing

How losses of tokens become one number (`loss_type`, as TRL has them): `grpo` the mean over sequences of each one's
mean; `dapo` the mean over all tokens of the step; `bnpo` over those of a micro-batch; `dr_grpo` the sum over sequences
divided by the longest length that is allowed.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.nn.loss import chunk_bounds
from octavo.numerics.checks import check_choice
from octavo.ops import loss as ops_loss

CHUNK_BYTES = 2**28  # of logits in FP32
LOSS_TYPES = ("grpo", "dapo", "bnpo", "dr_grpo")
SCALES = ("group", "batch", "none")
CORRECTIONS = ("tis", "mis", "none")
LEVELS = ("token", "sequence")
_STD_FLOOR = 1e-4  # as TRL


@dataclass(frozen=True)
class GRPOLoss:
    """How rewards become a loss.

    Fields:
        loss_type, scale_rewards: see above; deviations are divided by that of the `group`, of the `batch`, or `none`.
        beta: weight of the KL divergence from the model without adapters; 0 does not compute it.
        epsilon, epsilon_high: ratios are clipped at 1 − epsilon and 1 + epsilon_high (None: epsilon).
        correction, correction_level: `tis`, `mis` or `none`, of each `token` or of a `sequence`.
        correction_max, correction_min: the bounds of the correction; None is no lower bound.
    """

    loss_type: str = "dapo"
    scale_rewards: str = "group"
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    correction: str = "tis"
    correction_level: str = "token"
    correction_max: float = 2.0
    correction_min: float | None = None

    def __post_init__(self) -> None:
        choices = {"loss_type": LOSS_TYPES, "scale_rewards": SCALES, "correction": CORRECTIONS}
        for name, allowed in {**choices, "correction_level": LEVELS}.items():
            check_choice(name, getattr(self, name), allowed)
        for name, lowest in (("beta", 0.0), ("epsilon", 0.0), ("epsilon_high", 0.0), ("correction_max", 1.0)):
            value = getattr(self, name)
            if not (value is None and name == "epsilon_high") and not lowest <= value < float("inf"):
                raise ValueError(f"{name}={value!r}: a number of at least {lowest:g}")
        if self.epsilon > 1:
            raise ValueError(f"epsilon={self.epsilon!r}: at most 1, as ratios are positive; 0.2 is usual")
        if self.correction_min is not None and not 0 <= self.correction_min <= 1:
            raise ValueError(f"correction_min={self.correction_min!r}: from 0 to 1, or None for no lower bound")

    @property
    def bounds(self) -> tuple[float, float]:
        """Where ratios are clipped."""
        return 1 - self.epsilon, 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)


class Tokens(NamedTuple):
    """Tokens of completions, one after another, of a micro-batch.

    `old`, `rollout`, `reference`: log-probabilities `[N]` by the trainer before the update, by the engine, and without
    adapters (None where β = 0). `sequence[N]`: which of the S sequences a token belongs to. `advantages[S]`,
    `lengths[S]`: of the sequences.
    """

    old: Tensor
    rollout: Tensor
    reference: Tensor | None
    sequence: Tensor
    advantages: Tensor
    lengths: Tensor


class Totals(NamedTuple):
    """Sizes of an optimiser step.

    `sequences`: the divisor of a mean over sequences; with `mask_truncated` it exceeds the number of packed ones.
    `longest`: the maximum number of tokens of a completion.
    """

    sequences: float
    tokens: int
    micro_batches: int
    longest: int


def group_advantages(rewards: Tensor, scale: str) -> Tensor:
    """Return the advantages `[G, n]` of rewards `[G, n]`. NaN is a completion without a reward: its advantage is 0."""
    known = rewards.isfinite()
    count = known.sum(dim=1, keepdim=True)
    # Counted from the least one, so that equal rewards have advantages of exactly 0: the mean of eight times 0.1 is
    # not 0.1, and an optimiser that has not seen a gradient yet makes a whole step of any rounding error.
    least = rewards.where(known, torch.inf).amin(dim=1, keepdim=True)
    above = (rewards - least).where(known, 0.0)
    centred = (above - above.sum(dim=1, keepdim=True) / count.clamp(min=1)).where(known, 0.0)
    if scale == "none":
        return centred
    if scale == "group":
        deviation = (centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    else:
        scored = rewards[known]
        deviation = scored.std() if len(scored) > 1 else rewards.new_zeros(())
    return centred / (deviation + _STD_FLOOR)


def corrections(old: Tensor, rollout: Tensor, sequence: Tensor, sequences: int, loss: GRPOLoss) -> Tensor:
    """Return the weight `[N]` of each token, for having been drawn by an engine instead of the trainer."""
    if loss.correction == "none":
        return torch.ones_like(old)
    ratio, low = _ratios(old, rollout, sequence, sequences, loss.correction_level), loss.correction_min or 0.0
    if loss.correction == "tis":
        return ratio.clamp(low, loss.correction_max)
    return ratio.where((ratio >= low) & (ratio <= loss.correction_max), 0.0)


def _ratios(old: Tensor, rollout: Tensor, sequence: Tensor, sequences: int, level: str) -> Tensor:
    """π_old / π_rollout of each token, or of its sequence."""
    logarithm = old - rollout
    if level == "sequence":
        logarithm = old.new_zeros(sequences).index_add(0, sequence, logarithm)[sequence]
    return logarithm.exp()


def grpo_loss(logprobs: Tensor, tokens: Tokens, loss: GRPOLoss, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this micro-batch's part of a step's loss, and sums over its tokens: `clipped`, `kl` and `corrected`.

    `logprobs[N]`: by the trainer now, with their graph. Parts of all micro-batches of a step add up to its loss.
    """
    sequence, (low, high) = tokens.sequence, loss.bounds
    advantages = tokens.advantages[sequence]
    ratio = (logprobs - tokens.old).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    weights = corrections(tokens.old, tokens.rollout, sequence, len(tokens.lengths), loss)
    per_token = policy * weights
    kl = torch.zeros_like(logprobs)
    if loss.beta:
        assert tokens.reference is not None
        difference = tokens.reference - logprobs
        kl = difference.exp() - difference - 1
        per_token = per_token + loss.beta * kl
    clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
    plain = _ratios(tokens.old, tokens.rollout, sequence, len(tokens.lengths), loss.correction_level)
    changed = (weights != plain) & (loss.correction != "none")
    figures = {"clipped": clipped.sum(), "kl": kl.detach().sum(), "corrected": changed.sum()}
    return _reduced(per_token, tokens, loss.loss_type, totals), figures


def _reduced(per_token: Tensor, tokens: Tokens, loss_type: str, totals: Totals) -> Tensor:
    if loss_type == "grpo":
        return (per_token / tokens.lengths[tokens.sequence]).sum() / totals.sequences
    if loss_type == "bnpo":
        return per_token.mean() / totals.micro_batches
    return per_token.sum() / (totals.tokens if loss_type == "dapo" else totals.sequences * totals.longest)


def gap_statistics(trainer: Tensor, rollout: Tensor, loss: GRPOLoss) -> dict[str, float]:
    """Return how far the log-probabilities of trainer and rollout are apart, Δ = trainer − rollout, over all tokens.

    `gap_mean` and `gap_p99` of |Δ|; `gap_k3`, the mean of exp Δ − Δ − 1, estimates KL(rollout ‖ trainer); `gap_exp`,
    the mean of exp |Δ|; `gap_clip`, the share of tokens that numerics alone would move past a clipping bound.
    """
    if len(trainer) == 0:
        return dict.fromkeys(("gap_mean", "gap_p99", "gap_k3", "gap_exp", "gap_clip"), 0.0)
    delta = (trainer - rollout).double()
    size, ratio, (low, high) = delta.abs(), delta.exp(), loss.bounds
    nth = max(round(0.99 * len(size)), 1)
    figures = {
        "gap_mean": size.mean(),
        "gap_p99": size.kthvalue(nth).values,
        "gap_k3": (ratio - delta - 1).mean(),
        "gap_exp": size.exp().mean(),
        "gap_clip": ((ratio < low) | (ratio > high)).double().mean(),
    }
    return {name: float(value) for name, value in figures.items()}


def token_logprobs(hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-probabilities `[N]` of `tokens[N]`, given `hidden[N, K]` and the head's `weight[V, K]`.

    Logits are in FP32, and those of a chunk of tokens at a time are in memory: backward computes them again.
    """
    if hidden.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"hidden is in {hidden.dtype}; log-probabilities are computed from BF16 or FP32")
    # An autograd function cannot tell whether gradients are enabled.
    result: Tensor = _TokenLogprobs.apply(hidden, weight, tokens.contiguous(), temperature)
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        w = weight.to(hidden.dtype)
        logprobs, lses = (torch.empty(len(tokens), dtype=torch.float32, device=hidden.device) for _ in range(2))
        for start, stop in _chunks(tokens, w):
            logits = _logits(hidden[start:stop], w, temperature)
            loss, lses[start:stop] = ops_loss.cross_entropy(logits, tokens[start:stop])
            logprobs[start:stop] = -loss
            del logits
        ctx.save_for_backward(hidden, weight, tokens, lses)
        ctx.temperature = temperature
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, tokens, lses = ctx.saved_tensors
        needs_h, needs_w, *_ = ctx.needs_input_grad
        w = weight.to(hidden.dtype)
        dh = torch.empty_like(hidden) if needs_h else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if needs_w else None
        one = torch.ones((), device=hidden.device)
        factors = -g.float() / ctx.temperature
        for start, stop in _chunks(tokens, w):
            h, logits = hidden[start:stop], _logits(hidden[start:stop], w, ctx.temperature)
            # d(−log π)/dl = softmax(l) − 1 at the token
            ops_loss.cross_entropy_backward_(logits, tokens[start:stop], lses[start:stop], one)
            gradient = logits.mul_(factors[start:stop, None]).to(hidden.dtype)
            if dh is not None:
                ops_loss.product_(dh[start:stop], gradient, w, add=False)
            if dw is not None:
                ops_loss.product_(dw, gradient.t(), h, add=True)
            del logits, gradient
        return dh, None if dw is None else dw.to(weight.dtype), None, None


def _chunks(tokens: Tensor, weight: Tensor) -> list[tuple[int, int]]:
    return chunk_bounds(0, len(tokens), weight.shape[0] * 4, CHUNK_BYTES)


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = torch.empty(len(hidden), weight.shape[0], dtype=torch.float32, device=hidden.device)
    ops_loss.product_(logits, hidden, weight.t(), add=False)
    return logits if temperature == 1 else logits.div_(temperature)
