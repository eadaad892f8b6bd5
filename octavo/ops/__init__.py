"""The operations that layers call, and the one place that chooses how they run.

Every operator runs the specification in `octavo/numerics` on every device; on a GPU with FP8 tensor cores the kernels
in `octavo/kernels` take its place where they can.
"""

from octavo.ops.gemm import ProductSpec, gemm_nt, multiply
from octavo.ops.quantize import pack_scale, quantize, quantize_group
from octavo.ops.register import check_values

__all__ = ["ProductSpec", "check_values", "gemm_nt", "multiply", "pack_scale", "quantize", "quantize_group"]
