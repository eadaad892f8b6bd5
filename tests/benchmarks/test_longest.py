"""benchmarks/longest.py: the search, and what it expects; the rest needs a GPU."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def script(monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import longest

    return longest


@pytest.mark.parametrize("first", [0, 128, 1000, 7936, 20_000])
@pytest.mark.parametrize("limit", [0, 128, 1408, 7936, 8000])
def test_search(script, first, limit):
    tried = []

    def fits(length):
        assert length > 0 and length % 128 == 0
        tried.append(length)
        return length <= limit

    assert script.longest(fits, first) == limit // 128 * 128
    assert len(tried) < 50


def test_what_is_expected(script):
    case = script.make_case(
        preset="8b", config=None, layers=None, tokens=2**17, seq=2**17, seed=0, device="cpu", force=True, mode="lora"
    )
    bf16, fp8 = (script.planned(case, way, 24.0) for way in ("bf16", "channel"))
    assert 0 < bf16 < fp8 / 2


def test_without_a_gpu(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["--ways", "bf16,half"])
    assert "'half' is none of bf16" in capsys.readouterr().err
    assert sys.modules["longest"] is script
