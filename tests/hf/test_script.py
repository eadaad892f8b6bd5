"""The script as people write it: load, adapt, set the variable, train with stock classes."""

import pytest
import torch
from small import small_llama
from trainer_cases import BYTES, SETTINGS, byte_tokenizer, logs, texts

from octavo import FastLanguageModel, OctavoCallback, watch_environment
from octavo.hf.lora import FP8LoraLinear

trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def as_before():
    """Accelerate's settings are global; so is what watches the variable."""
    yield
    from accelerate.state import AcceleratorState, PartialState

    watch_environment().disable()
    AcceleratorState._reset_state(True)
    PartialState._reset_state()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    small_llama(vocab_size=BYTES, hidden_size=128, intermediate_size=256, head_dim=32).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def load(checkpoint, **options):
    model, tokenizer = FastLanguageModel.from_pretrained(checkpoint, max_seq_length=64, load_in_fp8="block", **options)
    if not options:
        model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8)
    return model, tokenizer


def sft(folder, model, tokenizer, **settings):
    config = trl.SFTConfig(
        output_dir=str(folder), **SETTINGS | {"max_steps": 6, "max_length": 64, "learning_rate": 1e-2} | settings
    )
    return trl.SFTTrainer(
        model, config, train_dataset=texts(), processing_class=tokenizer, callbacks=[OctavoCallback()]
    )


def losses(trainer):
    return [entry["loss"] for entry in logs(trainer)]


@pytest.mark.parametrize("options", [{}, {"packing": True}, {"padding_free": True, "max_length": None}])
def test_lora_with_the_variable_set_after_loading(checkpoint, tmp_path, monkeypatch, options):
    model, tokenizer = load(checkpoint)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    trainer = sft(tmp_path, model, tokenizer, fp16=False, bf16=False, **options)
    trainer.train()
    actual = losses(trainer)
    assert all(torch.isfinite(torch.tensor(actual))) and actual[-1] < actual[0]
    assert sum(isinstance(m, FP8LoraLinear) for m in trainer.model.modules()) == 14
    assert "fp8/underflow_mean" in trainer.state.log_history[0]


def test_lora_without_the_variable_is_in_fp8_all_the_same(checkpoint, tmp_path):
    model, tokenizer = load(checkpoint)
    trainer = sft(tmp_path, model, tokenizer, bf16=True)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]


def test_bf16_with_the_variable_is_a_conflict(checkpoint, tmp_path, monkeypatch):
    model, tokenizer = load(checkpoint)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ValueError, match="bf16"):
        sft(tmp_path, model, tokenizer, bf16=True).train()


def test_full_finetuning(checkpoint, tmp_path, monkeypatch):
    model, tokenizer = load(checkpoint, full_finetuning=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    trainer = sft(tmp_path, model, tokenizer, fp16=False, bf16=False)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]


def test_a_frozen_base_alone_is_refused(checkpoint, tmp_path):
    model, tokenizer = FastLanguageModel.from_pretrained(checkpoint, max_seq_length=64, load_in_fp8=True)
    with pytest.raises(ValueError, match=r"quantized|full_finetuning"):
        sft(tmp_path, model, tokenizer, bf16=False).train()


def test_saved_and_resumed(checkpoint, tmp_path):
    model, tokenizer = load(checkpoint)
    whole = sft(tmp_path / "whole", model, tokenizer, bf16=True, save_strategy="steps", save_steps=3)
    whole.train()
    model, tokenizer = load(checkpoint)
    again = sft(tmp_path / "again", model, tokenizer, bf16=True)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert losses(again)[-3:] == losses(whole)[-3:]
