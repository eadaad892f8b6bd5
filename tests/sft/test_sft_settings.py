"""Settings, their defaults, and whether a run fits a GPU before its model is loaded."""

from pathlib import Path

import pytest
from rich.console import Console

from octavo.sft import memory
from octavo.sft.settings import DEMO, SFTSettings, settings_from_options
from octavo.tools.plan.gpus import Gpu
from octavo.tools.shapes import SHAPES
from octavo.training.errors import UserError
from octavo.training.files import write_json

CPU = {"model": "m", "data": "d", "device": "cpu"}


def test_defaults_depend_on_other_options():
    lora, full = settings_from_options(CPU), settings_from_options({**CPU, "full": True})
    assert (lora.lr, full.lr, lora.rank, lora.alpha) == (2e-4, 1e-5, 32, 32)
    assert settings_from_options({**CPU, "rank": 8}).alpha == 8
    assert settings_from_options({**CPU, "rank": 8, "alpha": 16}).alpha == 16
    assert settings_from_options({**CPU, "device": "cuda"}).log_interval == 10
    assert settings_from_options({"device": "cpu"}).steps == DEMO["steps"]
    assert settings_from_options({**CPU, "packing": True}).layout == "packed"


def test_a_resumed_run_has_the_settings_of_the_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text("{}")
    first = settings_from_options({**CPU, "data": "d.jsonl", "columns": "text=body", "steps": 7})
    assert first.data == str(tmp_path / "d.jsonl") and first.columns == (("text", "body"),)
    assert SFTSettings.from_dict(first.to_dict()) == first
    assert settings_from_options({}, first) == first
    changed = settings_from_options({"lr": 1.0, "merge": "fp8", "log_interval": 5}, first)
    assert first.changes_to_curve(changed) == ["lr"]
    shards = settings_from_options({"ranks": 2, "strategy": "fsdp2"}, first)
    with pytest.raises(ValueError, match=r"one rank has no shards; start several \(--nproc\), as for a run that began"):
        settings_from_options({"ranks": 1}, shards)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rank": 0}, "rank=0: a whole number of at least 1"),
        ({"lr": -1.0}, "lr=-1.0: a number above 0"),
        ({"held_out": 0.6}, "held_out=0.6: a share from 0"),
        ({"dropout": 1.0}, "dropout=1.0: a probability below 1"),
        ({"warmup": -1}, "warmup=-1: a whole number, 0 or more"),
        ({"merge": "gguf"}, "merge='gguf': choose one of fp8, 16bit"),
        ({"recipe": "block", "precision": "bf16"}, "recipe='block': precision='bf16' has no FP8"),
        ({"seq": 1}, "seq=1: at least 2"),
    ],
)
def test_bad_values(changes, expected):
    with pytest.raises(ValueError, match=expected):
        SFTSettings(**changes)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU with as many GiB as are asked for, and the configuration of an 8B."""
    write_json(tmp_path / "config.json", {**SHAPES["8b"], "max_position_embeddings": 8192})

    def choose(gib, config=tmp_path / "config.json", **changes):
        monkeypatch.setattr(memory, "_this_gpu", lambda: Gpu("a GPU", gib, (9, 0)))
        return memory.choose_checkpointing(SFTSettings(device="cuda", **changes), Path(config), 2048)

    return choose


def test_memory_decides_on_checkpointing(gpu):
    checkpointing, words = gpu(139.0)
    assert not checkpointing and "GiB planned, 139.0 free" in words
    assert gpu(24.0)[0] and "with gradient checkpointing" in gpu(24.0)[1]
    assert gpu(139.0, checkpointing=True)[0]
    assert gpu(139.0, precision="bf16", batch=1)[0] is False


@pytest.mark.parametrize(
    ("gib", "changes", "advice"),
    [
        (24.0, {"checkpointing": False}, "leave --no-checkpointing out"),
        (24.0, {"batch": 64}, r"--batch \d+ --micro-batches \d+ would fit"),
        (10.0, {"batch": 1}, "--batch 1 --seq [1-9]|not even a short sequence would fit"),
        (24.0, {"full": True}, "train adapters instead, without --full"),
    ],
)
def test_a_run_that_does_not_fit_says_what_would(gpu, gib, changes, advice):
    with pytest.raises(
        UserError, match=rf"the run would take [\d.]+ GiB, and .* of a GPU are free for tensors: .*{advice}"
    ):
        gpu(gib, **changes)


def test_models_without_a_plan_are_checkpointed(gpu, tmp_path):
    write_json(tmp_path / "other.json", {**SHAPES["8b"], "model_type": "gemma"})
    checkpointing, words = gpu(1.0, config=tmp_path / "other.json")
    assert checkpointing and words == "no plan of its memory: octavo plan knows llama, mistral, qwen2, qwen3, not gemma"
    with pytest.raises(UserError, match="--plan: octavo plan knows"):
        memory.show_plan(SFTSettings(), tmp_path / "other.json", 2048, Console())
