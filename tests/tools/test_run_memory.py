"""Memory of a run, measured against planned: on the terminal and on the page."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from octavo.optim.step_memory import GIB, StepMemory
from octavo.tools.html_report import write_report
from octavo.tools.plan.request import Request
from octavo.tools.plan.run import make_plan
from octavo.tools.run_memory import planned_memory, run_memories, show_memory
from octavo.training.settings import settings_from_options

ROW = {"step": 1, "loss": 5.0, "lr": 1e-3, "grad_norm": 1.0, "skipped": False, "tokens": 64, "tokens_per_s": 9.0}


def config(**options: Any) -> dict[str, Any]:
    return settings_from_options({"size": "tiny", "micro_batches": 1, **options}).to_dict()


def write_run(folder: Path, memory: StepMemory | None, **options: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config(**options)))
    (folder / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    (folder / "summary.json").write_text(json.dumps({"fp8": {"memory": memory and memory.to_dict()}}))
    return folder


def shown(folder: Path) -> str:
    file = io.StringIO()
    show_memory(folder, Console(file=file, width=120))
    return file.getvalue()


def on_gpu() -> StepMemory:
    planned = planned_memory(config())
    assert planned is not None and planned.peak is not None
    return replace(planned, device="cuda:0", peak=round(1.05 * planned.peak))


@pytest.mark.parametrize(
    ("precision", "fused", "name"),
    [
        ("fp8", False, "FP8 autocast"),
        ("fp8", True, "FP8 fused"),
        ("bf16", False, "BF16 autocast"),
        ("fp32", False, "FP32"),
    ],
)
def test_a_run_is_planned_as_the_command_would(precision: str, fused: bool, name: str) -> None:
    options = {"precision": precision, "fused": fused, "compile": fused, "device": "cpu"}
    planned = planned_memory(config(**options, optimizer="adamw", batch=3, seq=64))
    wanted = next(
        m for m in make_plan(Request("bdh-tiny", batch=3, seq=64)).memories if m.option.name == f"{name}, adamw"
    )
    assert planned is not None and planned.peak == wanted.peak.total
    assert planned.gradients == planned.weights == planned.states // 2


def test_micro_batches_keep_gradients() -> None:
    one, two = (planned_memory(config(micro_batches=n, seq=512)) for n in (1, 2))
    assert one is not None and two is not None and one.peak is not None and two.peak == one.peak + one.gradients


@pytest.mark.parametrize(
    "changes",
    [
        {"emulated": True},
        {"fp8": {"granularity": "block"}},
        {"model": "other"},
        {"shape": None},
        {"compile": True},
        {"compile": True, "fused": True, "precision": "bf16"},  # what a fused run is compared with
    ],
)
def test_what_the_plan_does_not_know(changes: dict[str, Any]) -> None:
    values = {**config(), **changes}
    assert planned_memory({key: value for key, value in values.items() if value is not None}) is None


def test_measured_against_planned(tmp_path: Path) -> None:
    write_run(tmp_path, on_gpu())
    text = shown(tmp_path)
    assert "fp8, planned" in text and "activations and temporary" in text
    assert "measured +5.0%" in text and "not measured" not in text
    page = write_report(tmp_path).read_text("utf-8")
    assert "Memory of a step" in page and "fp8, planned" in page and "measured +5.0%" in page
    assert "<dt>Peak memory, FP8</dt>" in page


def test_a_cpu_says_that_it_does_not_measure(tmp_path: Path) -> None:
    write_run(tmp_path, replace(on_gpu(), device="cpu", peak=None))
    text = shown(tmp_path)
    assert "The peak is not measured on cpu" in text and "planned" not in text
    page = write_report(tmp_path).read_text("utf-8")
    assert "<dt>Peak memory, FP8</dt><dd>not measured" in page


def test_runs_without_it_have_a_page_too(tmp_path: Path) -> None:
    write_run(tmp_path, None)
    assert shown(tmp_path) == "" and "Memory of a step" not in write_report(tmp_path).read_text("utf-8")
    (tmp_path / "summary.json").unlink()
    assert "Memory of a step" not in write_report(tmp_path).read_text("utf-8")
    assert run_memories(config(), {"fp8": {"final_loss": 1.0}}) == []


def test_both_precisions_side_by_side(tmp_path: Path) -> None:
    memories = {name: {"memory": replace(on_gpu(), peak=GIB).to_dict()} for name in ("fp8", "bf16")}
    write_run(tmp_path, None)
    (tmp_path / "summary.json").write_text(json.dumps(memories))
    heading = next(line for line in shown(tmp_path).splitlines() if "fp8" in line)
    assert [word.strip() for word in heading.strip("┃").split("┃")[1:]] == [
        "fp8",
        "fp8, planned",
        "bf16",
        "bf16, planned",
    ]
