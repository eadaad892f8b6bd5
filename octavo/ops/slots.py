"""The operators of slots: what a step begins with, and what its token changes (`numerics/slots.py`)."""

import torch
from torch import Tensor

from octavo.kernels.tuning import is_known_gpu
from octavo.numerics import slots as spec
from octavo.ops.register import operator


def _begin_step_fake(lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    others = [torch.empty_like(lengths) for _ in range(3)]
    return torch.empty_like(lengths, dtype=torch.int64), others[0], others[1], others[2]


@operator(fake=_begin_step_fake)
def begin_step(
    active: Tensor, lengths: Tensor, group_of: Tensor, prefix_lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return, for each slot: its token's position (int64); its place, position in the suffix, length seen (int32).

    `active[T]`: bool. `lengths[T]`, `group_of[T]`, `prefix_lengths[groups]`: int32.
    """
    if _has_kernels(active):
        from octavo.kernels import slots as kernels  # brings Triton

        return kernels.begin_step(active, lengths, group_of, prefix_lengths)
    return spec.begin_step(active, lengths, group_of, prefix_lengths)


def _nothing() -> None:
    """Result of an operator that writes to its arguments."""


@operator(mutates=("tokens", "logprobs", "newest", "lengths", "active"), fake=_nothing)
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
    """Append `token[T]` (int64) with `logprob[T]` to `tokens` and `logprobs[T, L]`; count, and end what is complete."""
    if _has_kernels(tokens):
        from octavo.kernels import slots as kernels

        return kernels.end_step_(tokens, logprobs, newest, lengths, active, token, logprob, stops, limits)
    return spec.end_step_(tokens, logprobs, newest, lengths, active, token, logprob, stops, limits)


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and is_known_gpu(x.device, fp8=False)
