"""A run that has too little memory, and what a run's memory is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import curve, run

from octavo.models import BDH
from octavo.training import checkpoint
from octavo.training.errors import RunError
from octavo.training.learner import Learner, Step


def run_out_of_memory(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """In the forward of step `number`, as torch would say it."""
    real = Learner.step

    def step(self: Learner, current: int) -> Step:
        if current == number:
            monkeypatch.setattr(self.model, "forward", fail)
        return real(self, current)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr(Learner, "step", step)


def test_out_of_memory_says_what_took_it_and_what_to_do(
    make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_out_of_memory(monkeypatch, 1)
    with pytest.raises(RunError) as caught:
        run(make_settings(), tmp_path / "run")
    text = str(caught.value)
    assert text.startswith("out of GPU memory: 2.0 GiB more were asked for")
    assert (
        "weights 0.0 MiB, gradients 0.0 MiB, optimiser states 0.0 MiB, activations and temporary not measured" in text
    )
    assert "--batch 1 --micro-batches 2" in text and "--optimizer adamw4bit" in text
    assert "no checkpoint yet" in text and caught.value.exit_code == 1


def test_out_of_memory_leaves_the_last_checkpoint_intact(
    make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(make_settings(), tmp_path / "whole")
    with monkeypatch.context() as patch:
        run_out_of_memory(patch, 5)
        with pytest.raises(RunError, match=r"the last checkpoint, .*checkpoint-000003, is intact: .*--resume --out"):
            run(make_settings(batch=2), tmp_path / "run")
    checkpoint.load_checkpoint(tmp_path / "run" / "checkpoint-000003", torch.device("cpu"))
    resumed = run(make_settings(), tmp_path / "run", resume=True)
    assert curve(resumed.folder) == curve(whole.folder)


def test_out_of_memory_while_saving_leaves_the_checkpoint_before(
    make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoint._state_bytes
    calls = []

    def state_bytes(state: Any) -> bytes:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(state)

    monkeypatch.setattr(checkpoint, "_state_bytes", state_bytes)
    with pytest.raises(RunError, match="checkpoint-000003, is intact"):
        run(make_settings(), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-000003"]
    checkpoint.load_checkpoint(tmp_path / "run" / "checkpoint-000003", torch.device("cpu"))


def test_out_of_memory_in_the_comparison_names_its_own_checkpoint(
    make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Learner.step

    def step(self: Learner, number: int) -> Step:
        if self.settings.precision == "bf16" and number == 4:
            raise torch.OutOfMemoryError
        return real(self, number)

    monkeypatch.setattr(Learner, "step", step)
    with pytest.raises(RunError, match=r"bf16/checkpoint-000003, is intact"):
        run(make_settings(compare=True), tmp_path / "run")


def test_a_model_that_does_not_fit_at_all(make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(BDH, "to", fail)
    with pytest.raises(RunError, match=r"before the first step: the model's [\d,]+ parameters take .* --size"):
        run(make_settings(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_memory_is_in_the_summary(make_settings: Any, tmp_path: Path) -> None:
    result = run(make_settings(compare=True), tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    size = 4 * make_settings().shape.parameter_count
    for precision in ("fp8", "bf16"):
        memory = result.results[precision].memory
        assert memory is not None and memory.to_dict() == summary[precision]["memory"]
        assert (memory.weights, memory.gradients, memory.states) == (size, size, 2 * size)
        assert memory.peak is None  # on a CPU nothing measures it
    again = run(make_settings(compare=True), tmp_path / "run", resume=True)
    assert again.results["fp8"].memory == result.results["fp8"].memory  # no step was taken
    (tmp_path / "run" / "summary.json").unlink()
    assert run(make_settings(compare=True), tmp_path / "run", resume=True).results["fp8"].memory is None
