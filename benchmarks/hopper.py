"""Compilation of a Triton kernel for a Hopper GPU on a machine without one: for `registers.py` and `tests/kernels`."""

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

HOPPER = GPUTarget("cuda", 90, 32)
OPTIONS = ("num_warps", "maxnreg", "num_stages", "launch_pdl", "enable_fp_fusion")
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def compile_for_hopper(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """Compile what `kernel[grid](*args, **constants)` would launch; tensors count by dtype, and as aligned."""
    options = {name: constants[name] for name in OPTIONS if name in constants}
    constants = {name: value for name, value in constants.items() if name not in options}
    given = dict(zip([name for name in kernel.arg_names if name not in constants], args, strict=True))
    constants |= {name: value for name, value in given.items() if value is None}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = given.get(name)
        if name in constants:
            signature[name] = "constexpr"
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=HOPPER, options=options)
