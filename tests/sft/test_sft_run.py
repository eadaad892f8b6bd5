"""Runs of `octavo sft`: what they leave, interrupted and resumed to the bit, merged models, the layouts of batches."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import peft
import pytest
from commands import Command
from decoder_cases import build
from sft_cases import OPTIONS
from trainer_cases import BYTES, byte_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo import OctavoCallback, convert_to_fp8
from octavo.sft.examples import make_examples
from octavo.sft.model import load_model
from octavo.sft.settings import SFTSettings
from octavo.sft.sources import read_source
from octavo.sft.trainer import Trainer, plan_steps, training_arguments
from octavo.training.files import read_object

OCTAVO = Path(sys.executable).with_name("octavo")


def curve(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["lr"], row["grad_norm"], row["tokens"]) for row in rows]


def adapter(folder):
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


def logits(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    text = byte_tokenizer()("red fox = xof", return_tensors="pt")
    return model(**text).logits.float()


def test_the_installed_command(model, pairs, tmp_path):
    command = [OCTAVO, "sft", model, pairs, *OPTIONS, "--steps", "8", "--plan", "--out", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    folder = tmp_path / "run"
    assert run.returncode == 0, run.stderr
    for words in ("30 examples", "2 held out", "8 of 1 × 4 rows, padding-free", "held-out loss", "Report: ", "GiB"):
        assert words in run.stdout, run.stdout
    summary = read_object(folder / "summary.json", "")["fp8"]
    assert summary["held_out_loss"] < summary["held_out_loss_before"] and summary["memory"]["weights"] > 0
    page = (folder / "report.html").read_text()
    assert "Held-out loss" in page and "before training" in page and "nats per token" in page
    assert sorted(path.name for path in (folder / "checkpoints").glob("*-*")) == ["checkpoint-8"]
    products = read_object(folder / "products.json", "")["products"]
    assert sum(product["precision"] == "fp8" for product in products) == 14
    assert read_object(folder / "sample.json", "")["prompt"].endswith(" =")
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder / "adapter")
    assert adapted.peft_config["default"].r == 4
    assert AutoTokenizer.from_pretrained(folder / "adapter").chat_template


INTERRUPTED = [
    *("--dropout", "0.1", "--micro-batches", "2", "--steps", "9", "--save-interval", "3", "--log-interval", "2"),
    *("--recipe", "channel"),
]


@pytest.fixture(scope="module")
def uninterrupted(model, pairs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run = Command("sft", model, pairs, *OPTIONS, *INTERRUPTED, "--out", str(folder))
    _, error = run.communicate()
    assert run.returncode == 0, error
    return folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
def test_interrupted_and_resumed(number, uninterrupted, model, pairs, tmp_path):
    """Dropout and micro-batches are on, so that every random state matters."""
    folder = tmp_path / "run"
    run = Command("sft", model, pairs, *OPTIONS, *INTERRUPTED, "--out", str(folder))
    metrics = folder / "metrics.jsonl"
    least = 4 if number == signal.SIGKILL else 2  # a checkpoint is there, or not
    while run.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < least):
        time.sleep(0.001)
    run.send_signal(number)
    output, error = run.communicate()
    if number == signal.SIGINT:
        assert run.returncode == 130, error
        assert f"Continue with: octavo sft --resume --out {folder}" in output and "saved in" in output
    else:
        (folder / "checkpoints" / "checkpoint-8").mkdir()  # as if killed at the beginning of a save
    resumed = Command("sft", "--resume", "--out", str(folder))
    output, error = resumed.communicate()
    assert resumed.returncode == 0, error
    assert "Resuming after step" in output
    assert curve(folder) == curve(uninterrupted) and len(curve(folder)) == 9
    assert adapter(folder) == adapter(uninterrupted)
    summaries = [read_object(path / "summary.json", "")["fp8"] for path in (folder, uninterrupted)]
    assert summaries[0]["held_out_loss"] == summaries[1]["held_out_loss"]
    assert summaries[0]["held_out_loss_before"] == summaries[1]["held_out_loss_before"]


def test_resumed_with_other_settings_or_data(uninterrupted, invoke, pairs, tmp_path):
    resume = ("sft", "--resume", "--out", str(uninterrupted))
    code, _, error = invoke(*resume, "--lr", "0.02")
    assert code == 2 and "with lr=0.02: it was started with 0.01" in error
    code, _, error = invoke(*resume, "--steps", "20")
    assert code == 2 and "with steps=20: it was started with 9" in error
    other = tmp_path / "other.jsonl"
    other.write_text(Path(pairs).read_text().replace("fox", "hen"))
    config = uninterrupted / "config.json"
    before = config.read_bytes()
    config.write_text(before.decode().replace(pairs, str(other)))
    code, _, error = invoke(*resume)
    config.write_bytes(before)
    assert code == 2 and "is not what the run was started with" in error
    code, _, error = invoke("train", "--resume", "--out", str(uninterrupted))
    assert code == 2 and "is a run of octavo sft" in error


def test_merged_both_ways(invoke, model, pairs, tmp_path):
    """First with the run, then from the finished run, which trains no further."""
    run = ("sft", model, pairs, *OPTIONS, "--steps", "6", "--held-out", "0", "--merge", "16bit", "--out", "run")
    code, _, error = invoke(*run)
    assert code == 0, error
    folder = tmp_path / "run"
    rows, matrices, unmerged = curve(folder), adapter(folder), logits(model)
    merged = logits(folder / "model")
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder / "adapter").eval()
    text = byte_tokenizer()("red fox = xof", return_tensors="pt")
    difference = (adapted(**text).logits.float() - unmerged).norm()
    assert (merged - adapted(**text).logits.float()).norm() < 0.2 * difference  # the base is rounded to FP8
    code, output, error = invoke("sft", "--resume", "--out", "run", "--merge", "fp8")
    assert code == 0 and f"Model: {Path('run') / 'model'}" in output, error
    assert (curve(folder), adapter(folder)) == (rows, matrices)
    config = read_object(folder / "model" / "config.json", "")
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (logits(folder / "model") - merged).norm() < 0.2 * difference
    code, _, error = invoke(*run)
    assert code == 2 and "already holds a run" in error
    (folder / "adapter").rename(folder / "kept")
    code, _, error = invoke(*run, "--overwrite")
    assert code == 0 and (folder / "adapter").exists() and (folder / "kept").exists(), error


def test_all_weights(invoke, model, pairs, tmp_path):
    options = ["--batch", "4", "--lr", "0.003", "--steps", "6", "--packing", "--checkpointing", "--device", "cpu"]
    code, output, error = invoke("sft", model, pairs, *options, "--full", "--sample-tokens", "2", "--out", "run")
    assert code == 0, error
    assert "all weights, products in FP8" in output and "rows, packed" in output
    folder = tmp_path / "run"
    losses = [row[1] for row in curve(folder)]
    assert losses[-1] < losses[0] and not (folder / "adapter").exists()
    assert (logits(folder / "model") - logits(model)).abs().max() > 0.01


@pytest.mark.parametrize("checkpointing", [True, False])
def test_adapters_with_checkpointing(checkpointing, model, pairs, tmp_path):
    """TRL's trainer has the last word, and hears of it from both the settings and the model."""
    settings = SFTSettings(checkpointing=checkpointing, steps=1, seq=64, device="cpu")
    trainer = Trainer(
        adapted := load_model(model, settings),
        training_arguments(settings, tmp_path),
        train_dataset=make_examples(read_source(pairs), byte_tokenizer(), settings, 64).dataset(),
        processing_class=byte_tokenizer(),
    )
    assert plan_steps(trainer, settings) == 1
    trainer.train()
    assert trainer.args.gradient_checkpointing is checkpointing
    assert adapted.get_base_model().is_gradient_checkpointing is checkpointing


def first_step(pairs, folder, own_loss=True, leak=False, **changes):
    """Loss and gradient norm of a step over twelve examples, with weights and products in FP32."""
    settings = SFTSettings(**{"layout": "padding-free", "batch": 12, "steps": 1, "seq": 64} | changes)
    examples = make_examples(read_source(pairs), byte_tokenizer(), settings, 64)
    del examples.examples[12:]
    model = build(vocab_size=BYTES, max_position_embeddings=96)
    convert_to_fp8(model, precision="bf16")
    trainer = Trainer(
        model,
        training_arguments(settings, folder),
        train_dataset=examples.dataset(),
        processing_class=byte_tokenizer(),
        callbacks=[OctavoCallback(own_loss=own_loss)],
    )
    assert plan_steps(trainer, settings) == 1
    if leak:
        collate = trainer.data_collator
        trainer.data_collator = lambda rows: {k: v for k, v in collate(rows).items() if k in ("input_ids", "labels")}
    trainer.train()
    assert int(trainer.step_tokens) == examples.tokens
    return float(trainer.step_loss), float(trainer.step_norm)


@pytest.fixture(scope="module")
def one_by_one(pairs, tmp_path_factory):
    return first_step(pairs, tmp_path_factory.mktemp("one"), layout="padded", batch=1, micro_batches=12)


LAYOUTS = {
    "padding-free": {},
    "packed": {"layout": "packed"},
    "padded": {"layout": "padded"},
    "micro-batches": {"batch": 4, "micro_batches": 3},
    "checkpointing": {"checkpointing": True},
    "TRL's loss": {"own_loss": False},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_give_the_same_loss_and_gradients(name, one_by_one, pairs, tmp_path):
    assert first_step(pairs, tmp_path, **LAYOUTS[name]) == pytest.approx(one_by_one, rel=2e-6)


def test_attention_across_examples_would_be_seen(one_by_one, pairs, tmp_path):
    loss, norm = first_step(pairs, tmp_path, leak=True)
    assert abs(loss / one_by_one[0] - 1) > 1e-3 and abs(norm / one_by_one[1] - 1) > 1e-3


@pytest.mark.parametrize("optimizer", ["adamw8bit", "adamw4bit"])
def test_optimisers_with_small_states(optimizer, invoke, model, pairs, tmp_path):
    pytest.importorskip("torchao")
    out = tmp_path / "out"
    code, _, error = invoke("sft", model, pairs, *OPTIONS, "--steps", "2", "--optimizer", optimizer, "--out", str(out))
    assert code == 0, error
