"""The report of a model that is loaded into FP8: what is in it, what is not, how many bytes of each, and why."""

import json

import pytest
import torch
from safetensors.torch import load_file
from small import LINEARS, small_llama, tokens
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForTokenClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import octavo
from octavo import FastLanguageModel, FP8TrainingConfig, OctavoConfig
from octavo.hf.quantizer import logger
from octavo.nn.frozen import FP8FrozenLinear, activation_config

SHAPE = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
MIXTURES = {
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    small_llama(vocab_size=256).save_pretrained(path)
    return str(path)


def load(folder, **options):
    return FastLanguageModel.from_pretrained(str(folder), tokenizer=False, **{"load_in_fp8": True} | options)[0]


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(logger, "warning", lines.append)
    return lines


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_that_stay_in_bf16_are_named(family, tmp_path, said):
    MIXTURES[family]().to(torch.bfloat16).save_pretrained(tmp_path)
    model = load(tmp_path)
    report = model.octavo_report
    assert isinstance(report, octavo.ConversionReport)
    frozen = [m for m in model.modules() if isinstance(m, FP8FrozenLinear)]
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    assert frozen and experts
    assert report.bytes_in_fp8 == sum(m.weight.numel() for m in frozen)
    others = [p for name, p in model.named_parameters() if p.dim() >= 2 and p.dtype == torch.bfloat16]
    others = [p for p in others if p is not model.get_input_embeddings().weight]
    assert report.bytes_not_in_fp8 == sum(p.nbytes for p in others)
    left = sum(p.numel() for p in others)
    assert report.share_left_out == pytest.approx(left / (left + report.bytes_in_fp8)) and report.share_left_out > 0.5
    line = report.left_out()
    assert f"{report.share_left_out:.0%} of the linear weights are not in FP8: " in line and "gate_up_proj" in line
    assert line in report.summary() and said == [f"octavo: {line}"]
    assert {entry.name for entry in report.not_in_fp8} >= {
        name for name, _ in model.named_parameters() if ".experts." in name
    }
    assert report.to_dict()["bytes_in_fp8"] == report.bytes_in_fp8
    assert model(tokens()).logits.isfinite().all()


def test_a_decoder_of_which_all_but_the_head_is_in_fp8(folder, said):
    model = load(folder)
    report = model.octavo_report
    assert {entry.name for entry in report.in_fp8} == {
        n for n, m in model.named_modules() if isinstance(m, FP8FrozenLinear)
    }
    assert [(entry.name, entry.reason) for entry in report.not_in_fp8] == [
        ("lm_head", "the head stays in high precision")
    ]
    assert report.bytes_not_in_fp8 == model.lm_head.weight.nbytes
    assert report.share_left_out < 0.1 and not report.left_out() and not said
    assert report.fused is model.octavo_fused and "head and loss in chunks" in report.summary()
    with_adapters = FastLanguageModel.get_peft_model(model, r=4)
    assert with_adapters.octavo_report is report  # found through PEFT, too


def test_the_weights_alone_in_fp8(folder):
    report = load(folder, fp8_products=False).octavo_report
    assert not report.in_fp8 and report.bytes_in_fp8 > 0 and report.share_left_out < 0.1
    reasons = {entry.reason for entry in report if entry.weight == "float8_e4m3fn"}
    assert reasons == {"its weight alone is in FP8, and dequantised for each product"}
    assert {entry.precision for entry in report} == {"bfloat16"}


def test_what_is_skipped_is_named(folder, said):
    model = load(folder, skip=["mlp"])
    line = model.octavo_report.left_out()
    assert "down_proj (left alone: skip names it)" in line and said
    again = load(
        folder, fp8_config=activation_config("channel").replace(skip=("lm_head", "mlp"))
    )  # as this one says it
    assert model.octavo_report.share_left_out == again.octavo_report.share_left_out
    full = load(folder, full_finetuning=True, fp8_config=FP8TrainingConfig(), skip=["mlp"])
    assert type(full.model.layers[0].mlp.up_proj) is nn.Linear


def test_a_head_in_fp8_is_in_the_report(folder):
    config = FP8TrainingConfig.from_recipe("channel", fp8_head=True)
    report = load(folder, load_in_fp8="channel", fp8_config=config).octavo_report
    assert [(entry.name, entry.op) for entry in report.in_fp8 if entry.name == "lm_head"] == [("lm_head", "head")]
    assert not report.not_in_fp8


def test_converted_models_have_it_too(folder):
    full = load(folder, full_finetuning=True)
    assert full.octavo_report.bytes_in_fp8 == 0  # its products are, its weights are trained in BF16
    assert full.octavo_report.bytes_not_in_fp8 == sum(
        p.nbytes for p in full.parameters() if p.dim() == 2 and p is not full.model.embed_tokens.weight
    )
    assert full.octavo_report.share_left_out < 0.1
    report = octavo.convert_to_fp8(small_llama(), FP8TrainingConfig(skip=("lm_head", "mlp")))
    assert "of the linear weights are not in FP8" in report.left_out() and report.left_out() in report.summary()


@pytest.mark.parametrize("options", [{}, {"load_in_fp8": True}, {"load_in_fp8": True, "full_finetuning": True}])
def test_every_loaded_model_has_one_report(folder, options):
    model, _ = FastLanguageModel.from_pretrained(str(folder), tokenizer=False, **options)
    report = model.octavo_report
    assert isinstance(report, octavo.ConversionReport) and report.fused is model.octavo_fused
    assert len(report) == 15 and bool(report.in_fp8) == bool(options)
    assert "head and loss in chunks, head in BF16" in report.fused
    assert ("q, k and v in one product (2)" in report.fused) == bool(options)
    assert ("MLP with its activation in one function (2)" in report.fused) == bool(options)
    layer = model.model.layers[1].mlp.down_proj
    layer.register_forward_hook(lambda *_: None)
    assert report.hooked == (["model.layers.1.mlp.down_proj"] if options else [])


def test_restore_gives_back_the_report_of_a_loaded_model(folder):
    model = load(folder, skip=["mlp"])
    loaded = model.octavo_report
    converted = octavo.convert_to_fp8(model)
    assert model.octavo_report is converted and len(converted.in_fp8) == 14 and len(loaded.in_fp8) == 8
    octavo.restore(model)
    assert model.octavo_report is loaded and model.octavo_fused is loaded.fused
    assert loaded.fused == ["nothing fused any more: octavo.restore was called"] and len(loaded.in_fp8) == 8
    model.requires_grad_(False).get_input_embeddings().requires_grad_(True)
    loss = model.train()(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    assert loss.isfinite() and model.get_input_embeddings().weight.grad.abs().max() > 0


def test_what_a_checkpoint_was_saved_with_is_what_it_is_loaded_with(folder, tmp_path):
    mine = activation_config("channel").replace(fast_accumulation="none", fp8_head=True)
    load(folder, load_in_fp8="channel", fp8_config=mine).save_pretrained(tmp_path)
    for how in (True, "channel"):
        model = load(tmp_path, load_in_fp8=how)
        assert {m.config for m in model.modules() if isinstance(m, FP8FrozenLinear)} == {mine}
        assert "head in FP8" in " ".join(model.octavo_fused)
    other = activation_config("channel")
    model = load(tmp_path, fp8_config=other)  # what is asked for now
    assert {m.config for m in model.modules() if isinstance(m, FP8FrozenLinear)} == {other}
    assert "head in BF16" in " ".join(model.octavo_fused)
    load(folder, load_in_fp8="channel", fp8_products=False).save_pretrained(tmp_path / "weights")
    model = load(tmp_path / "weights", fp8_config=other)
    assert all(m.fp8_products for m in model.modules() if isinstance(m, FP8FrozenLinear))
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert FP8TrainingConfig.from_dict(stored["fp8"]) == mine


@pytest.mark.parametrize("cls", [AutoModelForTokenClassification, AutoModelForSequenceClassification])
@pytest.mark.parametrize("in_fp8_before", [False, True])
def test_a_head_that_was_never_trained_can_be(folder, tmp_path, cls, in_fp8_before):
    if in_fp8_before:
        octavo.export_fp8(load(folder), tmp_path)
        folder = tmp_path
    model = cls.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=OctavoConfig(), num_labels=5)
    assert type(model.score) is nn.Linear and model.score.weight.dtype == torch.bfloat16
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if name.startswith("score.")}
    assert 0.001 < model.score.weight.std() < 0.1
    entry = next(entry for entry in model.octavo_report if entry.name == "score")
    assert entry.reason == "new: the checkpoint has no weight for it" and entry.precision == "bfloat16"
    labels = torch.zeros_like(tokens()) if cls is AutoModelForTokenClassification else torch.zeros(2, dtype=torch.long)
    model.train()(input_ids=tokens(), labels=labels).loss.backward()
    assert model.score.weight.grad.abs().max() > 0


def test_a_trained_classifier_is_read_as_it_was_saved(tmp_path):
    torch.manual_seed(0)
    original = LlamaForTokenClassification(small_llama().config).to(torch.bfloat16)
    original.save_pretrained(tmp_path / "bf16")
    how = {"dtype": torch.bfloat16, "quantization_config": OctavoConfig()}
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "bf16", **how)
    assert torch.equal(model.score.weight, original.score.weight) and not model.score.weight.requires_grad
    octavo.export_fp8(model, tmp_path / "fp8")
    assert load_file(tmp_path / "fp8" / "model.safetensors")["score.weight"].dtype == torch.float8_e4m3fn
    again = AutoModelForTokenClassification.from_pretrained(tmp_path / "fp8", **how)
    assert isinstance(again.score, FP8FrozenLinear)
    torch.testing.assert_close(again.score.dequantize(), model.score.weight, rtol=0.07, atol=1e-4)


def test_a_linear_that_the_checkpoint_lacks_is_not_frozen(tmp_path):
    model = small_llama()
    state = model.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=OctavoConfig("channel")
    )
    assert [name for name, p in again.named_parameters() if p.requires_grad] == ["model.layers.1.mlp.up_proj.weight"]
    assert sum(isinstance(m, FP8FrozenLinear) for m in again.modules()) == 2 * len(LINEARS) - 1
    again.train()(input_ids=tokens(), labels=tokens()).loss.backward()
    assert again.model.layers[1].mlp.up_proj.weight.grad.abs().max() > 0


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    model = small_llama()
    model.save_pretrained(tmp_path, state_dict={f"other.{name}": value for name, value in model.state_dict().items()})
    with pytest.raises(ValueError, match="no weight for any linear of LlamaForCausalLM"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=OctavoConfig())
