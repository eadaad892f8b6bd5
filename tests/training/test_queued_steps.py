"""Steps that are queued: decided on the device, read later, and the same in everything that a run leaves.

On a CPU, which has computed a step when it is queued, with torch's fused AdamW as on a GPU.
"""

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from run_cases import curve, rows, run
from test_loop import interrupt_at

from octavo.training import step_rows
from octavo.training.data import load_data
from octavo.training.display import Display
from octavo.training.errors import RunError
from octavo.training.learner import Learner
from octavo.training.run_folder import Metrics
from octavo.training.run_trainer import Moment, RunTrainer, TakenStep
from octavo.training.signals import Interrupted
from octavo.training.step_rows import IN_FLIGHT, StepRows, Taken
from octavo.training.trainer import Step


def make(settings: Any) -> Learner:
    return Learner(settings, load_data(settings.data, sequence=settings.seq, held_out=settings.held_out))


@pytest.fixture
def fused_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(_name: str, parameters: Any, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, **options, fused=True)

    monkeypatch.setattr("octavo.training.learner.build_optimizer", build)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch, fused_adamw: None) -> Any:  # noqa: ARG001
    def set_to(queues: bool) -> None:
        monkeypatch.setattr(RunTrainer, "queues", property(lambda _self: queues))

    return set_to


def test_a_cpu_does_not_queue(make_settings: Any) -> None:
    learner = make(make_settings())
    assert not learner.trainer.queues and isinstance(learner.step(1), Step)


@pytest.mark.parametrize("options", [{}, {"fused": True, "micro_batches": 2}, {"precision": "bf16", "clip": 0.0}])
def test_queued_or_not_a_run_leaves_the_same(
    make_settings: Any, tmp_path: Path, queue: Any, options: dict[str, Any]
) -> None:
    for name, queues in (("queued", True), ("waiting", False)):
        queue(queues)
        run(make_settings(**options), tmp_path / name)
    assert curve(tmp_path / "queued") == curve(tmp_path / "waiting")
    assert [row.get("scaling") for row in rows(tmp_path / "queued")] == [
        row.get("scaling") for row in rows(tmp_path / "waiting")
    ]
    for name in ("model.safetensors", "sample.json"):
        assert (tmp_path / "queued" / name).read_bytes() == (tmp_path / "waiting" / name).read_bytes()


def test_a_queued_run_resumes_bit_for_bit(
    make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: Any
) -> None:
    queue(True)
    settings = make_settings(fused=True, log_interval=100, save_interval=100)
    run(settings, tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5, signal.SIGTERM)
        with pytest.raises(Interrupted):
            run(settings, tmp_path / "parts")
    assert [row["step"] for row in rows(tmp_path / "parts")] == [1, 2, 3, 4, 5]
    run(settings, tmp_path / "parts", resume=True)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_queued_step_that_is_not_finite_changes_nothing(make_settings: Any, queue: Any, broken: str) -> None:
    learners = []
    for queues in (True, False):
        queue(queues)
        learner = make(make_settings(micro_batches=2))
        learner.step(1)
        with torch.no_grad():
            clean = learner.model.lm_head[0, 0].clone()
            if broken == "gradient":
                learner.model.lm_head[0, 0] = math.nan
        if broken == "loss":
            hook = learner.model.register_forward_hook(lambda _m, _a, output: (output[0], output[1] + math.inf))
        before = {name: p.detach().clone() for name, p in learner.model.named_parameters() if name != "lm_head"}
        moments = [{k: v.clone() for k, v in state.items()} for state in learner.optimizer.state.values()]
        taken = learner.step(2)
        result = taken.result if isinstance(taken, TakenStep) else taken
        assert isinstance(taken, TakenStep) == queues and result.skipped
        assert all(torch.equal(learner.model.get_parameter(name), value) for name, value in before.items())
        for state, kept in zip(learner.optimizer.state.values(), moments, strict=True):
            assert all(torch.equal(state[name], value) for name, value in kept.items())
        if broken == "loss":
            hook.remove()
        with torch.no_grad():
            learner.model.lm_head[0, 0] = clean
        after = learner.step(3)
        learners.append((after.result if isinstance(after, TakenStep) else after, learner.scaling.state_dict()))
    (queued, scaling), (waited, expected) = learners
    assert queued == waited and not queued.skipped
    assert all(torch.equal(scaling[name], expected[name]) for name in ("_history", "_steps"))


class Queued(TakenStep):
    """A step whose result may be asked for; it notes when."""

    def __init__(self, number: int, asked: list[int], loss: float = 1.0) -> None:
        began = Moment(torch.device("cpu"))
        super().__init__(torch.tensor([loss, 2.0]), began)
        self.number, self.asked = number, asked

    @property
    def result(self) -> Step:
        self.asked.append(self.number)
        return super().result


def test_results_are_read_when_more_steps_are_queued(make_settings: Any, tmp_path: Path) -> None:
    asked: list[int] = []
    metrics = Metrics(tmp_path / "metrics.jsonl")
    writer = StepRows(make_settings(), metrics, Display(Console(file=(tmp_path / "out").open("w"))))
    for number in range(1, 6):
        writer.add(Taken(number, Queued(number, asked), 0.0, log=False))
        assert asked == list(range(1, number - IN_FLIGHT + 1))
    writer.add(Taken(6, Queued(6, asked), 0.0, log=True, scaling={}))  # a line is printed: all are read
    assert asked == [1, 2, 3, 4, 5, 6]
    writer.add(Taken(7, Queued(7, asked), 0.0, log=False))
    writer.write()
    assert [row["step"] for row in metrics.rows()] == asked == [1, 2, 3, 4, 5, 6, 7]
    assert [row["step"] for row in metrics.rows() if "scaling" in row] == [6]
    assert all(row["tokens_per_s"] > 0 and row["loss"] == 1 and row["grad_norm"] == 2 for row in metrics.rows())


def test_ten_skipped_steps_in_a_row_end_a_run_though_read_late(make_settings: Any, tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    writer = StepRows(make_settings(), metrics, Display(Console(file=(tmp_path / "out").open("w"))))
    lost = [math.inf] * 9 + [1.0] + [math.nan] * step_rows.MAX_SKIPPED_IN_A_ROW
    with pytest.raises(RunError, match="10 steps in a row, up to step 20: "):
        for number, loss in enumerate([*lost, 1.0, 1.0, 1.0], 1):
            writer.add(Taken(number, Queued(number, [], loss), 0.0, log=False))
    assert len(metrics.rows()) == 20 and metrics.rows()[-1]["loss"] is None


def test_speed_counts_no_warm_up() -> None:
    speeds = [1.0, 2.0, 3.0, 10.0, 20.0, 30.0]
    found = [{"tokens_per_s": speed} for speed in speeds]
    assert step_rows.median_speed(found) == 20.0
    assert step_rows.median_speed(found[:2]) == 1.5
