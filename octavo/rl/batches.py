"""Sequences of a rollout packed into micro-batches: one row of tokens each, without padding.

    prompt a b   completion c d e      prompt f   completion g        row        a b c d e f g
                                                                      positions  0 1 2 3 4 0 1
                                                                      predicts     c d e     g
                                                                      index        1 2 3     5

Positions restart where a sequence begins, which tells the decoder's attention where documents end. Hidden states at
`index` predict the tokens of completions, in the order in which log-probabilities `[N]` are kept everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """A completion to train on. `logprobs`: of its tokens, as the engine drew them."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    advantage: float


@dataclass(frozen=True)
class MicroBatch:
    """Packed samples. T tokens in all, N of them in the completions of S sequences.

    `ids[1, T]`, `positions[1, T]`; `index[N]`: hidden states to predict from; `targets[N]`: tokens to predict;
    `rollout[N]`: their log-probabilities by the engine; `sequence[N]`, `advantages[S]`, `lengths[S]` as in `loss.py`.
    """

    ids: Tensor
    positions: Tensor
    index: Tensor
    targets: Tensor
    rollout: Tensor
    sequence: Tensor
    advantages: Tensor
    lengths: Tensor

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]


def pack(samples: Sequence[Sample], most_tokens: int, device: torch.device) -> list[MicroBatch]:
    """Return micro-batches of at most `most_tokens` tokens, or of one sample that is longer; in the given order."""
    groups: list[list[Sample]] = []
    room = 0
    for sample in samples:
        length = len(sample.prompt) + len(sample.tokens)
        if not groups or length > room:
            groups.append([])
            room = most_tokens
        groups[-1].append(sample)
        room -= length
    return [_micro_batch(group, device) for group in groups]


def _micro_batch(samples: Sequence[Sample], device: torch.device) -> MicroBatch:
    ids: list[int] = []
    positions: list[int] = []
    index: list[int] = []
    for sample in samples:
        start, prompt, length = len(ids), len(sample.prompt), len(sample.prompt) + len(sample.tokens)
        if not sample.prompt or not sample.tokens:
            raise ValueError("a sample has an empty prompt or completion: nothing predicts its first token")
        ids += [*sample.prompt, *sample.tokens]
        positions += range(length)
        index += range(start + prompt - 1, start + length - 1)
    lengths = torch.tensor([len(sample.tokens) for sample in samples])
    return MicroBatch(
        ids=torch.tensor([ids], device=device),
        positions=torch.tensor([positions], device=device),
        index=torch.tensor(index, device=device),
        targets=torch.tensor([token for sample in samples for token in sample.tokens], device=device),
        rollout=torch.tensor([value for sample in samples for value in sample.logprobs], device=device),
        sequence=torch.arange(len(samples)).repeat_interleave(lengths).to(device),
        advantages=torch.tensor([sample.advantage for sample in samples], device=device),
        lengths=lengths.to(device),
    )
