"""Adapters in `FP8Trainer` and through Accelerate: they stay out of FP8, and the report says what runs."""

import logging

import peft
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from small import LINEARS, small_llama, tokens
from torch import nn

import octavo
from octavo import FastLanguageModel, FP8Linear, FP8Trainer
from octavo.hf.lora import FP8LoraLinear


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    small_llama().save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def fresh_accelerate():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def frozen(folder):
    base, _ = FastLanguageModel.from_pretrained(folder, load_in_fp8=True, tokenizer=False)
    return FastLanguageModel.get_peft_model(base, r=4, use_gradient_checkpointing=False).train()


def plain(_folder):
    return peft.get_peft_model(small_llama(), peft.LoraConfig(r=4, target_modules=list(LINEARS))).train()


def adapters(model):
    return [m for name, m in model.named_modules() if ".lora_" in name and isinstance(m, nn.Linear)]


def check(report, model, expected):
    assert len(adapters(model)) == 28 and all(type(m) is nn.Linear for m in adapters(model))
    assert sum(isinstance(m, FP8Linear | FP8LoraLinear) for m in model.modules()) == expected
    running = {entry.name for entry in report.in_fp8}
    assert len(running) == expected and not any(".lora_" in name for name in running)
    left = {entry.name: entry for entry in report.not_in_fp8}
    assert sum(".lora_" in name for name in left) == 28
    assert not [e.name for e in left.values() if ".lora_" not in e.name and not e.name.endswith("lm_head")]
    assert report.share_left_out < 0.15  # the head alone


@pytest.mark.parametrize("make", [frozen, plain])
def test_in_the_trainer_of_octavo(folder, make, caplog):
    model = make(folder)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with caplog.at_level(logging.INFO, "octavo"):
        trainer = FP8Trainer(model, optimizer)
    check(trainer.report, model, 14)
    assert trainer.report.summary() in caplog.text
    losses = [trainer.training_step({"input_ids": tokens(), "labels": tokens()}) for _ in range(4)]
    assert float(losses[-1]) < float(losses[0])


@pytest.mark.parametrize("make", [frozen, plain])
def test_through_accelerate(folder, make, capsys):
    with octavo.setup_fp8_mixed_precision_training():
        accelerator = Accelerator(cpu=True)
        model = make(folder)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        check(accelerator.fp8_reports[0], accelerator.unwrap_model(model), 14)
        assert "14 of " in capsys.readouterr().out
        losses = []
        for _ in range(4):
            loss = model(input_ids=tokens(), labels=tokens()).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
