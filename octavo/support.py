"""FP8 support of a device."""

import logging
from dataclasses import dataclass
from functools import cache

import torch

from octavo.numerics import FP8TrainingConfig
from octavo.tracing import constant_when_traced

MINIMUM_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0, Blackwell 10.0 and 12.0
INSTEAD = (
    "emulation (the same numerics, slower), "
    "or BF16 with the 4-bit optimiser (octavo train --precision bf16 --optimizer adamw4bit)"
)

logger = logging.getLogger("octavo")
_announced: set[str] = set()


@dataclass(frozen=True)
class FP8Support:
    """Result of `check_fp8_support`: true if the device has FP8 tensor cores; printed, it names the alternatives."""

    supported: bool
    device: str
    reason: str

    def __bool__(self) -> bool:
        return self.supported

    def __str__(self) -> str:
        if self.supported:
            return f"FP8 supported on {self.device}: {self.reason}"
        return f"FP8 not supported on this GPU: {self.reason}. Instead: {INSTEAD}"


@constant_when_traced
def is_deterministic() -> bool:
    """Return whether the user has asked torch for deterministic algorithms, and not for warnings alone."""
    # Dynamo cannot trace both questions. What is compiled is guarded by the setting in any case.
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


@cache
def has_fp8_tensor_cores(device: torch.device) -> bool:
    """Return a cached `check_fp8_support`, since every product asks."""
    return bool(check_fp8_support(device))


def emulation_on(device: torch.device | str, emulate: bool | None) -> str:
    """Return a line that says that FP8 is emulated on this device and why; empty if it is not, or on `meta`."""
    device = torch.device(device)
    if device.type == "meta" or (emulate is not True and has_fp8_tensor_cores(device)):
        return ""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else device.type
    why = "emulate=True" if emulate else "no FP8 tensor cores"
    return f"emulated on {where}: {why}; same numerics, slower"


def announce_emulation(device: torch.device | str, emulate: bool | None) -> None:
    """Log that FP8 is emulated: once for each kind of device, and not where emulation was requested."""
    line = "" if emulate else emulation_on(device, emulate)
    if line and line not in _announced:
        _announced.add(line)
        logger.warning("FP8 is %s", line)


def leave_emulation_unannounced(device: torch.device | str) -> None:
    """Suppress `announce_emulation` for this device, for a caller that reports emulation itself."""
    _announced.add(emulation_on(device, None))


def require_tensor_cores(device: torch.device | str | None, config: FP8TrainingConfig) -> None:
    """Raise if `config.emulate` is False and the device has no FP8 tensor cores; `meta` computes nothing and passes."""
    device = torch.device("cuda" if device is None else device)
    if config.emulate is False and device.type != "meta" and not has_fp8_tensor_cores(device):
        raise RuntimeError(f"emulate=False: {check_fp8_support(device)}")


def check_fp8_support(device: torch.device | str | int | None = None) -> FP8Support:
    """Check whether a device (default: the current CUDA device) can run FP8 matrix products."""
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
    has_fp8 = capability >= MINIMUM_CAPABILITY
    reason = f"compute capability {capability[0]}.{capability[1]}" + ("" if has_fp8 else "; 8.9 or newer is needed")
    return FP8Support(has_fp8, properties.name, reason)
