"""The operator that draws a token for each row of logits (`numerics/sampling.py`), in a CUDA graph if wanted."""

import torch
from torch import Tensor

from octavo.kernels.tuning import is_known_gpu
from octavo.numerics import sampling as spec
from octavo.ops.register import operator


def has_kernel(logits: Tensor) -> bool:
    """Whether a kernel draws from these logits. Elsewhere torch's own generator is faster than the specification."""
    if not logits.is_cuda or not is_known_gpu(logits.device, fp8=False):
        return False
    from octavo.kernels import sampling as kernels  # brings Triton

    return kernels.can_sample(logits)


def sample(logits: Tensor, temperature: Tensor, seed: Tensor, *, greedy: bool = False) -> tuple[Tensor, Tensor]:
    """Return a token (int64) for each row of FP32 `logits[T, V]`, and its log-probability (FP32).

    `temperature[]`: FP32, above 0. `seed[1]`: int64; with it, noise depends on the place of an element alone, so draw
    another for every call. `greedy`: the likeliest tokens, and log-probabilities of temperature 1.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.shape[1]:
        raise ValueError(f"logits {tuple(logits.shape)} in {logits.dtype}: give [rows, vocabulary] in torch.float32")
    if temperature.dtype != torch.float32 or temperature.numel() != 1:
        raise ValueError(f"temperature {tuple(temperature.shape)} in {temperature.dtype}: give one of torch.float32")
    if seed.dtype != torch.int64 or seed.numel() != 1:
        raise ValueError(f"seed {tuple(seed.shape)} in {seed.dtype}: give one of torch.int64")
    return _sample(logits, temperature, seed, greedy)


def _sample_fake(logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape[:1], dtype=torch.int64), logits.new_empty(logits.shape[:1])


@operator(fake=_sample_fake)
def _sample(logits: Tensor, temperature: Tensor, seed: Tensor, greedy: bool) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities; see `sample`."""
    if has_kernel(logits):
        from octavo.kernels import sampling as kernels

        return kernels.sample(logits, temperature, seed, greedy)
    return spec.sample(logits, temperature, seed, greedy)
