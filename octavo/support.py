"""Can this device run FP8 matrix products?"""

import logging
from dataclasses import dataclass
from functools import cache

import torch

from octavo.numerics import FP8TrainingConfig

MINIMUM_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0, Blackwell 10.0 and 12.0
INSTEAD = (
    "emulation (the same numerics, slower), "
    "or BF16 with the 4-bit optimiser (octavo train --precision bf16 --optimizer adamw4bit)"
)

logger = logging.getLogger("octavo")
_announced: set[str] = set()


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


def emulation_on(device: torch.device | str, emulate: bool | None) -> str:
    """One line that says FP8 is emulated on this device, and why; empty where it is not, or nothing runs (`meta`)."""
    device = torch.device(device)
    if device.type == "meta" or (emulate is not True and has_fp8_tensor_cores(device)):
        return ""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else device.type
    why = "emulate=True" if emulate else "no FP8 tensor cores"
    return f"emulated on {where}: {why}; same numerics, slower"


def announce_emulation(device: torch.device | str, emulate: bool | None) -> None:
    """Log that line: once for each kind of device, and not where emulation was asked for."""
    line = "" if emulate else emulation_on(device, emulate)
    if line and line not in _announced:
        _announced.add(line)
        logger.warning("FP8 is %s", line)


def leave_emulation_unannounced(device: torch.device | str) -> None:
    """For a caller that says it in its own way."""
    _announced.add(emulation_on(device, None))


def require_tensor_cores(device: torch.device | str | None, config: FP8TrainingConfig) -> None:
    """Raise where `config.emulate=False` cannot be kept: no FP8 tensor cores here. On `meta` nothing runs yet."""
    device = torch.device("cuda" if device is None else device)
    if config.emulate is False and device.type != "meta" and not has_fp8_tensor_cores(device):
        raise RuntimeError(f"emulate=False: {check_fp8_support(device)}")


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
