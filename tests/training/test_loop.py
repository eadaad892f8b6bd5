"""The run: what it leaves in its folder, stopping and resuming, and every way it can fail."""

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from run_cases import curve, rows, run
from safetensors import safe_open

from octavo.models import BDH, BDHConfig
from octavo.training import checkpoint, run_folder
from octavo.training.errors import RunError, UserError
from octavo.training.learner import Learner, Step
from octavo.training.loop import train
from octavo.training.signals import Interrupted


def interrupt_at(monkeypatch: pytest.MonkeyPatch, number: int, signal_number: int) -> None:
    """Send this process a signal during step `number`, once."""
    real = Learner.step
    sent = []

    def step(self: Learner, current: int) -> Step:
        if current == number and not sent:
            sent.append(current)
            os.kill(os.getpid(), signal_number)
        return real(self, current)

    monkeypatch.setattr(Learner, "step", step)


def test_what_a_run_leaves(make_settings: Any, tmp_path: Path) -> None:
    settings = make_settings()
    result = run(settings, tmp_path / "run")
    folder = tmp_path / "run"
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint-000006",
        "checkpoint-000008",
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
        "octavo-run.json",
        "products.json",
        "sample.json",
        "summary.json",
    ]
    actual = rows(folder)
    assert [row["step"] for row in actual] == list(range(1, 9))
    assert set(actual[2]) == {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "skipped"}
    assert [row["step"] for row in actual if "scaling" in row] == [1, 2, 4, 6, 8]
    assert set(next(iter(actual[1]["scaling"].values()))) == {"scale", "amax", "saturated", "underflow", "rescaled"}
    assert actual[-1]["tokens"] == 8 * 2 * 24
    products = json.loads((folder / "products.json").read_text())["products"]
    assert {product["precision"] for product in products if product["name"].startswith("matmul.")} == {"fp8"}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["fp8"]["final_loss"] == actual[-1]["loss"] == result.results["fp8"].final_loss
    assert summary["fp8"]["held_out_loss"] == pytest.approx(actual[-1]["loss"], abs=1.0)
    config = json.loads((folder / "config.json").read_text())
    assert run_folder.read_settings(folder) == settings
    assert (config["name"], config["steps"], config["emulated"]) == ("run", 8, True)


def test_the_saved_model_is_the_trained_one(make_settings: Any, tmp_path: Path) -> None:
    settings = make_settings(precision="fp32")
    run(settings, tmp_path / "run")
    with safe_open(tmp_path / "run" / "model.safetensors", "pt") as file:
        model = BDH(BDHConfig(**json.loads(file.metadata()["bdh"])))
        model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    saved = checkpoint.load_checkpoint(tmp_path / "run" / "checkpoint-000008", torch.device("cpu"))[0]
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_the_same_seed_gives_the_same_curve_and_another_one_does_not(make_settings: Any, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(make_settings(seed=seed), tmp_path / name)
    assert curve(tmp_path / "a") == curve(tmp_path / "b") != curve(tmp_path / "c")


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_resumed_curve_is_the_same(
    make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal_number: int
) -> None:
    settings = make_settings(dropout=0.3, micro_batches=2, fp8={"rounding": "stochastic"})
    run(settings, tmp_path / "whole")
    before = signal.getsignal(signal_number)
    for number in (4, 6):  # stopped, resumed, and stopped again at a step where a checkpoint is due anyway
        interrupt_at(monkeypatch, number, signal_number)
        with pytest.raises(Interrupted) as stopped:
            run(settings, tmp_path / "parts", resume=number > 4)
        assert stopped.value.number == signal_number
        assert len(rows(tmp_path / "parts")) == number
        assert checkpoint.list_checkpoints(tmp_path / "parts")[-1].name == f"checkpoint-{number:06d}"
        assert signal.getsignal(signal_number) is before
        monkeypatch.undo()
    run(settings, tmp_path / "parts", resume=True)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    for name in ("sample.json", "model.safetensors"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_rows_after_the_checkpoint_are_computed_again(make_settings: Any, tmp_path: Path) -> None:
    settings = make_settings()
    run(settings, tmp_path / "run")
    whole = curve(tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    checkpoint.shutil.rmtree(tmp_path / "run" / "checkpoint-000008")
    metrics.write_bytes(metrics.read_bytes() + b'{"step": 9, "lo')  # as a kill in the middle of a write leaves it
    run(settings, tmp_path / "run", resume=True)
    assert curve(tmp_path / "run") == whole


def test_resuming_before_the_first_checkpoint_starts_again(make_settings: Any, tmp_path: Path) -> None:
    settings = make_settings()
    run(settings, tmp_path / "run")
    whole = curve(tmp_path / "run")
    for path in checkpoint.list_checkpoints(tmp_path / "run"):
        checkpoint.shutil.rmtree(path)
    run(settings, tmp_path / "run", resume=True)
    assert curve(tmp_path / "run") == whole


def test_resuming_a_finished_run_trains_no_further(make_settings: Any, tmp_path: Path) -> None:
    settings = make_settings()
    first = run(settings, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert run(settings, tmp_path / "run", resume=True).results == first.results
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_constant_rate_can_be_trained_further(make_settings: Any, tmp_path: Path) -> None:
    run(make_settings(schedule="constant", steps=5), tmp_path / "parts")
    run(make_settings(schedule="constant", steps=8), tmp_path / "parts", resume=True)
    run(make_settings(schedule="constant", steps=8), tmp_path / "whole")
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    with pytest.raises(UserError, match="steps=2"):
        run(make_settings(schedule="constant", steps=2), tmp_path / "parts", resume=True)


def test_compare_trains_bf16_on_the_same_batches_and_resumes_it_too(
    make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(make_settings(compare=True), tmp_path / "whole")
    assert list(result.results) == ["fp8", "bf16"]
    fp8, bf16 = rows(tmp_path / "whole"), rows(tmp_path / "whole", "metrics_bf16.jsonl")
    assert fp8[0]["loss"] == pytest.approx(bf16[0]["loss"], rel=0.01) and fp8[-1]["loss"] != bf16[-1]["loss"]
    assert not any("scaling" in row for row in bf16)

    run(make_settings(), tmp_path / "parts")  # first without the comparison
    interrupt_at(monkeypatch, 5, signal.SIGINT)
    with pytest.raises(Interrupted):
        run(make_settings(compare=True), tmp_path / "parts", resume=True)
    assert len(rows(tmp_path / "parts", "metrics_bf16.jsonl")) == 5
    assert run(make_settings(compare=True), tmp_path / "parts", resume=True).results["fp8"] is not None
    for name in ("metrics.jsonl", "metrics_bf16.jsonl"):
        assert curve(tmp_path / "parts", name) == curve(tmp_path / "whole", name)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lr": 0.5}, "lr=0.5"),
        ({"fp8": {"margin": 1}}, "fp8.margin=1"),
        ({"dim": 8}, "shape.dim=8"),
    ],
)
def test_resuming_with_other_settings_names_the_field(
    make_settings: Any, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    run(make_settings(), tmp_path / "run")
    with pytest.raises(UserError, match=f"with {named}: it was started with"):
        run(make_settings(**change), tmp_path / "run", resume=True)


def test_resuming_on_other_data_is_refused(make_settings: Any, tmp_path: Path, text: Path) -> None:
    run(make_settings(), tmp_path / "run")
    text.write_bytes(text.read_bytes()[::-1])
    with pytest.raises(UserError, match="does not hold the bytes"):
        run(make_settings(), tmp_path / "run", resume=True)
    text.write_bytes(text.read_bytes()[::-1])
    text.rename(text.with_name("moved.txt"))
    run(make_settings(data=str(text.with_name("moved.txt"))), tmp_path / "run", resume=True)


def test_a_folder_with_a_run_is_not_overwritten_by_accident(make_settings: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(make_settings(compare=True), out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"already holds a run.*--resume.*--overwrite"):
        run(make_settings(), out)
    run(make_settings(seed=1, steps=2), out, overwrite=True)
    assert len(rows(out)) == 2 and not (out / "metrics_bf16.jsonl").exists()
    assert [path.name for path in checkpoint.list_checkpoints(out)] == ["checkpoint-000002"]
    assert (out / "notes.txt").read_text() == "mine"


def test_default_folders_are_counted(make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = make_settings(steps=1)
    for number in (1, 2):
        assert train(settings, console=Console(file=Path("log").open("w"))).folder == Path(  # noqa: SIM115
            f"runs/bdh-custom-00{number}"
        )
    with pytest.raises(UserError, match=r"the latest run is runs/bdh-custom-00[12]"):
        run_folder.find_run(None)


def test_an_impossible_request_leaves_no_folder(make_settings: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        run(make_settings(data="missing"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint_is_named(make_settings: Any, tmp_path: Path) -> None:
    run(make_settings(), tmp_path / "run")
    state = tmp_path / "run" / "checkpoint-000008" / "state.pt"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(RunError, match=r"checkpoint-000008 is damaged.*checkpoint-000006"):
        run(make_settings(), tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("{}"), "config.json has changed"),
        (lambda f: (f / "config.json").unlink(), "holds no run"),
        (lambda f: (f / "metrics.jsonl").unlink(), "does not hold the rows of steps 1 to 8"),
        (lambda f: (f / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n' * 4), "does not hold the rows"),
    ],
)
def test_a_damaged_folder_is_named(make_settings: Any, tmp_path: Path, damage: Any, message: str) -> None:
    run(make_settings(), tmp_path / "run")
    damage(tmp_path / "run")
    with pytest.raises(UserError, match=message) as error:
        run(make_settings(), tmp_path / "run", resume=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("failing", ["state.pt", "config.json.tmp", "sample.json.tmp", "products.json.tmp"])
def test_a_full_disk_is_one_clear_line_and_can_be_resumed(
    make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    real = checkpoint.write_durable

    def write(path: Path, content: bytes) -> None:
        if path.name == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content)

    with monkeypatch.context() as patch:
        patch.setattr("octavo.training.files.write_durable", write)
        patch.setattr("octavo.training.checkpoint.write_durable", write)
        with pytest.raises(RunError, match=r"cannot write .*: No space left on device") as error:
            run(make_settings(), tmp_path / "run")
    assert "\n" not in str(error.value)
    run(make_settings(), tmp_path / "run", resume=failing != "config.json.tmp")
    run(make_settings(), tmp_path / "whole")
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def poison(monkeypatch: pytest.MonkeyPatch, steps: range) -> None:
    real = Learner.step

    def step(self: Learner, number: int) -> Step:
        clean = self.model.lm_head.detach().clone()
        if number in steps:
            with torch.no_grad():
                self.model.lm_head.fill_(float("inf"))
        result = real(self, number)
        if number in steps:
            with torch.no_grad():
                self.model.lm_head.copy_(clean)
        return result

    monkeypatch.setattr(Learner, "step", step)


def test_steps_that_are_not_finite_are_skipped_and_counted(
    make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, range(3, 5))
    result = run(make_settings(), tmp_path / "run")
    actual = rows(tmp_path / "run")
    assert [row["step"] for row in actual if row["skipped"]] == [3, 4]
    assert actual[2]["loss"] is None and actual[2]["grad_norm"] is None
    assert result.results["fp8"].skipped == 2 and actual[-1]["loss"] is not None


def test_too_many_of_them_in_a_row_end_the_run(
    make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, range(3, 100))
    with pytest.raises(RunError, match=r"not finite for 10 steps in a row, up to step 12: .*--lr"):
        run(make_settings(steps=20), tmp_path / "run")
