"""The names that training scripts bring from elsewhere: change the import, keep the script."""

from octavo.convert import convert_to_fp8
from octavo.nn.autocast import fp8_autocast, get_fp8_autocast_context
from octavo.nn.functional import fp8_linear, fp8_matmul
from octavo.nn.linear import FP8Linear
from octavo.numerics import (
    FP8ScalingManager,
    FP8TrainingConfig,
    compute_scale,
    dequantize,
    quantize,
    quantize_stochastic,
)
from octavo.support import check_fp8_support
from octavo.training.trainer import FP8Trainer

__all__ = [
    "FP8Linear",
    "FP8ScalingManager",
    "FP8Trainer",
    "FP8TrainingConfig",
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
]
