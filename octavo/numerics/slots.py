"""Bookkeeping of completions that are being written, one slot each, around a step of a decoder that generates.

A slot t that is *active* has `lengths[t]` tokens in the cache and a newest one, which has yet to go there. A step

    begins   the newest token goes to position lengths[t] of the suffix, which then has lengths[t] + 1 tokens; in the
             whole sequence it is at prefix_lengths[g] + lengths[t], g = group_of[t]
    ends     the next token is appended at lengths[t] + 1, with its log-probability; it is the newest one, and the one
             before is counted. The slot ends if that token is a stop, or if the completion has limits[t] tokens

All by masks: for a slot that is not active, a step is at position 0, stores nothing (place −1), sees nothing (length 0)
and appends nothing.
"""

import torch
from torch import Tensor


def begin_step(
    active: Tensor, lengths: Tensor, group_of: Tensor, prefix_lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return, for each slot: its token's position (int64); its place, position in the suffix, length seen (int32)."""
    before = prefix_lengths[group_of.clamp(min=0).long()]
    slots = torch.arange(len(active), dtype=torch.int32, device=active.device)
    positions = torch.where(active, before + lengths, 0).long()
    return positions, torch.where(active, slots, -1), lengths.clone(), torch.where(active, lengths + 1, 0)


def end_step_(
    tokens: Tensor,
    logprobs: Tensor,
    newest: Tensor,
    lengths: Tensor,
    active: Tensor,
    token: Tensor,
    logprob: Tensor,
    stops: Tensor,
    limits: Tensor,
) -> None:
    """Append `token[T]` with `logprob[T]` to `tokens` and `logprobs[T, L]`; count, and end what is complete."""
    where = (lengths + 1).clamp(max=tokens.shape[1] - 1).long()[:, None]
    for rows, new in ((tokens, token), (logprobs, logprob)):
        old = rows.gather(1, where)[:, 0]
        rows.scatter_(1, where, torch.where(active, new, old)[:, None])
    newest.copy_(torch.where(active, token, newest))
    lengths.add_(active)
    active.logical_and_(~(stops[token] | (lengths + 1 >= limits)))
