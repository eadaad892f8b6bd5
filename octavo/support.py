"""Can this device run FP8 matrix products?"""

from dataclasses import dataclass
from functools import cache

import torch

from octavo.numerics import FP8TrainingConfig

MINIMUM_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0, Blackwell 10.0 and 12.0
INSTEAD = (
    "emulation (the same numerics, slower), "
    "or BF16 with the 4-bit optimiser (octavo train --precision bf16 --optimizer adamw4bit)"
)


@dataclass(frozen=True)
class FP8Support:
    """True where FP8 tensor cores can be used; prints what was found and what to do instead."""

    supported: bool
    device: str
    reason: str

    def __bool__(self) -> bool:
        return self.supported

    def __str__(self) -> str:
        if self.supported:
            return f"FP8 supported on {self.device}: {self.reason}"
        return f"FP8 not supported on this GPU: {self.reason}. Instead: {INSTEAD}"


@cache
def has_fp8_tensor_cores(device: torch.device) -> bool:
    """`check_fp8_support` as a fact that does not change: asked for every product."""
    return bool(check_fp8_support(device))


def require_tensor_cores(device: torch.device | str | None, config: FP8TrainingConfig) -> None:
    """Raise where `config.emulate=False` cannot be kept: no FP8 tensor cores here."""
    if config.emulate is False:
        support = check_fp8_support(device)
        if not support:
            raise RuntimeError(f"emulate=False: {support}")


def check_fp8_support(device: torch.device | str | int | None = None) -> FP8Support:
    """Look at a device (the current CUDA device if not given)."""
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda" or not torch.cuda.is_available():
        where = "no CUDA device is visible" if device.type == "cuda" else f"{device.type} has no FP8 tensor cores"
        return FP8Support(False, device.type, where)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        # MI300 has FP8 tensor cores, but nothing here has been run on one: kernels and formats are NVIDIA's.
        reason = f"architecture {properties.gcnArchName}; the kernels are for GPUs of NVIDIA's"
        return FP8Support(False, properties.name, reason)
    capability = (properties.major, properties.minor)
    found = capability >= MINIMUM_CAPABILITY
    reason = f"compute capability {capability[0]}.{capability[1]}" + ("" if found else "; 8.9 or newer is needed")
    return FP8Support(found, properties.name, reason)
