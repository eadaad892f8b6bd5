"""A few kernels compile to the PTX on record; `python -m tests.golden.ptx` compares all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

RECORDED = json.loads((Path(__file__).parent / "ptx.json").read_text())
SAMPLE = (
    "quantize delayed x rows bfloat16 nearest",
    "quantize mx x columns bfloat16 nearest",
    "gated quantize delayed silu (256, 256) bfloat16 nearest",
    "gated low rank gelu_tanh 256 without adapters",
    "adapters add residual bfloat16",
    "transpose (256, 256)",
    "dequantize (256, 256) by (256, 1) to torch.bfloat16",
)


# 5 s of CPU when Triton's cache is empty
@pytest.mark.skipif(
    triton.__version__ != RECORDED["triton"], reason=f"PTX was recorded with Triton {RECORDED['triton']}"
)
def test_kernels_are_as_recorded():
    """Interpreted in this process: compiled in another."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.golden.ptx", *SAMPLE]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, f"other PTX than recorded (python -m tests.golden.ptx):\n{run.stdout}\n{run.stderr}"
