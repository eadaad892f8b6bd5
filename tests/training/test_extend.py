"""Runs that go on after their end, and runs that end badly: both leave a folder that is whole."""

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
from run_cases import curve, rows, run
from test_loop import interrupt_at

from octavo.tools.html_report import write_report
from octavo.training.checkpoint import list_checkpoints
from octavo.training.errors import UserError
from octavo.training.run_folder import read_settings
from octavo.training.signals import Interrupted


def test_a_finished_run_is_extended(make_settings: Any, tmp_path: Path) -> None:
    """The first steps stay as they were; the others have the rates of the longer run."""
    run(make_settings(steps=5), tmp_path / "short")
    before = curve(tmp_path / "short")
    run(make_settings(steps=9), tmp_path / "short", resume=True)
    after, long = curve(tmp_path / "short"), make_settings(steps=9)
    assert after[:5] == before and len(after) == 9
    assert [row[2] for row in after[5:]] == [long.learning_rate(step) for step in range(6, 10)]
    assert read_settings(tmp_path / "short").steps == 9
    assert run(make_settings(steps=9), tmp_path / "short", resume=True).results["fp8"].final_loss == after[-1][1]


def test_an_extension_stopped_and_resumed_has_the_same_curve(
    make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("whole", "parts"):
        run(make_settings(steps=5, dropout=0.2), tmp_path / name)
    run(make_settings(steps=10, dropout=0.2), tmp_path / "whole", resume=True)
    interrupt_at(monkeypatch, 8, signal.SIGTERM)
    with pytest.raises(Interrupted):
        run(make_settings(steps=10, dropout=0.2), tmp_path / "parts", resume=True)
    monkeypatch.undo()
    run(read_settings(tmp_path / "parts"), tmp_path / "parts", resume=True)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


def test_a_run_on_its_way_keeps_its_end(make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, 4, signal.SIGTERM)
    with pytest.raises(Interrupted):
        run(make_settings(compare=True), tmp_path / "run")
    monkeypatch.undo()
    for steps in (6, 9):
        with pytest.raises(UserError, match=f"with steps={steps}: it was started with 8, .* finish it with --steps 8"):
            run(make_settings(steps=steps), tmp_path / "run", resume=True)
    interrupt_at(monkeypatch, 1, signal.SIGTERM)
    run(make_settings(), tmp_path / "run", resume=True)
    monkeypatch.undo()
    interrupt_at(monkeypatch, 3, signal.SIGTERM)
    with pytest.raises(Interrupted):
        run(make_settings(compare=True), tmp_path / "run", resume=True)
    assert list_checkpoints(tmp_path / "run" / "bf16")[-1].name == "checkpoint-000003"
    with pytest.raises(UserError, match=r"bf16/checkpoint-000003 with steps=9"):  # before FP8 trains its ninth step
        run(make_settings(compare=True, steps=9), tmp_path / "run", resume=True)
    assert len(rows(tmp_path / "run")) == 8 and read_settings(tmp_path / "run").steps == 8


def test_a_comparison_is_extended_in_both_precisions(make_settings: Any, tmp_path: Path) -> None:
    run(make_settings(steps=4, compare=True), tmp_path / "run")
    run(make_settings(steps=6, compare=True), tmp_path / "run", resume=True)
    assert len(rows(tmp_path / "run")) == len(rows(tmp_path / "run", "metrics_bf16.jsonl")) == 6


@pytest.mark.parametrize("precision", ["fp8", "fp32"])
def test_a_run_that_diverges_in_its_last_steps_has_a_summary_and_a_report(
    make_settings: Any, tmp_path: Path, precision: str
) -> None:
    """The first update takes the weights out of reach: no later loss is finite, and there is nothing to sample from."""
    settings = make_settings(precision=precision, lr=1e30, warmup=0, steps=4)
    result = run(settings, tmp_path / "run")
    assert result.diverged == [precision]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary[precision]["final_loss"] is None and summary[precision]["held_out_loss"] is None
    assert math.isnan(result.results[precision].held_out_loss)
    assert not (tmp_path / "run" / "sample.json").exists()
    page = write_report(tmp_path / "run").read_text("utf-8")
    assert "ended at step 4 without a finite loss" in page
