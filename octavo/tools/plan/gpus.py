"""GPUs by name, and the largest batch and the longest sequence that fit one.

A plan counts tensors. A process takes more: CUDA's context and libraries, and memory that torch's allocator has
reserved but not handed out. On an H200, training an 8B: 0.75 GiB, and 2.3 % of the tensors' peak
(`benchmarks/results/2026-11-15-h200-load.json`); 5 % are added here, to cover variation between runs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from octavo.tools.plan.memory import plan_memory
from octavo.tools.plan.options import Option
from octavo.tools.plan.request import with_batch, with_sequence
from octavo.tools.plan.timeline import GIB
from octavo.tools.shapes import Case
from octavo.training.errors import UserError

CONTEXT_GIB = 0.75
RESERVED = 1.05  # torch's reserved memory for each byte of tensors
MOST = 2**16  # sequences; nobody asks for more
STRIDE = 128  # a longest sequence is a multiple of it, or all of the model's positions


@dataclass(frozen=True)
class Gpu:
    name: str
    gib: float
    has_fp8: bool = True

    @property
    def room(self) -> float:
        """GiB available for tensors."""
        return max(self.gib - CONTEXT_GIB, 0.0) / RESERVED


# GiB as torch reports them, rounded down.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200", 178.0),
        Gpu("h200", 139.0),
        Gpu("h100", 79.0),
        Gpu("l40s", 44.0),
        Gpu("rtx5090", 31.0),
        Gpu("rtx4090", 23.5),
        Gpu("l4", 22.0),
        Gpu("a100", 79.0, has_fp8=False),
        Gpu("a100-40gb", 39.0, has_fp8=False),
        Gpu("rtx3090", 23.5, has_fp8=False),
    )
}


def find_gpu(text: str) -> Gpu:
    """Return a GPU by name, or one with FP8 by its GiB."""
    name = text.strip().lower().replace(" ", "")
    if name in GPUS:
        return GPUS[name]
    try:
        gib = float(name.removesuffix("gib"))
    except ValueError as error:
        raise UserError(f"--gpu {text}: GiB of memory such as 24, or one of {', '.join(GPUS)}") from error
    if not (math.isfinite(gib) and gib > 0):
        raise UserError(f"--gpu {text}: GiB of memory, a number above 0")
    return Gpu(f"{gib:g} GiB", gib)


def fits(case: Case, option: Option, gpu: Gpu) -> bool:
    return plan_memory(case, option).peak.total <= gpu.room * GIB


def largest_batch(case: Case, option: Option, gpu: Gpu) -> int:
    """Return the largest batch, in sequences; 0 if not even one fits."""
    return _most(lambda batch: fits(with_batch(case, batch), option, gpu), MOST)


def longest_sequence(case: Case, option: Option, gpu: Gpu) -> int:
    """Return the longest sequence, in tokens, of a step of one; 0 if none fits. Limited by the model's positions."""
    positions = case.config.get("max_position_embeddings") or MOST * STRIDE
    if fits(with_sequence(case, positions), option, gpu):
        return int(positions)
    return STRIDE * _most(lambda n: fits(with_sequence(case, n * STRIDE), option, gpu), positions // STRIDE)


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to `limit` that fits, given that all smaller ones do."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
