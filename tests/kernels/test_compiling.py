"""What Triton makes of the kernels for a Hopper GPU, found out without one."""

import json
import os
import subprocess
import sys

import pytest

from octavo.kernels.tuning import HOPPER


# 45 s of CPU when Triton's cache is empty; 4 s after that
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_tiles_are_transposed_in_16_bits(dtype):
    """FP8 bytes transposed next to another store are wrong on Hopper (triton-lang/triton#11111): NaN in training."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiling", dtype, "nearest"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert {k["kernel"] for k in kernels} >= {
        "tensor_kernel",
        "scaled_kernel",
        "block_kernel",
        "gated_backward_kernel",
        "_mask_kernel",
        "rows_kernel",
        "columns_kernel",
        "whole_columns_kernel",
        "adamw_kernel",
        "norm_backward_kernel",
        "rotary_backward_kernel",
        "decode_kernel",
        "merge_kernel",
        "store_kernel",
        "rotary_and_store_kernel",
    }
    assert sum(k["conversions"] for k in kernels) > 0  # else this looks for the wrong thing
    assert not [k for k in kernels if k["bytes_turned"]]
    assert not [(k["kernel"], k["shared"]) for k in kernels if k["shared"] > HOPPER.shared_memory]
    # An addition of bytes in pairs, one of each pair undefined, was left out: half of the 4-bit codes were wrong.
    assert not [(k["kernel"], k["unwritten"]) for k in kernels if k["unwritten"]]
    # A kernel that may begin early touches no memory before it has waited, once; but for columns in blocks, which need
    # nothing of what is before them, and wait at their end.
    early = [k for k in kernels if k["may_wait"]]
    in_16_bits = {"lay_out_kernel", "products_kernel", "parts_kernel", "choose_kernel"}
    in_16_bits |= {"project_kernel", "whole_rows_kernel"}
    in_16_bits |= {"begin_step_kernel", "end_step_kernel"}
    few_tokens = in_16_bits if dtype == "bfloat16" else set()
    quantizing = {"rows_kernel", "amax_kernel", "scaled_kernel", "columns_kernel"}
    decoding = {"decode_kernel", "merge_kernel", "store_kernel", "rotary_and_store_kernel"}
    assert {k["kernel"] for k in early} == quantizing | few_tokens | decoding
    # LLVM copies the wait of `products_kernel` into its two branches.
    assert all(len(k["waits"]) == bool(k["may_wait"]) for k in kernels if k["kernel"] != "products_kernel")
    assert all(k["waits"] for k in early)
    assert all((max(k["waits"]) > 0) is k["needs_nothing"] for k in early if not k["reads_weights"])
    # Those for one token read weights first, which the launch in front of them does not write, and nothing else.
    weights = {"a0_ptr", "a1_ptr", "a2_ptr", "scale_ptr", "bias_ptr", "b0_ptr", "b1_ptr", "b2_ptr"}
    assert not [k for k in early if k["reads_weights"] and k["stores_first"]]
    read = {name for k in early if k["reads_weights"] for name in k["read_before_waiting"]}
    assert read <= weights and (read == weights or dtype != "bfloat16")
