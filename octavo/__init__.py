"""Octavo trains PyTorch models in FP8.

    import octavo

    report = octavo.convert_to_fp8(model)                   # linears in FP8, in place; print the report
    context = octavo.fp8_autocast()                         # or, for models that multiply raw parameters:
    with context:
        loss = model(batch)

`octavo.numerics` says what FP8 means, `octavo.nn` has the layers, `octavo train` is a job to start with.
"""

from typing import TYPE_CHECKING, Any

from octavo.convert import ConversionReport, convert_to_fp8, restore
from octavo.nn.autocast import FP8Autocast, fp8_autocast, get_fp8_autocast_context
from octavo.nn.linear import FP8Linear
from octavo.numerics import (
    E4M3,
    E4M3_FNUZ,
    E5M2,
    E5M2_FNUZ,
    FP8ScalingManager,
    FP8TrainingConfig,
    Quantized,
    compute_scale,
    dequantize,
    fp8_linear,
    fp8_matmul,
    quantize,
    quantize_stochastic,
)
from octavo.support import FP8Support, check_fp8_support
from octavo.training.trainer import FP8Trainer

if TYPE_CHECKING:
    from octavo.hf.callback import OctavoCallback as OctavoCallback

__version__ = "0.1.0"

__all__ = [
    "E4M3",
    "E4M3_FNUZ",
    "E5M2",
    "E5M2_FNUZ",
    "ConversionReport",
    "FP8Autocast",
    "FP8Linear",
    "FP8ScalingManager",
    "FP8Support",
    "FP8Trainer",
    "FP8TrainingConfig",
    "Quantized",
    "check_fp8_support",
    "compute_scale",
    "convert_to_fp8",
    "dequantize",
    "fp8_autocast",
    "fp8_linear",
    "fp8_matmul",
    "get_fp8_autocast_context",
    "quantize",
    "quantize_stochastic",
    "restore",
]


def __getattr__(name: str) -> Any:
    """`OctavoCallback` on first use: it imports transformers, which `import octavo` must not need."""
    if name == "OctavoCallback":
        from octavo.hf.callback import OctavoCallback

        return OctavoCallback
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
