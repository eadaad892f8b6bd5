"""Adapters of which only some parts are trained, on an FP8 base: the rest get the gradients they would have anyway."""

import peft
import pytest
import torch
from peft.optimizers import create_lorafa_optimizer
from small import LINEARS, small_llama, tokens
from torch import nn

from octavo import FastLanguageModel

WHOLE_BLOCKS = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}  # so that groups are fused


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    small_llama(**WHOLE_BLOCKS).save_pretrained(path)
    return str(path)


def adapted(folder, granularity="block", products=None, **options):
    base, _ = FastLanguageModel.from_pretrained(folder, load_in_fp8=granularity, fp8_products=products, tokenizer=False)
    model = FastLanguageModel.get_peft_model(base, r=4, **{"use_gradient_checkpointing": False} | options)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model.train()


def gradients(model):
    model.zero_grad()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


PARTS = {
    "every A": lambda name: "lora_A" in name,
    "every B": lambda name: "lora_B" in name,
    "A of v and up, B of q and down": lambda name: any(
        part in name for part in ("v_proj.lora_A", "up_proj.lora_A", "q_proj.lora_B", "down_proj.lora_B")
    ),
    "the first layer": lambda name: "layers.0." in name,
    "the last layer": lambda name: "layers.1." in name,
    "A, and all of the first layer": lambda name: "lora_A" in name or "layers.0." in name,
    "attention": lambda name: "self_attn" in name,
    "the MLP": lambda name: "mlp" in name,
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("granularity", "products"), [("block", None), ("channel", None), ("tensor", False)])
def test_what_is_trained_gets_the_gradients_it_would_have_anyway(folder, granularity, products, checkpointing):
    model = adapted(folder, granularity, products, use_gradient_checkpointing=checkpointing)
    everything = gradients(model)
    assert all(gradient.abs().max() > 0 for gradient in everything.values())
    for what, is_frozen in PARTS.items():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.requires_grad_(not is_frozen(name))
        actual = gradients(model)
        assert actual.keys() == {name for name in everything if not is_frozen(name)}, what
        different = [name for name in actual if not torch.equal(actual[name], everything[name])]
        assert not different, (what, different)


@pytest.mark.parametrize("granularity", ["block", "channel", "tensor"])
def test_lora_fa(folder, granularity):
    model = adapted(folder, granularity)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}
    optimizer = create_lorafa_optimizer(model, r=4, lora_alpha=16, lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    moved = {name for name, p in model.named_parameters() if name in before and not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_B" in name}


def test_some_adapters_disabled_or_of_another_rank(folder):
    """Groups of which only some members have an active adapter, or have adapters of different ranks."""
    model = adapted(folder, target_modules=["q_proj", "up_proj"], rank_pattern={"q_proj": 2})
    model.add_adapter("more", peft.LoraConfig(r=3, target_modules=list(LINEARS), init_lora_weights=False))
    for active in (["default"], ["more"], ["default", "more"]):
        model.base_model.set_adapter(active)
        actual = gradients(model)
        names = {name for name, _ in model.named_parameters() if any(f".{key}." in name for key in active)}
        assert actual.keys() == names and all(gradient.isfinite().all() for gradient in actual.values()), active
        assert all(gradient.abs().max() > 0 for name, gradient in actual.items() if "lora_B" in name)


def test_a_bias_beside_adapters(tmp_path):
    small_llama(**WHOLE_BLOCKS, attention_bias=True).save_pretrained(tmp_path)
    model = adapted(str(tmp_path), bias="lora_only")
    everything = gradients(model)
    assert any(name.endswith(".bias") for name in everything)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.requires_grad_(False)
    actual = gradients(model)
    assert actual.keys() == {name for name in everything if name.endswith(".bias")}
    assert all(torch.equal(actual[name], everything[name]) for name in actual)
