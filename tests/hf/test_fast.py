"""`FastLanguageModel` and the checkpoints it writes, on a small model."""

import json
import subprocess
import sys

import pytest
import torch
from bounds import cosine
from safetensors.torch import load_file
from small import LINEARS, small_llama, tokens
from torch import nn
from transformers import AutoModelForCausalLM

import octavo
from octavo import FastLanguageModel, FP8Linear, FP8TrainingConfig
from octavo.hf.lora import FP8LoraLinear
from octavo.nn.frozen import FP8FrozenLinear

WHOLE_BLOCKS = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    small_llama(**WHOLE_BLOCKS).save_pretrained(folder)
    return str(folder)


def load(folder, **options):
    model, tokenizer = FastLanguageModel.from_pretrained(folder, max_seq_length=64, tokenizer=False, **options)
    assert tokenizer is None
    return model


def step(model, lr=1e-2):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(3):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize(
    ("given", "granularity"), [(True, "channel"), ("block", "block"), ("channel", "channel"), ("tensor", "tensor")]
)
def test_a_frozen_base_with_adapters(checkpoint, given, granularity):
    model = load(checkpoint, load_in_fp8=given)
    frozen = [m for m in model.modules() if isinstance(m, FP8FrozenLinear)]
    assert len(frozen) == 14 and {m.granularity for m in frozen} == {granularity}
    assert not any(p.requires_grad for p in model.parameters())
    model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False).train()
    assert sum(isinstance(m, FP8LoraLinear) for m in model.modules()) == 14
    before = model(input_ids=tokens(), labels=tokens()).loss.item()
    assert step(model) < before


def test_full_finetuning_trains_every_weight_with_products_in_fp8(checkpoint):
    model = load(checkpoint, load_in_fp8=True, full_finetuning=True).train()
    assert sum(isinstance(m, FP8Linear) for m in model.modules()) == 14
    assert "14 of 15" in model.octavo_report.summary() or model.octavo_report.in_fp8
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    step(model)
    assert not [n for n, p in model.named_parameters() if torch.equal(p, before[n])]


@pytest.mark.parametrize("full", [True, False])
def test_emulation_is_said(checkpoint, full, caplog, monkeypatch):
    monkeypatch.setattr("octavo.support._announced", set())
    model = load(checkpoint, load_in_fp8=True, full_finetuning=full)
    line = "emulated on cpu: no FP8 tensor cores; same numerics, slower"
    assert [r.getMessage() for r in caplog.records if r.name == "octavo"] == [f"FP8 is {line}"]
    assert line in (model.octavo_report.summary() if full else model.octavo_fused)
    with pytest.raises(RuntimeError, match=r"emulate=False: .*no FP8 tensor cores"):
        load(checkpoint, load_in_fp8=True, full_finetuning=full, fp8_config=FP8TrainingConfig(emulate=False))


def test_a_recipe_by_its_name(checkpoint):
    model = load(checkpoint, load_in_fp8=True, full_finetuning=True, fp8_config="current")
    assert model.model.layers[0].mlp.up_proj.config == FP8TrainingConfig.from_recipe("current")
    model = load(checkpoint, load_in_fp8="channel", fp8_config="channel")
    assert model.model.layers[0].mlp.up_proj.config == FP8TrainingConfig.from_recipe("channel")


def test_a_frozen_base_with_adapters_has_nothing_to_convert(checkpoint):
    """And the report says what runs: the base in FP8, the adapters not."""
    model = FastLanguageModel.get_peft_model(load(checkpoint, load_in_fp8=True), r=4, use_gradient_checkpointing=False)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"is in FP8 already: its weights are frozen in it.*\n.*14 of 43 in FP8"):
        octavo.convert_to_fp8(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    trainer = octavo.FP8Trainer(model, torch.optim.AdamW(trained))
    assert [type(module) for module in model.modules()] == classes
    assert trainer.training_step({"input_ids": tokens(), "labels": tokens()}).isfinite()
    with pytest.raises(ValueError, match=r"include='lora_A': the base of .*lora_A.* computes its adapters with it"):
        octavo.convert_to_fp8(model, include=("lora_A", "lora_B"))
    assert [type(module) for module in model.modules()] == classes


def test_plain_loading(checkpoint):
    model = load(checkpoint)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear and not any(p.requires_grad for p in model.parameters())
    assert all(p.requires_grad for p in load(checkpoint, full_finetuning=True).parameters())


def test_a_base_without_adapters_does_not_train_in_silence(checkpoint):
    model = load(checkpoint, load_in_fp8=True).train()
    with pytest.raises(ValueError, match="full_finetuning=True"):
        model(input_ids=tokens(), labels=tokens())
    model.eval()
    assert model(input_ids=tokens(), labels=tokens()).loss.isfinite()
    with torch.no_grad():
        assert model.train()(input_ids=tokens(), labels=tokens()).loss.isfinite()
    with pytest.raises(ValueError, match="full_finetuning=True"):
        model.requires_grad_(True)


@pytest.mark.parametrize("mode", [True, "unsloth"])
def test_gradient_checkpointing_changes_no_gradient(checkpoint, mode):
    gradients = []
    for checkpointing in (False, mode):
        model = load(checkpoint, load_in_fp8="channel")
        model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=checkpointing).train()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.constant_(parameter, 0.01)
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert all(torch.equal(g, gradients[1][n]) for n, g in gradients[0].items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_in_fp8": True, "load_in_4bit": True}, "load_in_4bit=True with load_in_fp8=True"),
        ({"load_in_fp8": "block", "load_in_8bit": True}, "load_in_8bit=True with load_in_fp8='block'"),
        ({"load_in_4bit": True}, "load_in_4bit=True: Octavo loads FP8"),
        ({"engine": "native"}, "engine='native' with fast_inference=False"),
        ({"fast_inference": True, "engine": "sglang"}, "engine='sglang'"),
        ({"load_in_fp8": "row"}, "load_in_fp8='row'"),
        ({"fp8_config": FP8TrainingConfig()}, "load_in_fp8=False"),
        ({"fp8_products": False}, "fp8_products=False is for a base frozen in FP8"),
        ({"fp8_products": True}, "fp8_products=True with load_in_fp8=False"),
        ({"load_in_fp8": True, "full_finetuning": True, "fp8_products": False}, "without full_finetuning"),
        ({"load_in_fp8": True, "fp8_products": 1}, "fp8_products=1: True, False, or 'dgrad'"),
        ({"fp8_products": "dgrad"}, "fp8_products='dgrad' is for a base frozen in FP8"),
        ({"load_in_fp8": True, "fp8_products": False, "fp8_config": FP8TrainingConfig()}, "leave one of them out"),
        ({"load_in_fp8": True, "quantization_config": octavo.OctavoConfig()}, "both say what becomes of the weights"),
        ({"max_seq_length": 4096}, "max_seq_length=4096: .* 128 positions"),
        ({"max_seq_length": 0}, "max_seq_length=0"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization=0"),
        ({"tokenizer": True}, "has no tokenizer that loads; for the model alone, tokenizer=False"),
    ],
)
def test_clear_errors(checkpoint, options, message):
    with pytest.raises(ValueError, match=message):
        FastLanguageModel.from_pretrained(checkpoint, **{"max_seq_length": 64, "tokenizer": False} | options)


def test_adapters_beside_products_in_high_precision(checkpoint):
    """They train, and their gradients are those beside a base in BF16 that holds the same weights."""
    model = load(checkpoint, load_in_fp8="channel", fp8_products=False)
    reference = small_llama(**WHOLE_BLOCKS)
    for name, module in model.named_modules():
        if isinstance(module, FP8FrozenLinear):
            assert not module.fp8_products
            reference.get_submodule(name).weight.data.copy_(module.dequantize())
    actual = []
    for base in (model, reference):
        with_adapters = FastLanguageModel.get_peft_model(base, r=4, use_gradient_checkpointing=False)
        first = with_adapters(input_ids=tokens(), labels=tokens()).loss
        first.backward()
        actual.append({name: p.grad for name, p in with_adapters.named_parameters() if p.requires_grad})
        assert step(with_adapters) < first.item()
    assert actual[0].keys() == actual[1].keys()
    assert all(cosine(grad, actual[1][name]) > 0.999 for name, grad in actual[0].items() if grad.abs().max() > 0)


def test_adapters_are_checked(checkpoint):
    model = load(checkpoint, load_in_fp8=True)
    with pytest.raises(ValueError, match="use_gradient_checkpointing='often'"):
        FastLanguageModel.get_peft_model(model, use_gradient_checkpointing="often")
    with pytest.raises(ValueError, match="lora_dropout=1"):
        FastLanguageModel.get_peft_model(model, lora_dropout=1)


def test_the_head_in_fp8(checkpoint):
    config = FP8TrainingConfig.from_recipe("channel", fp8_head=True)
    model = load(checkpoint, load_in_fp8="channel", fp8_config=config)
    assert "head in FP8" in " ".join(model.octavo_fused)
    model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False).train()
    assert step(model) > 0


def trained(checkpoint, granularity="block"):
    model = load(checkpoint, load_in_fp8=granularity)
    model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False).train()
    step(model)
    return model.eval()


@pytest.mark.parametrize("granularity", ["block", "channel"])
def test_merged_checkpoints_in_a_fresh_process_without_octavo(checkpoint, granularity, tmp_path):
    model = trained(checkpoint, granularity)
    expected = model(tokens()).logits
    for method in ("merged_16bit", "merged_fp8"):
        folder = tmp_path / method
        FastLanguageModel.save_pretrained_merged(model, folder, save_method=method)
        code = (
            "import sys, torch\n"
            "from transformers import AutoModelForCausalLM\n"
            f"model = AutoModelForCausalLM.from_pretrained(r'{folder}', dtype=torch.bfloat16)\n"
            f"torch.save(model(torch.tensor({tokens().tolist()})).logits, r'{folder / 'logits.pt'}')\n"
            "assert 'octavo' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
        assert cosine(torch.load(folder / "logits.pt"), expected) > 0.98, method
    assert torch.equal(model(tokens()).logits, expected)  # as it was


def test_export_of_a_full_fine_tune(checkpoint, tmp_path):
    model = load(checkpoint, load_in_fp8=True, full_finetuning=True).train()
    step(model, lr=1e-3)
    model.eval()
    model.save_pretrained(tmp_path / "bf16")
    octavo.export_fp8(model, tmp_path / "fp8")
    expected = model(tokens()).logits
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16)
    assert {n: p.dtype for n, p in plain.named_parameters()}.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(p, model.get_parameter(n)) for n, p in plain.named_parameters())
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.bfloat16)
    for actual in (plain, stock):
        assert cosine(actual(tokens()).logits, expected) > 0.98
    state = load_file(tmp_path / "fp8" / "model.safetensors")
    assert state["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert config["weight_block_size"] == [128, 128] and config["modules_to_not_convert"] == ["lm_head"]
    # And back into Octavo, byte for byte.
    again = load(str(tmp_path / "fp8"), load_in_fp8=True)
    for name in LINEARS[:4]:
        module = again.get_submodule(f"model.layers.0.self_attn.{name}")
        written = state[f"model.layers.0.self_attn.{name}.weight"].view(torch.uint8)
        assert torch.equal(module.quantized.data.view(torch.uint8), written)


def test_export_of_odd_sizes_and_tied_heads(tmp_path):
    model = small_llama(tie_word_embeddings=True)
    octavo.export_fp8(model, tmp_path / "fp8")
    again = load(str(tmp_path / "fp8"), load_in_fp8=True)
    assert cosine(again(tokens()).logits, model(tokens()).logits) > 0.98


def test_nothing_half_written(checkpoint, tmp_path, monkeypatch):
    model = load(checkpoint)
    octavo.export_fp8(model, tmp_path / "out")
    before = sorted(p.name for p in (tmp_path / "out").iterdir())

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("huggingface_hub.save_torch_state_dict", fail)
    with pytest.raises(OSError, match="disk full"):
        octavo.export_fp8(model, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize("targets", [LINEARS, ("q_proj", "v_proj", "down_proj")])
def test_groups_compute_what_their_members_do(granularity, targets, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    small_llama(**sizes, head_dim=64).save_pretrained(tmp_path)
    actual = []
    for fused in (True, False):
        model = load(str(tmp_path), load_in_fp8=granularity)
        said = " ".join(model.octavo_fused)
        assert "q, k and v in one product (2)" in said and "MLP with its activation in one function (2)" in said
        if not fused:
            octavo.restore(model)
        model = FastLanguageModel.get_peft_model(model, r=4, target_modules=targets, use_gradient_checkpointing=False)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.constant_(parameter, 0.01)
        loss = model.train()(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        actual.append((loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}))
    (loss, gradients), (alone, expected) = actual
    assert loss.item() == pytest.approx(alone.item(), rel=1e-3)
    # A row of g has one scale for the group, or one for each member: other roundings, two layers deep.
    assert min(cosine(gradients[name], expected[name]) for name in expected) > 0.97


def test_layers_with_adapters_compile_as_one_graph(checkpoint):
    model = load(checkpoint, load_in_fp8="channel")
    model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False).train()
    eager = model(input_ids=tokens(), labels=tokens()).loss
    for layer in model.get_base_model().model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    assert loss.item() == pytest.approx(eager.item(), rel=1e-3)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_scaling_state_is_in_fp32_whatever_dtype_the_model_is_loaded_in(checkpoint):
    """transformers makes the model's dtype the default while it loads; counts in BF16 would stop at 256."""
    model, _ = FastLanguageModel.from_pretrained(
        checkpoint, max_seq_length=64, load_in_fp8=True, dtype=torch.bfloat16, tokenizer=False
    )
    frozen = next(m for m in model.modules() if isinstance(m, FP8FrozenLinear))
    assert frozen.state_x.dtype == frozen.state_g.dtype == torch.float32
    state = frozen.scaling.state_dict()
    assert all(t.dtype != torch.bfloat16 for t in state.values() if isinstance(t, torch.Tensor))
