"""GPUs by name, and the memory that a plan may use of each. Imports no torch: `octavo plan --help` names them.

A plan counts tensors. A process takes more: CUDA's context and libraries, and memory that torch's allocator has
reserved but not handed out. On an H200, training an 8B: 0.75 GiB, and 2.3 % of the tensors' peak
(`benchmarks/results/2026-11-15-h200-load.json`); 5 % are added here, to cover variation between runs.
"""

import math
from dataclasses import dataclass

from octavo.training.errors import UserError

CONTEXT_GIB = 0.75
RESERVED = 1.05  # torch's reserved memory for each byte of tensors
FP8_CAPABILITY = (8, 9)  # as `octavo/support.py` has it


@dataclass(frozen=True)
class Gpu:
    """A GPU to plan for: its memory in GiB, and the compute capability by which `kernels/tuning.py` finds its rates."""

    name: str
    gib: float
    capability: tuple[int, int]

    @property
    def has_fp8(self) -> bool:
        return self.capability >= FP8_CAPABILITY

    @property
    def room(self) -> float:
        """GiB available for tensors."""
        return max(self.gib - CONTEXT_GIB, 0.0) / RESERVED


# GiB as torch reports them, rounded down.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200", 178.0, (10, 0)),
        Gpu("h200", 139.0, (9, 0)),
        Gpu("h100", 79.0, (9, 0)),
        Gpu("l40s", 44.0, (8, 9)),
        Gpu("rtx5090", 31.0, (12, 0)),
        Gpu("rtx4090", 23.5, (8, 9)),
        Gpu("l4", 22.0, (8, 9)),
        Gpu("a100", 79.0, (8, 0)),
        Gpu("a100-40gb", 39.0, (8, 0)),
        Gpu("rtx3090", 23.5, (8, 6)),
    )
}


def find_gpu(text: str) -> Gpu:
    """Return a GPU by name, or by its GiB one with FP8, whose rates are those that were measured: Hopper's."""
    name = text.strip().lower().replace(" ", "")
    if name in GPUS:
        return GPUS[name]
    try:
        gib = float(name.removesuffix("gib"))
    except ValueError as error:
        raise UserError(f"--gpu {text}: GiB of memory such as 24, or one of {', '.join(GPUS)}") from error
    if not (math.isfinite(gib) and gib > 0):
        raise UserError(f"--gpu {text}: GiB of memory, a number above 0")
    return Gpu(f"{gib:g} GiB", gib, (9, 0))
