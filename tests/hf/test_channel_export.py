"""Exports per channel: compressed-tensors, which vLLM serves, and transformers with the package of that name reads."""

import json

import pytest
import torch
from bounds import cosine
from safetensors.torch import load_file
from small import small_llama, tokens
from torch import nn
from transformers import AutoModelForCausalLM

import octavo
from octavo import FastLanguageModel
from octavo.nn.frozen import FP8FrozenLinear

pytest.importorskip("compressed_tensors")
LINEAR = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    small_llama().save_pretrained(path)
    return str(path)


def load(folder, granularity="channel", **options):
    return FastLanguageModel.from_pretrained(str(folder), load_in_fp8=granularity, tokenizer=False, **options)[0]


def written(path):
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    return load_file(path / "model.safetensors"), config


def test_the_very_bytes(folder, tmp_path):
    model = load(folder)
    octavo.export_fp8(model, tmp_path)
    tensors, config = written(tmp_path)
    assert config["quant_method"] == "compressed-tensors" and config["ignore"] == ["lm_head"]
    group = config["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == "channel" and group["input_activations"]["strategy"] == "token"
    for name, module in model.named_modules():
        if isinstance(module, FP8FrozenLinear):
            data, scale = module.quantized
            assert torch.equal(tensors[f"{name}.weight"].view(torch.uint8), data.view(torch.uint8))
            assert tensors[f"{name}.weight_scale"].shape == (module.out_features, 1)
            assert torch.equal(tensors[f"{name}.weight_scale"], scale)
    again = load(tmp_path, True)
    assert again.get_submodule(LINEAR).granularity == "channel"
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, model(tokens()).logits)


def test_transformers_reads_what_octavo_means(folder, tmp_path):
    model = load(folder, fp8_products=False)
    octavo.export_fp8(model, tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        # Theirs rounds inputs to FP8, per token, as `fp8_products` does.
        assert cosine(stock(tokens()).logits, load(folder)(tokens()).logits) > 0.99
        assert cosine(stock(tokens()).logits, model(tokens()).logits) > 0.98


def test_adapters_are_merged_per_channel(folder, tmp_path):
    model = FastLanguageModel.get_peft_model(load(folder), r=4, use_gradient_checkpointing=False).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    model.save_pretrained_merged(tmp_path, save_method="merged_fp8")
    layer = model.get_base_model().get_submodule(LINEAR)
    high = layer.base_layer.dequantize(torch.float32) + layer.get_delta_weight("default").float()
    tensors, config = written(tmp_path)
    assert config["quant_method"] == "compressed-tensors"
    merged = tensors[f"{LINEAR}.weight"].float() * tensors[f"{LINEAR}.weight_scale"]
    largest = high.abs().amax(dim=1, keepdim=True)
    assert ((merged - high).abs() <= largest * 2**-4 + 1e-6).all()  # half a step of E4M3 beside the largest
    with torch.no_grad():
        assert cosine(load(tmp_path, True)(tokens()).logits, model(tokens()).logits) > 0.98


def test_the_other_layout_by_name(folder, tmp_path):
    octavo.export_fp8(load(folder), tmp_path / "blocks", granularity="block")
    assert written(tmp_path / "blocks")[1]["quant_method"] == "fp8"
    octavo.export_fp8(load(folder, "block"), tmp_path / "channels", granularity="channel")
    assert load(tmp_path / "channels", True).get_submodule(LINEAR).granularity == "channel"
    with pytest.raises(ValueError, match="granularity='tensor'"):
        octavo.export_fp8(load(folder), tmp_path / "tensor", granularity="tensor")
