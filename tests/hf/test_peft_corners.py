"""What a newcomer tried with adapters on an FP8 base, and found wrong once."""

import peft
import pytest
import torch
from bounds import cosine
from safetensors.torch import load_file
from small import LINEARS, small_llama, tokens
from torch import nn
from transformers import AutoModelForCausalLM

import octavo
from octavo import FastLanguageModel
from octavo.hf.callback import _summary
from octavo.ops.weight import are_neighbours

WHOLE_BLOCKS = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}  # so that groups are fused


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    small_llama(**WHOLE_BLOCKS).save_pretrained(path)
    return str(path)


def load(folder, **options):
    return FastLanguageModel.from_pretrained(folder, load_in_fp8="block", tokenizer=False, **options)[0]


def adapt(model, **options):
    adapted = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False, **options)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:  # which start as zeros
            nn.init.normal_(parameter, std=0.1)
    return adapted


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=tokens()).logits


@pytest.mark.parametrize("targets", [(), ("q_proj",), ("gate_proj",), ("down_proj", "v_proj")])
def test_a_base_with_some_linears_adapted_is_exported(folder, tmp_path, targets):
    model = load(folder)
    model = adapt(model, target_modules=targets) if targets else model
    octavo.export_fp8(model, tmp_path / "out")
    again = load(str(tmp_path / "out"))
    assert cosine(logits(again), logits(model)) > 0.99


def test_each_sample_gets_its_own_adapter(folder):
    """PEFT hands `adapter_names` to the layers by hooks, which one product for several layers would not see."""
    model = adapt(load(folder))
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=list(LINEARS), init_lora_weights=False))
    model.eval()
    ids = tokens()
    with torch.no_grad():
        mixed = model(input_ids=ids, adapter_names=["default", "other"]).logits
        model.set_adapter("default")
        first = model(input_ids=ids).logits[0]
        model.set_adapter("other")
        second = model(input_ids=ids).logits[1]
    assert cosine(mixed[0], first) > 0.995 and cosine(mixed[1], second) > 0.995
    assert cosine(first, second) < 0.99


def test_hooks_on_every_linear_are_called(folder):
    model = adapt(load(folder))
    called = set()
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in LINEARS:
            module.register_forward_hook(lambda *_, name=name: called.add(name.rsplit(".", 1)[-1]))
    logits(model)
    assert called == set(LINEARS)


@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "embed_tokens"]}])
def test_trained_heads_and_embeddings_are_in_what_is_saved(folder, tmp_path, options):
    model = adapt(load(folder), **options)
    head = model.get_base_model().lm_head
    if hasattr(head, "modules_to_save"):
        nn.init.normal_(head.modules_to_save["default"].weight, std=0.1)
    FastLanguageModel.save_pretrained_merged(model, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert cosine(logits(again), logits(model)) > 0.99
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if "lora" in name or "save" in name]


def test_a_head_trained_apart_from_the_embedding_is_saved(tmp_path):
    small_llama(**WHOLE_BLOCKS, tie_word_embeddings=True).save_pretrained(tmp_path / "in")
    model = adapt(load(str(tmp_path / "in")), modules_to_save=["lm_head"])
    nn.init.normal_(model.get_base_model().lm_head.modules_to_save["default"].weight, std=0.1)
    FastLanguageModel.save_pretrained_merged(model, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert cosine(logits(again), logits(model)) > 0.99


def test_disabled_adapters_are_not_merged(folder, tmp_path):
    model = adapt(load(folder))
    with model.disable_adapter():
        FastLanguageModel.save_pretrained_merged(model, tmp_path / "out")
        plain = logits(model)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert cosine(logits(again), plain) > 0.99 and cosine(logits(again), logits(model)) < 0.99


def test_other_tuners_and_starts_are_refused(folder):
    with pytest.raises(ValueError, match="IA3Model"):
        peft.get_peft_model(load(folder), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    for options in ({"init_lora_weights": "olora"}, {"lora_bias": True}, {"use_dora": True}):
        with pytest.raises(ValueError, match=next(iter(options))):
            adapt(load(folder), **options)


def test_an_output_can_be_changed_in_place(folder):
    layer = load(folder).model.layers[0]
    x = torch.randn(1, 3, WHOLE_BLOCKS["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    for module in (layer.self_attn.q_proj, layer.mlp):
        y = module(x)
        y += 1
        y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"target_modules": ["q_proj", "gate_porj"]}, "gate_porj"),
        ({"target_modules": None}, "target_modules=None"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_alpha": "16"}, "lora_alpha"),
        ({"lora_dropout": None}, "lora_dropout"),
    ],
)
def test_bad_options(folder, options, word):
    with pytest.raises(ValueError, match=word):
        adapt(load(folder), **options)


def test_names_and_lengths(folder):
    with pytest.raises(ValueError, match="no such folder"):
        FastLanguageModel.from_pretrained("/nowhere/at/all", load_in_fp8=True)
    assert octavo.OctavoConfig(skip="gate_proj").skip == ("gate_proj",)
    model = load(folder)  # max_seq_length is 2,048 by default, and this one has fewer positions
    assert model.max_seq_length == model.config.max_position_embeddings
    with pytest.raises(ValueError, match="max_seq_length=4096"):
        load(folder, max_seq_length=4096)


def test_adapters_do_not_count_as_linears(folder):
    before, after = _summary(load(folder)), _summary(adapt(load(folder)))
    assert before.split(" linears")[0] == after.split(" linears")[0]
    assert "0 of 15 linears in FP8; of 14 the weights alone" in _summary(adapt(load(folder, fp8_products=False)))
    assert "; of 14 in backward alone; " in _summary(load(folder, fp8_products="dgrad"))


def test_disabled_adapters_in_training_are_named(folder):
    model = adapt(load(folder)).train()
    with model.disable_adapter(), pytest.raises(ValueError, match="disabled or merged"):
        model(input_ids=tokens(), labels=tokens())


def test_merging_and_back_leaves_groups_together(folder):
    model = adapt(load(folder))
    mlp = model.get_base_model().model.layers[0].mlp
    parts = [mlp.gate_proj.base_layer, mlp.up_proj.base_layer]
    before = [part.quantized.data.clone() for part in parts]
    assert are_neighbours([part.weight.data for part in parts])
    model.merge_adapter()
    assert not torch.equal(parts[0].quantized.data.view(torch.uint8), before[0].view(torch.uint8))
    model.unmerge_adapter()
    assert are_neighbours([part.weight.data for part in parts])
    for part, data in zip(parts, before, strict=True):
        assert torch.equal(part.quantized.data.view(torch.uint8), data.view(torch.uint8))


def test_another_granularity_than_the_checkpoint_has_is_an_error(folder, tmp_path):
    octavo.export_fp8(load(folder), tmp_path / "blocks")
    with pytest.raises(ValueError, match="load_in_fp8='channel'"):
        FastLanguageModel.from_pretrained(str(tmp_path / "blocks"), load_in_fp8="channel", tokenizer=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adapters_have_the_dtype_they_would_have_beside_a_base_in_high_precision(folder, dtype):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    for autocast in (True, False):
        actual = []
        for load_in_fp8 in (True, False):
            base, _ = FastLanguageModel.from_pretrained(folder, load_in_fp8=load_in_fp8, dtype=dtype, tokenizer=False)
            model = peft.get_peft_model(base, config, autocast_adapter_dtype=autocast)
            model.add_adapter("other", config, autocast_adapter_dtype=autocast)
            actual.append({name: p.dtype for name, p in model.named_parameters() if "lora_" in name})
        assert actual[0] == actual[1] and set(actual[0].values()) == {torch.float32 if autocast else dtype}
    model(input_ids=tokens(), labels=tokens())
    base = load(folder).to(torch.float16)
    model = FastLanguageModel.get_peft_model(base, autocast_adapter_dtype=False, use_gradient_checkpointing=False)
    assert {p.dtype for name, p in model.named_parameters() if "lora_" in name} == {torch.float16}
    model.train()(input_ids=tokens(), labels=tokens()).loss.backward()
