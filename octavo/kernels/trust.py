"""Kernels compiled by a Triton that was not tested are compared with the specification before anything relies on them.

Triton and ptxas have made wrong code of these kernels before (docs/LOG.md; triton-lang/triton#11111): FP8 bytes that
change hands between threads, NaN in some runs and not in others. Versions in `TESTED` have passed `tests/gpu`. Any
other quantises a few matrices first, several times over, in the layouts and by the functions that went wrong then.
"""

import logging
from functools import cache

import torch
import triton
from torch import Tensor

from octavo.kernels import gated, quantize
from octavo.numerics import FP8TrainingConfig, Quantized
from octavo.numerics import operand as spec
from octavo.numerics.activation import gated_backward
from octavo.numerics.config import RECIPES
from octavo.numerics.scaling import new_states

TESTED = ("3.6",)
SHAPES = ((256, 256), (250, 130))  # whole tiles, and edges
TIMES = 3
_DIFFERENT = 0.001  # the share of bytes in which a fused kernel may be off, by one step

logger = logging.getLogger("octavo")


@cache
def require_right_kernels(device: torch.device) -> None:
    """Raise if the installed Triton is not tested, and makes kernels that do not compute what they should."""
    version = triton.__version__
    if ".".join(version.split(".")[:2]) in TESTED:
        return
    logger.warning("Triton %s: Octavo's kernels were tested with %s; comparing them first", version, ", ".join(TESTED))
    wrong = [name for _ in range(TIMES) for name in _wrong_kernels(device)]
    if wrong:
        raise RuntimeError(
            f"Triton {version} compiles Octavo's kernels wrongly: {', '.join(dict.fromkeys(wrong))} differ from the "
            f"specification. Install a torch that brings Triton {TESTED[-1]} (2.11), or compute by the specification, "
            "slowly: FP8TrainingConfig(emulate=True)"
        )


def _wrong_kernels(device: torch.device) -> list[str]:
    """The names of those that differ."""
    wrong = []
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(shape, device=device).to(dtype)
            for name in RECIPES:
                recipe = FP8TrainingConfig.from_recipe(name).recipe.g
                if not quantize.can_quantize([x], recipe):
                    continue
                mine, theirs = new_states(2, device=device)
                quantized = quantize.quantize_operand(x, mine, recipe, layout="both")
                expected = spec.quantize_operand(x, theirs, recipe, layout="both")
                if not all(_alike(*pair, 0.0) for pair in zip(quantized, expected, strict=True)):
                    wrong.append(f"quantize {name}")
            wrong += _wrong_gated(x)
    return wrong


def _wrong_gated(gate_up: Tensor) -> list[str]:
    recipe = FP8TrainingConfig().recipe
    dh = gate_up[:, : gate_up.shape[1] // 2].flip(1).contiguous()
    mine, theirs = new_states(2, device=gate_up.device)
    one = torch.ones((), device=gate_up.device)
    # A scale that is given: an amax off by one step of BF16 would move every value.
    mine[0] = theirs[0] = 2.0**-10
    quantized = gated.gated_quantize_backward(dh, gate_up, one, mine, recipe.g, recipe.x, "silu")[:2]
    expected = spec.quantize_operand(gated_backward(dh, gate_up, "silu"), theirs, recipe.g, layout="both")
    alike = all(_alike(*pair, _DIFFERENT) for pair in zip(quantized, expected, strict=True))
    return [] if alike else ["gated_quantize_backward"]


def _bytes_of(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8) if scale.element_size() == 1 else scale


def _alike(mine: Quantized, expected: Quantized, share: float) -> bool:
    same_scale = torch.equal(_bytes_of(mine.scale), _bytes_of(expected.scale))
    different = mine.data.view(torch.uint8) != expected.data.view(torch.uint8)
    return same_scale and bool(different.sum() <= share * different.numel())
