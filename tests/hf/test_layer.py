"""Decoder layers whose norms are computed with the products that follow them, frozen or trained."""

import pytest
import torch
from bounds import cosine
from peft import LoraConfig, get_peft_model
from small import LINEARS, small_llama, tokens
from torch import nn
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from octavo import FastLanguageModel, FP8TrainingConfig, convert_to_fp8, restore
from octavo.decoders import fuse
from octavo.decoders.classes import is_fused
from octavo.nn.frozen import FP8FrozenLinear

SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}  # whole blocks
SIZES["rms_norm_eps"] = 1e-5  # Llama 3's; transformers has 1e-6 where nothing is said
FAMILIES = {"mistral": (MistralConfig, MistralForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def checkpoint(folder, family="llama"):
    llama = small_llama(**SIZES)
    for name, parameter in llama.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    if family != "llama":
        config, cls = FAMILIES[family]
        names = (*SIZES, "vocab_size", "num_hidden_layers", "num_attention_heads")
        options = {name: getattr(llama.config, name) for name in names}
        options |= {"num_key_value_heads": 2, "tie_word_embeddings": False, "pad_token_id": 0}
        model = cls(config(**options)).to(torch.bfloat16)
        model.load_state_dict(llama.state_dict(), strict=False)
        llama = model
    llama.save_pretrained(folder)
    return folder


def load(folder, granularity, targets=LINEARS, checkpointing=False):
    base, _ = FastLanguageModel.from_pretrained(str(folder), load_in_fp8=granularity, tokenizer=False)
    model = FastLanguageModel.get_peft_model(
        base, r=4, target_modules=list(targets), use_gradient_checkpointing=checkpointing
    )
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model.train()


def layers_of(model):
    return model.get_base_model().model.layers


def apart(model):
    """The same layers as transformers computes them, with the same fused products."""
    for layer in layers_of(model):
        fuse.restore(layer)
    return model


def in_float32(folder, model, targets):
    """Stock transformers and PEFT, with the same weights, dequantised, and the same adapters."""
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, FP8FrozenLinear):
            exact.get_submodule(name.removesuffix(".base_layer")).weight.data = module.dequantize(torch.float32)
    exact = get_peft_model(exact, LoraConfig(r=4, lora_alpha=16, target_modules=list(targets), task_type="CAUSAL_LM"))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in exact.named_parameters():
        if parameter.requires_grad:
            parameter.data = trained[name].data.float()
    return exact.train()


def step(model):
    model.zero_grad()
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize("family", ["llama", *FAMILIES])
@pytest.mark.parametrize("targets", [LINEARS, LINEARS[:1]], ids=["all", "q"])
def test_as_transformers_computes_it(tmp_path, granularity, family, targets):
    model = load(checkpoint(tmp_path, family), granularity, targets)
    assert all(is_fused(layer) for layer in layers_of(model))
    exact = step(in_float32(tmp_path, model, targets))
    mine = step(model)
    theirs = step(apart(model))
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-4, atol=0)
    errors = []
    for gradients in (mine, theirs):
        parts = zip(gradients[1:], exact[1:], strict=True)
        errors.append(torch.tensor([1 - cosine(actual, expected) for actual, expected in parts]).mean())
    assert errors[0] < 1.1 * errors[1]


def saved_bytes(model):
    saved = {}

    def save(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(input_ids=tokens(8, 64), labels=tokens(8, 64))
    return sum(saved.values())


def test_the_input_of_a_norm_is_not_saved(tmp_path):
    model = load(checkpoint(tmp_path), "channel")
    together = saved_bytes(model)
    residuals = 2 * 2 * 8 * 64 * SIZES["hidden_size"] * 2  # layers, norms, tokens, width, bytes
    assert saved_bytes(apart(model)) - together > 0.9 * residuals


def test_one_who_watches_sees_what_transformers_would_show(tmp_path):
    model = load(checkpoint(tmp_path), "channel")
    seen = []
    first = layers_of(model)[0]
    handles = [
        module.register_forward_hook(lambda module, _inputs, output: seen.append((type(module).__name__, output)))
        for module in (first.input_layernorm, first.post_attention_layernorm)
    ]
    pre = first.mlp.register_forward_pre_hook(lambda _module, inputs: seen.append(("mlp", inputs[0])))
    watched = step(model)
    assert [name for name, _ in seen] == ["LlamaRMSNorm", "LlamaRMSNorm", "mlp"]
    assert torch.equal(seen[1][1], seen[2][1])
    for handle in (*handles, pre):
        handle.remove()
    for actual, expected in zip(step(model), watched, strict=True):
        assert cosine(actual, expected) > 0.9995


def test_a_trained_norm_gets_its_gradient(tmp_path):
    model = load(checkpoint(tmp_path), "channel")
    norms = [p for name, p in model.named_parameters() if "layernorm" in name]
    for norm in norms:
        norm.requires_grad_(True)
    step(model)
    assert len(norms) == 4 and all(norm.grad is not None and norm.grad.any() for norm in norms)


@pytest.mark.parametrize("checkpointing", [True, "unsloth"])
def test_with_gradient_checkpointing(tmp_path, checkpointing):
    plain = step(load(checkpoint(tmp_path), "channel"))
    for actual, expected in zip(step(load(tmp_path, "channel", checkpointing=checkpointing)), plain, strict=True):
        assert cosine(actual, expected) > 0.9999


def test_compiled_without_a_break(tmp_path):
    torch._dynamo.reset()
    model = load(checkpoint(tmp_path), "channel")
    eager = step(model)
    for layer in layers_of(model):
        layer.compile(backend="aot_eager", fullgraph=True)
    for actual, expected in zip(step(model), eager, strict=True):
        assert cosine(actual, expected) > 0.9999


def test_generating_with_a_cache(tmp_path):
    model = load(checkpoint(tmp_path), "channel").eval()
    first = model.generate(input_ids=tokens(1, 5), max_new_tokens=6, do_sample=False)
    again = apart(model).generate(input_ids=tokens(1, 5), max_new_tokens=6, do_sample=False)
    assert torch.equal(first, again)


def trained(activations, recipe="delayed", **changes):
    model = small_llama(**SIZES, dtype=torch.float32, **changes)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.manual_seed(len(name))
            nn.init.uniform_(parameter, 0.5, 1.5)
    exact = step(model)
    report = convert_to_fp8(model, FP8TrainingConfig.from_recipe(recipe, activations=activations))
    return model.train(), report, exact


def test_full_fine_tuning_with_fp8_activations():
    errors, losses, saved = [], [], []
    for activations in ("bf16", "fp8"):
        model, report, exact = trained(activations)
        assert ("norms with the products that follow them (2)" in report.fused) == (activations == "fp8")
        actual = step(model)
        parts = zip(actual[1:], exact[1:], strict=True)
        errors.append(torch.tensor([1 - cosine(a, b) for a, b in parts]))
        losses.append(actual[0])
        saved.append(saved_bytes(model))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    # What rounding gate and up adds is small beside what FP8 has put off already; norms' weights are among these.
    assert errors[1].mean() < 1.1 * errors[0].mean() and (errors[1] < 1.3 * errors[0]).all()
    tokens_, itemsize = 8 * 64, 4  # bytes: this one is in FP32
    residuals = 2 * 2 * tokens_ * SIZES["hidden_size"] * itemsize
    gate_up = 2 * tokens_ * 2 * SIZES["intermediate_size"] * (itemsize - 1)
    assert saved[0] - saved[1] > 0.9 * (residuals + gate_up)


@pytest.mark.parametrize("recipe", ["block", "channel"])
def test_several_scales_keep_norms_apart(recipe):
    model, report, _ = trained("fp8", recipe)
    assert any("norms apart" in line for line in report.fused)
    assert not any("norms with the products" in line for line in report.fused)
    step(model)


def test_full_fine_tuning_compiled_and_restored():
    torch._dynamo.reset()
    model, _, exact = trained("fp8")
    eager = step(model)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for actual, expected in zip(step(model), eager, strict=True):
        assert cosine(actual, expected) > 0.999
    for layer in model.model.layers:
        layer._compiled_call_impl = None
    restore(model)
    assert not any(is_fused(layer) for layer in model.model.layers)
    for actual, expected in zip(step(model), exact, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_a_wider_residual_stream_stays_wide_under_autocast(tmp_path):
    base, _ = FastLanguageModel.from_pretrained(
        str(checkpoint(tmp_path)), load_in_fp8="channel", tokenizer=False, dtype=torch.float32
    )
    model = FastLanguageModel.get_peft_model(base, r=4, use_gradient_checkpointing=False)
    seen = []
    for layer in layers_of(model):
        layer.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert seen == [torch.float32] * 2


def test_two_adapters_at_once(tmp_path):
    model = load(checkpoint(tmp_path), "channel")
    model.add_adapter("second", model.peft_config["default"])
    for name, parameter in model.named_parameters():
        if "lora_B.second" in name:
            nn.init.normal_(parameter, std=0.02)
    model.base_model.set_adapter(["default", "second"])
    mine = step(model)
    for actual, expected in zip(mine, step(apart(model)), strict=True):
        assert cosine(actual, expected) > 0.995


TRAINED_PARTS = {
    "all but the embedding": lambda name: "embed" not in name,
    "norms alone": lambda name: "norm" in name,
    "linears alone": lambda name: "proj" in name,
    "norms of the first layer, linears of the second": lambda name: (
        ("layers.0." in name and "norm" in name) or ("layers.1." in name and "proj" in name)
    ),
    "norms and attention": lambda name: "norm" in name or "self_attn" in name,
    "down alone": lambda name: "down_proj" in name,
    "the last layer": lambda name: "layers.1." in name,
}


@pytest.mark.parametrize("activations", ["bf16", "fp8"])
def test_part_of_a_model_gets_the_gradients_it_would_have_anyway(activations):
    """Such as a trained norm behind a frozen embedding, whose input needs no gradient, but is saved for its weight."""
    model, _, _ = trained(activations)
    step(model)  # scales are made
    step(model)
    everything = {name: p.grad for name, p in model.named_parameters()}
    for what, is_trained in TRAINED_PARTS.items():
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_trained(name))
        step(model)
        for name, parameter in model.named_parameters():
            if not is_trained(name):
                assert parameter.grad is None, (what, name)
            else:
                torch.testing.assert_close(
                    parameter.grad, everything[name], rtol=1e-4, atol=1e-7, msg=f"{what}: {name}"
                )


@pytest.mark.parametrize("granularity", ["channel", "block"])
def test_norms_trained_beside_adapters(tmp_path, granularity):
    model = load(checkpoint(tmp_path), granularity)
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            parameter.requires_grad_(True)
    exact = in_float32(tmp_path, model, LINEARS)
    for name, parameter in exact.named_parameters():
        if "layernorm" in name:
            parameter.requires_grad_(True)
    step(exact)
    step(model)
    expected = dict(exact.named_parameters())
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            assert cosine(parameter.grad, expected[name].grad) > 0.97, name


@pytest.mark.parametrize("name", ["self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
def test_merged_between_forward_and_backward(tmp_path, name):
    """Gradients would be by other weights than the loss; autograd refuses that for any weight."""
    model = load(checkpoint(tmp_path), "channel")
    loss = model(input_ids=tokens(), labels=tokens()).loss
    layers_of(model)[1].get_submodule(name).merge()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    layers_of(model)[1].get_submodule(name).unmerge()
    step(model)
