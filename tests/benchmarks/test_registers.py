"""The script that looks at compiled kernels; and with it, at some that were launched with more programs than fit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "benchmarks/registers.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment | {"COLUMNS": "150"})


def test_kernels_that_did_not_fit(tmp_path: Path) -> None:
    actual = run("block g columns", "mx swiglu backward", "--sass", str(tmp_path))
    assert actual.returncode == 0, actual.stdout + actual.stderr
    for kernel in ("columns_kernel", "_backward_rows_kernel", "whole_columns_kernel"):
        assert kernel in actual.stdout
    assert len(list(tmp_path.glob("*.sass"))) == 3


def test_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import registers

    with pytest.raises(SystemExit):
        registers.main(["--help"])
    assert "registers" in capsys.readouterr().out
