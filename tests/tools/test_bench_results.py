"""The bench's result files, its tables and its plot."""

import json
from pathlib import Path

import pytest
from bench_cases import preset

from octavo.tools.bench.contenders import Contender
from octavo.tools.bench.plot import write_plot
from octavo.tools.bench.result import add_figures, fail_row, missing_row, new_row, write_result
from octavo.tools.bench.table import markdown


def result_of(rows: list[dict]) -> dict:
    case = preset("tiny")
    add_figures(rows, case, {"bf16": 1.0, "fp8": None})
    return {
        "kind": "step",
        "date": "2026-11-15",
        "device": "NVIDIA H200",
        "versions": {"octavo": "0.1.0", "torch": "2.11.0"},
        "command": "octavo bench --preset tiny",
        "case": case.to_dict(),
        "rows": rows,
    }


@pytest.fixture
def result() -> dict:
    row = new_row(Contender("octavo delayed", "octavo", True, "delayed"))
    rates = {"x": {"underflow_max": 0.001, "saturated_max": 0.0}, "g": {"underflow_max": 0.02, "saturated_max": 0.0}}
    row["turns"] = [{"times": [0.1], "peak_gib": None, "loss": 1.0, "scaling": rates}]
    wrong = new_row(Contender("octavo mx", "octavo", True, "mx"))
    fail_row(wrong, "wrong", "gradient cosine 0.1 | <nan>")
    return result_of([row, wrong, missing_row("te", "not installed")])


def test_result_files_do_not_replace_each_other(result, tmp_path: Path):
    names = [write_result(result, tmp_path / "results").name for _ in range(2)]
    assert names == ["2026-11-15-h200-tiny-2l.json", "2026-11-15-h200-tiny-2l-2.json"]
    assert json.loads((tmp_path / "results" / names[0]).read_text()) == result


def test_names_and_titles_tell_cases_apart(result, tmp_path: Path):
    cases = {
        "tiny-2l": ("tiny, 2 layers, 256 tokens a step (seq 64)", {}),
        "tiny-2l-512t": ("tiny, 2 layers, 512 tokens a step (seq 64)", {"tokens": 512}),
        "tiny-2l-lora32": ("tiny, 2 layers, LoRA of rank 32 on every linear, 256 tokens", {"mode": "lora"}),
        "tiny-2l-lora8-attention-512t": (
            "tiny, 2 layers, LoRA of rank 8 on q, k, v and o, 512 tokens",
            {"mode": "lora", "rank": 8, "targets": "attention", "tokens": 512},
        ),
        "tiny-2l-lora0": ("tiny, 2 layers, frozen, no adapters, 256 tokens", {"mode": "lora", "rank": 0}),
    }
    for name, (words, options) in cases.items():
        actual = {**result, "case": preset("tiny", **options).to_dict()}
        assert write_result(actual, tmp_path).name == f"2026-11-15-h200-{name}.json"
        assert f"**{words}" in markdown([actual])


def test_a_table_has_every_row(result):
    result["versions"]["octavo"] = "0.1.0+3a1f65f-dirty"  # the state of one working tree says nothing to a reader
    text = markdown([result, {"kind": "gemm"}])
    assert "NVIDIA H200, 2026-11-15, octavo 0.1.0, torch 2.11.0. `octavo bench --preset tiny`" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") - line.count("\\|") for line in table} == {9}
    assert [line.split(" | ")[0] for line in table[2:]] == ["| octavo delayed", "| octavo mx", "| te"]
    assert "100.0 (100.0–100.0)" in table[2] and "2.00%" in table[2] and "not run: not installed" in table[4]
    assert markdown([]) == ""


def test_a_table_leaves_out_where_the_result_was_written(result):
    result["versions"]["octavo"] = "not installed+3a1f65f"
    result["command"] = "octavo bench --out b --preset tiny"
    assert "2026-11-15, torch 2.11.0. `octavo bench --preset tiny`" in markdown([result])


def test_a_plot_or_a_line_that_says_why_not(result, tmp_path: Path):
    line = write_plot(result, tmp_path / "x.png")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert "matplotlib is not installed" in line and not (tmp_path / "x.png").exists()
    else:
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
