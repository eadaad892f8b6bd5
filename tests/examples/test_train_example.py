"""`examples/train.py` runs as it stands, and its constants follow the environment."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "train.py"


def run_here(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What it prints in this process, which has imported torch."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("variables", "lines"),
    [
        ({}, ["FP8 training enabled with format: hybrid", "Using device: cpu with dtype torch.float32"]),
        (
            {
                "FP8_FORMAT": "E4M3",
                "COMPUTE_DTYPE": "bfloat16",
                "USE_4BIT_OPTIMIZER": "1",
                "FP8_AMAX_COMPUTE_ALGO": "ema",
            },
            ["FP8 training enabled with format: e4m3", "Using device: cpu with dtype torch.bfloat16"],
        ),
        ({"USE_FP8": "0"}, ["Using device: cpu with dtype torch.float32"]),
    ],
)
def test_it_runs(
    variables: dict[str, str], lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {
        "MAX_STEPS": "2",
        "BATCH_SIZE": "1",
        "SEQUENCE": "16",
        "SAMPLE_BYTES": "3",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    if variables:
        output = run_here({**small, **variables}, monkeypatch, capsys)
    else:
        result = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env={**os.environ, **small})
        assert result.returncode == 0, result.stderr
        output = result.stdout
    assert output.splitlines()[: len(lines)] == lines
    assert "step    1  loss 5." in output and "def " in output
    assert ("in FP8" in output) == ("USE_FP8" not in variables)
