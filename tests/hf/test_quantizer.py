"""Loading into FP8 by transformers' own door: quantised on the way, or in FP8 already."""

import json
import subprocess
import sys

import accelerate
import pytest
import torch
from bounds import cosine
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small import LINEARS, small_llama, tokens
from torch import nn
from transformers import AutoModelForCausalLM

from octavo import FP8TrainingConfig
from octavo.decoders import fuse
from octavo.decoders.choice import insist_on_fp8
from octavo.hf import quantizer
from octavo.hf.fp8_files import read_layout
from octavo.hf.quantizer import OctavoConfig
from octavo.nn.frozen import (
    FROZEN_GRANULARITIES,
    SCALE_NAME,
    FP8FrozenLinear,
    activation_config,
    quantize_weight,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    small_llama().save_pretrained(folder)
    return folder


def load(folder, config=None):
    options = {} if config is None else {"quantization_config": config}  # None would be taken for an answer
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


def frozen(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, FP8FrozenLinear)}


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
def test_weights_are_quantised_as_they_are_read(checkpoint, granularity):
    original = small_llama()
    model = load(checkpoint, OctavoConfig(granularity))
    assert {name.rsplit(".", 1)[1] for name in frozen(model)} == set(LINEARS) and len(frozen(model)) == 14
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight.dtype == torch.bfloat16
    for name, module in frozen(model).items():
        expected = quantize_weight(original.get_submodule(name).weight, granularity)
        assert torch.equal(module.quantized.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(module.quantized.scale, expected.scale)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert cosine(model(tokens()).logits, original(tokens()).logits) > 0.98


def test_nothing_is_left_on_the_meta_device_or_in_two_copies(checkpoint):
    model = load(checkpoint, OctavoConfig("block"))
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])
    linears = sum(module.in_features * module.out_features for module in frozen(model).values())
    stored = sum(p.nbytes for name, p in model.named_parameters() if any(part in name for part in LINEARS))
    assert stored < 1.01 * linears


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
def test_saved_and_loaded_again(checkpoint, granularity, tmp_path):
    model = load(checkpoint, OctavoConfig(granularity))
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        actual = file.get_slice("model.layers.0.mlp.up_proj.weight")
        assert actual.get_dtype() == "F8_E4M3"
    again = load(tmp_path)
    assert len(frozen(again)) == 14
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


def test_in_a_fresh_process(checkpoint, tmp_path):
    model = load(checkpoint, OctavoConfig("block"))
    model.save_pretrained(tmp_path)
    torch.save(model(tokens()).logits, tmp_path / "logits.pt")
    code = (
        "import torch, octavo.hf.quantizer\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained(r'{tmp_path}', dtype=torch.bfloat16)\n"
        f"ids = torch.tensor({tokens().tolist()})\n"
        f"assert torch.equal(model(ids).logits, torch.load(r'{tmp_path / 'logits.pt'}'))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def make_fp8_checkpoint(folder, granularity):
    """As transformers' own quantiser writes it: FP8 by its own code where it can (whole blocks only), else by ours."""
    model = small_llama(hidden_size=256, intermediate_size=384, head_dim=64)
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    for name in [key for key in state if any(f"{part}.weight" in key for part in LINEARS)]:
        data, scale = quantize_weight(state[name], granularity)
        state[name], state[name.removesuffix("weight") + SCALE_NAME] = data, scale
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if granularity == "block":
        config["quantization_config"]["weight_block_size"] = [128, 128]
    (folder / "config.json").write_text(json.dumps(config))
    return state


@pytest.mark.parametrize("granularity", ["block", "tensor"])
def test_an_fp8_checkpoint_goes_in_as_it_is(granularity, tmp_path):
    state = make_fp8_checkpoint(tmp_path, granularity)
    model = load(tmp_path, OctavoConfig("channel"))  # what the checkpoint is wins
    assert len(frozen(model)) == 14
    for name, module in frozen(model).items():
        assert module.granularity == granularity
        assert torch.equal(module.quantized.data.view(torch.uint8), state[f"{name}.weight"].view(torch.uint8))
        assert torch.equal(module.quantized.scale, state[f"{name}.{SCALE_NAME}"])
    if granularity == "block":  # the library's own reading, dequantised to BF16 for want of a GPU
        stock = load(tmp_path)
        assert type(stock.model.layers[0].mlp.up_proj) is nn.Linear
        assert cosine(model(tokens()).logits, stock(tokens()).logits) > 0.98
        torch.testing.assert_close(
            stock.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.dequantize()
        )


@pytest.mark.parametrize("strategy", ["channel", "block", "tensor"])
def test_compressed_tensors(strategy, tmp_path):
    """As llm-compressor and vLLM write it: other names, scales in BF16."""
    state = make_fp8_checkpoint(tmp_path, strategy)
    state = {
        name.replace(SCALE_NAME, "weight_scale"): value.bfloat16() if name.endswith(SCALE_NAME) else value
        for name, value in state.items()
    }
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*layers.1.mlp.*"],
    }
    # What is left alone is there in high precision.
    original = small_llama(hidden_size=256, intermediate_size=384, head_dim=64)
    for name in [key for key in state if "layers.1.mlp" in key]:
        del state[name]
    state |= {name: value for name, value in original.state_dict().items() if "layers.1.mlp" in name}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(tmp_path, OctavoConfig())
    assert len(frozen(model)) == 11 and type(model.model.layers[1].mlp.up_proj) is nn.Linear
    module = model.model.layers[0].mlp.up_proj
    assert module.granularity == strategy
    assert torch.equal(
        module.quantized.scale.flatten(), state["model.layers.0.mlp.up_proj.weight_scale"].float().flatten()
    )
    assert cosine(model(tokens()).logits, original(tokens()).logits) > 0.95


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method='gptq'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "one group of weights in FP8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}}},
            },
            "one group of weights in FP8",
        ),
    ],
)
def test_what_octavo_does_not_read(layout, message):
    with pytest.raises(ValueError, match=message):
        read_layout(layout)


def test_bad_configurations():
    with pytest.raises(ValueError, match="granularity='row'"):
        OctavoConfig("row")
    with pytest.raises(ValueError, match="bits=4: no such field"):
        OctavoConfig(bits=4)


def test_a_typo_in_skip_is_an_error(checkpoint):
    with pytest.raises(ValueError, match=r"skip='dwon_proj': LlamaForCausalLM has no module"):
        load(checkpoint, OctavoConfig("block", skip=["dwon_proj"]))


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("granularity", ["channel", "block"])
def test_its_groups_are_fused_and_still_give_what_the_modules_give(checkpoint, tmp_path, granularity, biases):
    """Those that can be one: of these, blocks would straddle two weights, and an MLP with biases has no kernel."""
    if biases:
        biased, checkpoint = small_llama(attention_bias=True, mlp_bias=True), tmp_path
        for name, parameter in biased.named_parameters():
            if name.endswith(".bias"):
                nn.init.normal_(parameter, std=0.5)
        biased.save_pretrained(checkpoint)
    model = load(checkpoint, OctavoConfig(granularity))
    fused = any("MLP with its activation in one function (2)" in line for line in model.octavo_fused)
    assert fused == (granularity == "channel" and not biases)
    together = model(tokens()).logits
    for module in model.modules():
        fuse.restore(module)
    torch.testing.assert_close(together, model(tokens()).logits, rtol=0, atol=0.05)


def test_products_in_fp8_where_they_pay(checkpoint, monkeypatch):
    """On a GPU; nobody asks about a width of 400 or less, such as this one's, anywhere else."""
    assert all(module.fp8_products for module in frozen(load(checkpoint, OctavoConfig("channel"))).values())
    monkeypatch.setattr("octavo.hf.quantizer.has_fp8_tensor_cores", lambda _device: True)
    planned = load(checkpoint, OctavoConfig("channel"))
    assert not any(module.fp8_products for module in frozen(planned).values())
    assert "FP8 does not pay at a width of" in planned.octavo_fused[-1]
    head = OctavoConfig("channel", fp8=activation_config("channel").replace(fp8_head=True))  # says nothing of the rest
    assert not any(module.fp8_products for module in frozen(load(checkpoint, head)).values())
    asked = {"fp8_products": True}, {"fp8": FP8TrainingConfig.from_recipe("channel")}
    for how in asked:
        assert all(module.fp8_products for module in frozen(load(checkpoint, OctavoConfig("channel", **how))).values())
    insist_on_fp8(planned)
    insist_on_fp8(planned)
    assert all(module.fp8_products for module in frozen(planned).values())
    assert "since then, products in FP8" in planned.octavo_fused[-1] and "since" not in planned.octavo_fused[-2]
    refused = load(checkpoint, OctavoConfig("channel", fp8_products=False))
    insist_on_fp8(refused)
    assert not any(module.fp8_products for module in frozen(refused).values())


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
def test_products_in_high_precision(checkpoint, granularity, tmp_path):
    model = load(checkpoint, OctavoConfig(granularity, fp8_products=False))
    assert len(frozen(model)) == 14 and not any(module.fp8_products for module in frozen(model).values())
    said = " ".join(model.octavo_fused)
    assert "by FP8 weights (14)" in said and "q, k and v in one product (2)" in said
    reference = small_llama()
    for name, module in frozen(model).items():
        reference.get_submodule(name).weight.data.copy_(module.dequantize())
    expected = reference(tokens()).logits
    assert cosine(model(tokens()).logits, expected) > 0.9999
    model.save_pretrained(tmp_path)
    again = load(tmp_path)  # by what config.json says
    assert not any(module.fp8_products for module in frozen(again).values())
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    for asked in (None, True):  # not said, it is as the checkpoint says
        again = load(tmp_path, OctavoConfig(granularity, fp8_products=asked))
        assert all(module.fp8_products is (asked is True) for module in frozen(again).values())
    with pytest.raises(ValueError, match="fp8_products='no': True, False, or 'dgrad' for FP8 in backward alone"):
        OctavoConfig("block", fp8_products="no")
    with pytest.raises(ValueError, match="fp8 with fp8_products=False"):
        OctavoConfig("block", FP8TrainingConfig(), fp8_products=False)


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
def test_fp8_products_in_backward_alone(checkpoint, granularity, tmp_path):
    model = load(checkpoint, OctavoConfig(granularity, fp8_products="dgrad"))
    assert all(module.fp8_products and not module.fp8_forward for module in frozen(model).values())
    assert "FP8 products in backward alone (14)" in model.octavo_fused
    assert {entry.reason for entry in model.octavo_report.in_fp8} == {
        "backward alone: its weight is dequantised for the product of forward"
    }
    exact = load(checkpoint, OctavoConfig(granularity, fp8_products=False))
    assert cosine(model(tokens()).logits, exact(tokens()).logits) > 0.9999
    model.save_pretrained(tmp_path)
    again = load(tmp_path)  # by what config.json says
    assert all(module.fp8_products and not module.fp8_forward for module in frozen(again).values())
    insist_on_fp8(again)
    assert not any(module.fp8_forward for module in frozen(again).values())


def test_offloading_by_accelerate_is_refused(checkpoint):
    model = load(checkpoint, OctavoConfig("channel"))
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(ValueError, match="Accelerate has moved this FP8 weight off its device"):
        model(tokens())


def test_weights_are_loaded_onto_the_gpu_of_this_process(monkeypatch):
    loader = quantizer.OctavoQuantizer(OctavoConfig())
    assert loader.update_device_map(None) is None  # torch sees no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(quantizer, "own_gpu", lambda: 3)
    assert loader.update_device_map(None) == {"": 3}
    assert loader.update_device_map("cpu") == "cpu"
    monkeypatch.setattr(quantizer, "is_fsdp_enabled", lambda: True)
    assert loader.update_device_map(None) is None


def test_skip(checkpoint):
    model = load(checkpoint, OctavoConfig("block", skip=["down_proj", "model.layers.0.*"]))
    attention, mlp = LINEARS[:4], LINEARS[4:6]
    assert set(frozen(model)) == {f"model.layers.1.self_attn.{part}" for part in attention} | {
        f"model.layers.1.mlp.{part}" for part in mlp
    }
    with pytest.raises(ValueError, match="no linear to load into FP8"):
        load(checkpoint, OctavoConfig("block", skip=["*"]))


def test_casting_the_whole_model_does_no_harm(checkpoint):
    model = load(checkpoint, OctavoConfig("block"))
    before = [module.dequantize(torch.float32) for module in frozen(model).values()]
    model.to(torch.float16).to(torch.bfloat16)
    assert all(torch.equal(w, m.dequantize(torch.float32)) for w, m in zip(before, frozen(model).values(), strict=True))


def test_training_by_hand_says_how(checkpoint):
    model = load(checkpoint, OctavoConfig("block"))
    with pytest.raises(ValueError, match="full_finetuning=True"):
        model.requires_grad_(True)
