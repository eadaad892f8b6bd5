"""PEFT's LoRA on a base in FP8: training, merging, saving, in the way people call it."""

import subprocess
import sys

import pytest
import torch
from bounds import cosine
from peft import LoraConfig, PeftModel, get_peft_model
from small import LINEARS, small_llama, tokens
from torch import nn
from transformers import AutoModelForCausalLM

from octavo.decoders import fuse
from octavo.hf.lora import FP8LoraLinear
from octavo.hf.quantizer import OctavoConfig
from octavo.nn.frozen import FROZEN_GRANULARITIES, FP8FrozenLinear


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    small_llama().save_pretrained(folder)
    return folder


def load(folder, granularity="block"):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=OctavoConfig(granularity)
    )


def lora(**options):
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": list(LINEARS), "task_type": "CAUSAL_LM"} | options)


def with_adapters(folder, granularity="block", **options):
    torch.manual_seed(3)
    model = get_peft_model(load(folder, granularity), lora(**options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros would hide half of the gradients
            nn.init.normal_(parameter, std=0.02)
    return model


def train(model, steps=8):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
def test_it_trains_and_every_adapter_moves(checkpoint, granularity):
    model = with_adapters(checkpoint, granularity)
    wrapped = [m for m in model.modules() if isinstance(m, FP8LoraLinear)]
    assert len(wrapped) == 14 and all(isinstance(m.base_layer, FP8FrozenLinear) for m in wrapped)
    bases = [m.base_layer.quantized.data.view(torch.uint8).clone() for m in wrapped]
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    assert before and all("lora_" in name for name in before)
    losses = train(model)
    assert losses[-1] < losses[0] - 0.3
    assert not [name for name, p in model.named_parameters() if name in before and torch.equal(p, before[name])]
    assert all(
        torch.equal(m.base_layer.quantized.data.view(torch.uint8), b) for m, b in zip(wrapped, bases, strict=True)
    )


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
def test_adapter_gradients_layer_by_layer(checkpoint, granularity):
    """Against PEFT's own LoRA on a BF16 base that holds the dequantised weights, with the same upstream gradient."""
    model = with_adapters(checkpoint, granularity)
    for module in [m for m in model.modules() if isinstance(m, FP8LoraLinear)]:
        base = module.base_layer
        plain = nn.Linear(base.in_features, base.out_features, bias=False, dtype=torch.bfloat16)
        plain.weight.data = base.dequantize(torch.bfloat16)
        x = torch.randn(48, base.in_features, dtype=torch.bfloat16, requires_grad=True)
        y = module(x)
        g = torch.randn_like(y)
        y.backward(g)
        a, b = module.matrices("default")
        x_ref = x.detach().clone().requires_grad_()
        a_ref, b_ref = (m.detach().bfloat16().requires_grad_() for m in (a, b))
        y_ref = plain(x_ref) + module.scaling["default"] * (x_ref @ a_ref.T) @ b_ref.T
        y_ref.backward(g)
        for actual, exact in ((y, y_ref), (x.grad, x_ref.grad), (a.grad, a_ref.grad), (b.grad, b_ref.grad)):
            assert cosine(actual, exact) > 0.9975


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
def test_merging_and_the_very_bytes_back(checkpoint, granularity):
    model = with_adapters(checkpoint, granularity)
    train(model, 3)
    model.eval()
    before = model(tokens()).logits
    state = {n: m.quantized for n, m in model.named_modules() if isinstance(m, FP8FrozenLinear)}
    state = {n: (q.data.view(torch.uint8).clone(), q.scale.clone()) for n, q in state.items()}
    model.merge_adapter(safe_merge=True)
    merged = model(tokens()).logits
    assert not torch.equal(merged, before) and cosine(merged, before) > 0.97  # the base is rounded anew
    model.unmerge_adapter()
    assert torch.equal(model(tokens()).logits, before)
    for name, (data, scale) in state.items():
        actual = model.get_submodule(name).quantized
        assert torch.equal(actual.data.view(torch.uint8), data) and torch.equal(actual.scale, scale)
    plain = model.merge_and_unload()
    assert not any(isinstance(m, FP8LoraLinear) for m in plain.modules())
    assert cosine(plain(tokens()).logits, merged) > 0.999  # its MLP is one function again, and rounds once less
    for module in plain.modules():
        fuse.restore(module)
    assert torch.equal(plain(tokens()).logits, merged)


def test_saved_adapters_in_a_fresh_process(checkpoint, tmp_path):
    model = with_adapters(checkpoint)
    train(model, 3)
    model.eval()
    model.save_pretrained(tmp_path)
    torch.save(model(tokens()).logits, tmp_path / "logits.pt")
    code = (
        "import torch\n"
        "from octavo.hf.quantizer import OctavoConfig\n"
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM\n"
        f"base = AutoModelForCausalLM.from_pretrained(r'{checkpoint}', dtype=torch.bfloat16, "
        "quantization_config=OctavoConfig('block'))\n"
        f"model = PeftModel.from_pretrained(base, r'{tmp_path}').eval()\n"
        "assert type(base.model.layers[0].mlp.up_proj).__name__ == 'FP8LoraLinear'\n"
        f"ids = torch.tensor({tokens().tolist()})\n"
        f"assert torch.equal(model(ids).logits, torch.load(r'{tmp_path / 'logits.pt'}'))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    # And where there is no Octavo: they are plain LoRA adapters.
    stock = PeftModel.from_pretrained(small_llama(), tmp_path).eval()
    assert cosine(stock(tokens()).logits, model(tokens()).logits) > 0.97


def test_ways_around_the_fused_product(checkpoint):
    model = with_adapters(checkpoint, lora_dropout=0.5)
    module = next(m for m in model.modules() if isinstance(m, FP8LoraLinear))
    assert module.fusible() is None  # while training, dropout acts on the adapter's input alone
    assert train(model, 2)
    model.eval()
    assert module.fusible() == ["default"]
    with_them = model(tokens()).logits
    with model.disable_adapter():
        assert module.fusible() is None
        without = model(tokens()).logits
    assert torch.equal(without, load(checkpoint)(tokens()).logits) and not torch.equal(with_them, without)
    model.add_adapter("second", lora(r=2))
    model.set_adapter("second")
    assert module.fusible() == ["second"] and model(tokens()).logits.isfinite().all()


def test_gradient_checkpointing(checkpoint):
    plain, checkpointed = with_adapters(checkpoint), with_adapters(checkpoint)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpointed.enable_input_require_grads()
    for model in (plain.train(), checkpointed.train()):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    actual = dict(checkpointed.named_parameters())
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, actual[name].grad), name


def test_what_has_no_fp8_form_is_refused(checkpoint):
    with pytest.raises(ValueError, match="use_dora=True"):
        get_peft_model(load(checkpoint), lora(use_dora=True))
