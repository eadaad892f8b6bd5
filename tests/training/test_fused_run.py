"""Runs through fused layers and `torch.compile`: which code a run takes, that it stays with it, and what it shows."""

import io
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from run_cases import curve, rows, run
from test_loop import interrupt_at

from octavo.models import BDH
from octavo.models.bdh import is_fused
from octavo.tools.html_report import write_report
from octavo.training import settings as settings_module
from octavo.training.data import load_data
from octavo.training.errors import RunError, UserError
from octavo.training.learner import Learner
from octavo.training.loop import train
from octavo.training.run_folder import read_settings
from octavo.training.settings import TrainSettings, settings_from_options
from octavo.training.signals import Interrupted

GIB = 2**30
WIDER = {"dim": 32, "neurons": 64, "layers": 2, "seq": 32}


def make(settings: TrainSettings) -> Learner:
    return Learner(settings, load_data(settings.data, sequence=settings.seq, held_out=settings.held_out))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand in for a GPU with FP8 tensor cores and so many bytes of memory, where settings are made."""

    def present(memory: int = 141 * GIB, tensor_cores: bool = True) -> None:
        monkeypatch.setattr(settings_module, "has_fp8_tensor_cores", lambda _device: tensor_cores)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=memory))

    return present


@pytest.mark.parametrize(
    ("options", "fused", "compiled"),
    [
        ({}, True, True),
        ({"recipe": "current"}, True, True),
        ({"recipe": "block"}, False, True),
        ({"dropout": 0.1}, False, True),
        ({"fp8": {"percentile": 99.9}}, False, True),
        ({"fp8": {"skip": ["decoder"]}}, False, True),
        ({"fp8": {"emulate": True}}, False, False),
        ({"precision": "bf16"}, False, True),
        ({"precision": "fp32"}, False, True),
        ({"fused": False}, False, True),
        ({"compile": False}, True, False),
        ({"device": "cpu"}, False, False),
        ({"device": "cpu", "fused": True}, True, False),
        ({"device": "cpu", "precision": "bf16"}, False, False),
    ],
)
def test_the_code_of_a_new_run(gpu: Any, options: dict[str, Any], fused: bool, compiled: bool) -> None:
    gpu()
    settings = settings_from_options({"device": "cuda", **options})
    assert (settings.fused, settings.compile) == (fused, compiled)
    if settings.precision == "fp8":
        assert (settings.in_bf16().fused, settings.in_bf16().compile) == (False, compiled)


def test_a_gpu_without_tensor_cores_emulates_the_model_as_it_was_written(gpu: Any) -> None:
    gpu(tensor_cores=False)
    settings = settings_from_options({"device": "cuda"})
    assert (settings.fused, settings.compile) == (False, False)


@pytest.mark.parametrize(
    ("options", "memory", "batches"),
    [
        ({}, 141, (16, 1)),
        ({}, 24, (4, 4)),
        ({}, 48, (4, 4)),
        ({"size": "25m"}, 80, (16, 1)),
        ({"size": "tiny"}, 80, (8, 1)),
        ({"size": "tiny", "dim": 64}, 80, (8, 1)),
        ({"precision": "fp32"}, 80, (4, 4)),
        ({"precision": "bf16"}, 80, (16, 1)),
        ({"batch": 8}, 80, (8, 1)),
        ({"device": "cpu", "size": "100m"}, 80, (4, 4)),
    ],
)
def test_a_step_is_taken_at_once_where_there_is_room(
    gpu: Any, options: dict[str, Any], memory: int, batches: tuple[int, int]
) -> None:
    gpu(memory * GIB)
    settings = settings_from_options({"device": "cuda", **options})
    assert (settings.batch, settings.micro_batches) == batches


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "bf16"}, "fused=True: the fused layers are in FP8, and precision is bf16; use --no-fused"),
        ({"recipe": "block"}, "fused=True: granularity='block'.*--no-fused"),
        ({"dropout": 0.1}, "fused=True: dropout=0.1.*--no-fused"),
        ({"fp8": {"skip": ["encoder"]}}, "fused=True: skip=.*encoder.*--no-fused"),
    ],
)
def test_what_cannot_be_fused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings_from_options({"device": "cpu", "fused": True, **options})


def test_a_run_of_an_earlier_version_goes_on_as_it_was(
    make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder says nothing about fused layers, and neither do its checkpoints."""
    settings = make_settings(compare=True)
    run(settings, tmp_path / "whole")
    everything = TrainSettings.to_dict
    with monkeypatch.context() as before:
        without = lambda self: {k: v for k, v in everything(self).items() if k not in ("fused", "compile")}  # noqa: E731
        before.setattr(TrainSettings, "to_dict", without)
        interrupt_at(before, 4, signal.SIGTERM)
        with pytest.raises(Interrupted):
            run(settings, tmp_path / "parts")
    assert "fused" not in json.loads((tmp_path / "parts" / "config.json").read_text())
    base = read_settings(tmp_path / "parts")
    assert (base.fused, base.compile) == (False, False)
    run(settings_from_options({}, base), tmp_path / "parts", resume=True)
    for name in ("metrics.jsonl", "metrics_bf16.jsonl"):
        assert curve(tmp_path / "parts", name) == curve(tmp_path / "whole", name)


def test_a_fused_run_resumes_fused_and_bit_for_bit(
    make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(fused=True, micro_batches=2, fp8={"rounding": ["nearest", "nearest", "stochastic"]})
    run(settings, tmp_path / "whole")
    interrupt_at(monkeypatch, 4, signal.SIGTERM)
    with pytest.raises(Interrupted):
        run(settings, tmp_path / "parts")
    base = read_settings(tmp_path / "parts")
    assert base.fused
    for options, words in (
        ({"fused": False}, "fused=False: it was started with True"),
        ({"dropout": 0.1}, r"shape.dropout=0.1"),
        ({"recipe": "block"}, r"fp8\.fp8_format='E4M3'"),
        ({"precision": "bf16"}, "precision='bf16'"),
    ):
        with pytest.raises(UserError, match=words):
            run(settings_from_options(options, base), tmp_path / "parts", resume=True)
    run(settings_from_options({}, base), tmp_path / "parts", resume=True)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    names = {product["name"] for product in json.loads((tmp_path / "parts" / "products.json").read_text())["products"]}
    assert "layers.0.encoder_v" in names
    assert "layers.0.kept.t" in rows(tmp_path / "parts")[-1]["scaling"]


def test_fused_layers_learn_what_the_autocast_does(make_settings: Any) -> None:
    """From the same weights and data, the loss of every step within the bound that the layers themselves have."""
    fused, plain = (make(make_settings(fused=fused, lr=0.01, steps=20, **WIDER)) for fused in (True, False))
    assert is_fused(fused.model) and not is_fused(plain.model)
    losses = [(fused.step(number).loss, plain.step(number).loss) for number in range(1, 21)]
    assert losses[-1][0] < losses[0][0] - 1
    for ours, theirs in losses:
        assert ours == pytest.approx(theirs, rel=0.01)
    assert fused.evaluate() == pytest.approx(plain.evaluate(), rel=0.01)


def test_evaluation_and_sampling_leave_no_trace_on_fused_layers(make_settings: Any) -> None:
    with_pause, without = make(make_settings(fused=True)), make(make_settings(fused=True))
    with_pause.step(1)
    without.step(1)
    assert with_pause.evaluate() == with_pause.evaluate()
    with_pause.sample()
    assert with_pause.step(2) == without.step(2)


def test_only_training_is_compiled(make_settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        calls.append(1)
        return graph.forward

    compile_module = BDH.compile
    monkeypatch.setattr(BDH, "compile", lambda self: compile_module(self, backend=backend))
    learner = make(make_settings(precision="bf16", compile=True))
    plain = make(make_settings(precision="bf16"))
    for number in (1, 2):
        assert learner.step(number) == plain.step(number)
    assert calls
    calls.clear()
    assert learner.evaluate() == plain.evaluate() and learner.sample() == plain.sample()
    assert not calls
    make(make_settings(fused=True, compile=True)).step(1)
    assert not calls


def test_what_torch_cannot_compile_is_one_line(make_settings: Any, tmp_path: Path, monkeypatch: Any) -> None:
    def backend(_graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("no compiler\nand a trace")

    compile_module = BDH.compile
    monkeypatch.setattr(BDH, "compile", lambda self: compile_module(self, backend=backend))
    with pytest.raises(RunError, match=r"torch.compile failed: .*--no-compile") as caught:
        run(make_settings(precision="bf16", compile=True), tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_a_comparison_shows_speed_beside_losses(make_settings: Any, tmp_path: Path) -> None:
    output = io.StringIO()
    settings = make_settings(compare=True, fused=True)
    result = train(settings, out=tmp_path / "run", console=Console(file=output, width=120))
    text = output.getvalue()
    assert "Code: fused FP8 layers" in text and "ms a step" in text and "peak memory" not in text
    ours, theirs = result.results["fp8"], result.results["bf16"]
    ratio = ours.tokens_per_s / theirs.tokens_per_s
    assert f"Emulated FP8 trains {ratio:.2f}x as many tokens per second as BF16\n" in text
    speeds = sorted(row["tokens_per_s"] for row in rows(tmp_path / "run")[3:])  # five steps after the warm-up
    assert ours.tokens_per_s == speeds[2]
    assert ours.ms_per_step == pytest.approx(1000 * settings.tokens_per_step / ours.tokens_per_s)
    page = write_report(tmp_path / "run").read_text("utf-8")
    assert f"{ours.ms_per_step:,.1f} ms a step; median; BF16 {theirs.tokens_per_s:,.0f} ({ratio:.2f}x)" in page


def test_memory_is_compared_where_it_was_measured(
    make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.optim.step_memory import StepMemory

    peaks = iter((3 * GIB, 8 * GIB))
    measured = lambda *_: StepMemory("cuda:0", 1, 1, 2, 0, next(peaks))  # noqa: E731
    monkeypatch.setattr("octavo.training.loop.measure_memory", measured)
    output = io.StringIO()
    settings = make_settings(compare=True, fused=True, compile=True)
    compile_module = BDH.compile
    monkeypatch.setattr(BDH, "compile", lambda self: compile_module(self, backend="eager"))
    train(settings, out=tmp_path / "run", console=Console(file=output, width=140))
    text = output.getvalue()
    assert "The same in BF16, compiled by torch.compile, for comparison" in text
    assert "peak memory" in text and "3.0 GiB" in text and "8.0 GiB" in text
    assert "as many tokens per second as BF16 with torch.compile, in 0.38x the memory" in text
    assert "0.38x BF16&#x27;s" in write_report(tmp_path / "run").read_text("utf-8")
