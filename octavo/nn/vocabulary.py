"""Cross entropy of a head that is parallel by columns: each of R ranks has the logits of V/R tokens.

    l_r[T, V/R]        s_r = log Σ_v exp(l_rv),  p_r = l_r,label on the rank that has the label, 0 elsewhere
    one all-gather     s = log Σ_r exp(s_r)      loss = s − Σ_r p_r        dl_r = softmax(l_r; s) − [v = label]

Two numbers a token and rank travel, and no logits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from octavo.nn.collectives import all_gather
from octavo.numerics.cross_entropy import ELSEWHERE, IGNORED, check_labels
from octavo.ops import loss as ops_loss


@dataclass(frozen=True)
class Vocabulary:
    """The part of a vocabulary of `size` tokens that this rank has: `rows` from `start` on."""

    group: ProcessGroup
    start: int
    rows: int
    size: int

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError(
                f"a vocabulary of {self.size} on {self.group.size()} ranks leaves this one none of it: use fewer ranks "
                "for tensor parallelism, or leave the head out of the plan"
            )

    @property
    def most_rows(self) -> int:
        """The tokens of the rank that has most: what decides about chunks, which are the same on all ranks."""
        return -(-self.size // self.group.size())

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of every token, the logarithm of its sum of exponentials, and the labels as this rank has them."""
        check_labels(labels, self.size)
        own = labels - self.start
        here = (own >= 0) & (own < self.rows)
        own = torch.where(labels == IGNORED, IGNORED, torch.where(here, own, ELSEWHERE))
        _, lse = ops_loss.cross_entropy(logits, torch.full_like(labels, IGNORED))
        picked = logits.gather(1, torch.where(here, own, 0)[:, None]).squeeze(1).float()
        parts = torch.stack([lse, torch.where(here, picked, 0.0)])
        sums, logits_of_labels = all_gather(parts, self.group).view(-1, 2, len(labels)).unbind(1)
        lse = torch.logsumexp(sums, dim=0)
        return torch.where(labels != IGNORED, lse - logits_of_labels.sum(0), 0.0), lse, own
