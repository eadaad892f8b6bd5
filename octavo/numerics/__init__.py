"""The meaning of FP8 in plain PyTorch, on any device: the specification that every kernel is tested against."""

from octavo.numerics.config import FP8TrainingConfig, OperandRecipe, Recipe
from octavo.numerics.formats import E4M3, E4M3_FNUZ, E5M2, E5M2_FNUZ, Format, get_format
from octavo.numerics.gemm import gemm_nt, padded_gemm_nt
from octavo.numerics.quantize import Quantized, compute_scale, dequantize, quantize, quantize_stochastic
from octavo.numerics.scaling import FP8ScalingManager

__all__ = [
    "E4M3",
    "E4M3_FNUZ",
    "E5M2",
    "E5M2_FNUZ",
    "FP8ScalingManager",
    "FP8TrainingConfig",
    "Format",
    "OperandRecipe",
    "Quantized",
    "Recipe",
    "compute_scale",
    "dequantize",
    "gemm_nt",
    "get_format",
    "padded_gemm_nt",
    "quantize",
    "quantize_stochastic",
]
