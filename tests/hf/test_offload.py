"""Weights that Accelerate keeps elsewhere, and brings when their own module is called; and weights without values."""

import accelerate
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from decoder_cases import batch, build
from torch import nn

import octavo
from octavo import FastLanguageModel, FP8Linear, FP8TrainingConfig, convert_to_fp8
from octavo.nn.loss import linear_cross_entropy

CPU = torch.device("cpu")
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}


def to_host(model, _folder):
    accelerate.cpu_offload(model, CPU)


def to_disk(model, folder):
    accelerate.disk_offload(model, folder, CPU)


def by_a_map(model, folder):
    """As `device_map` does it: the second layer is on disk."""
    devices = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"), "cpu")
    accelerate.dispatch_model(
        model, {**devices, "lm_head": "cpu", "model.layers.1": "disk"}, main_device="cpu", offload_dir=folder,
        force_hooks=True,
    )  # fmt: skip


def losses(model):
    actual = [model.train()(**batch()).loss]
    with torch.no_grad():
        actual += [model.eval()(**batch()).loss, model(**batch()).logits]
    return actual


def converted(activations):
    model = build()
    return model, convert_to_fp8(model, FP8TrainingConfig.from_recipe("current", activations=activations))


@pytest.mark.parametrize("offload", [to_host, to_disk, by_a_map])
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
def test_offloaded_after_conversion(offload, activations, tmp_path):
    model, report = converted(activations)
    fused = losses(model)
    offload(model, tmp_path)
    assert model.model.layers[1].self_attn.q_proj.weight.is_meta
    actual = losses(model)
    torch.testing.assert_close(actual[:2], fused[:2], rtol=2e-3, atol=0)  # q, k and v have scales of their own now
    assert "model.layers.1.self_attn.q_proj" in report.hooked and "with hooks called one by one" in str(report)
    other, _ = converted(activations)
    for module in other.modules():
        module.register_forward_hook(lambda *_: None)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, losses(other), strict=True))


@pytest.mark.parametrize("offload", [to_host, to_disk, by_a_map])
def test_offloaded_before_conversion(offload, tmp_path):
    """Accelerate calls what the class was: such linears would stay in high precision, whatever a report says."""
    model = build()
    exact = losses(model)
    offload(model, tmp_path)
    with pytest.raises(ValueError, match="another forward is in the place of its own"):
        convert_to_fp8(model)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(losses(model), exact, strict=True))


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_frozen_base_is_not_offloaded(adapters, hooked, tmp_path):
    build(**SIZES, head_dim=64).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    model, _ = FastLanguageModel.from_pretrained(str(tmp_path / "model"), load_in_fp8="channel", tokenizer=False)
    if adapters:
        model = FastLanguageModel.get_peft_model(model, r=4)
    if hooked:  # Accelerate then has two as one
        for module in model.modules():
            if isinstance(module, octavo.nn.frozen.FP8FrozenLinear):
                add_hook_to_module(module, ModelHook())
    accelerate.cpu_offload(model, CPU)
    with pytest.raises(ValueError, match="Accelerate has moved this FP8 weight off its device"):
        model(**batch())


def test_a_weight_without_values_is_refused():
    for name in ("model.layers.0.self_attn", "model.layers.0.self_attn.k_proj", "model.layers.1.mlp", "lm_head"):
        model = build()
        convert_to_fp8(model)
        model.get_submodule(name).to("meta")
        with pytest.raises(RuntimeError, match=r"on the meta device, without values, and .* on cpu"):
            model(**batch())


def test_products_of_weights_without_values_are_refused():
    x = torch.randn(4, 32)
    linear = FP8Linear(32, 16, device="meta")
    frozen = octavo.nn.frozen.FP8FrozenLinear.from_linear(nn.Linear(32, 16)).to("meta")
    for call in (linear, frozen):
        with pytest.raises(RuntimeError, match="on the meta device, without values"):
            call(x)
    with pytest.raises(RuntimeError, match="weight on the meta device, without values, and hidden, labels on cpu"):
        linear_cross_entropy(x, torch.empty(8, 32, device="meta"), torch.zeros(4, dtype=torch.long))
