"""Merging, unmerging and exporting several adapters on an FP8 base, against stock PEFT with the same weights."""

import copy

import peft
import pytest
import torch
from bounds import cosine
from safetensors.torch import load_file, save_file
from small import LINEARS, small_llama, tokens
from test_quantizer import make_fp8_checkpoint
from torch import nn
from transformers import AutoModelForCausalLM

import octavo
from octavo import FastLanguageModel, OctavoConfig
from octavo.hf.lora import FP8LoraLinear
from octavo.nn.frozen import FROZEN_GRANULARITIES, SCALE_NAME, FP8FrozenLinear, quantize_weight

WHOLE_BLOCKS = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}  # so that groups are fused
ADAPTERS = {
    "default": {"r": 4, "lora_alpha": 4, "use_rslora": True},  # × 2
    "second": {"r": 8, "lora_alpha": 4, "target_modules": ["q_proj", "up_proj", "down_proj"]},  # × ½
    "third": {"r": 2, "lora_alpha": 6, "alpha_pattern": {"v_proj": 1}, "rank_pattern": {"gate_proj": 3}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    small_llama(**WHOLE_BLOCKS).save_pretrained(path)
    return str(path)


def add_adapters(base):
    for name, options in ADAPTERS.items():
        config = peft.LoraConfig(**{"target_modules": list(LINEARS), "task_type": "CAUSAL_LM"} | options)
        if name == "default":
            model = peft.get_peft_model(base, config)
        else:
            model.add_adapter(name, config)
    return model.eval()


def fill(model):
    torch.manual_seed(5)
    for name, parameter in sorted(model.named_parameters()):
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape) * 0.05
    return model


def adapted(folder, granularity="channel", **options):
    base, _ = FastLanguageModel.from_pretrained(folder, load_in_fp8=granularity, tokenizer=False, **options)
    return fill(add_adapters(base))


def twin(model):
    """Stock transformers and PEFT in FP32, with the weights that the FP8 base stands for."""
    base = small_llama(dtype=torch.float32, **WHOLE_BLOCKS)
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, FP8FrozenLinear):
            base.get_submodule(name.removesuffix(".base_layer")).weight.data = module.dequantize(torch.float32)
    return fill(add_adapters(base))


def weights(model):
    """Of every FP8 linear, as bytes and scales."""
    actual = {name: m.quantized for name, m in model.named_modules() if isinstance(m, FP8FrozenLinear)}
    return {name: (q.data.view(torch.uint8).clone(), q.scale.clone()) for name, q in actual.items()}


def same(mine, theirs):
    return mine.keys() == theirs.keys() and all(
        torch.equal(a, b) for name in mine for a, b in zip(mine[name], theirs[name], strict=True)
    )


def delta_is(model, plain, names):
    """Whether the FP8 weights are what they were, plus these adapters as stock PEFT has them."""
    for name, module in model.named_modules():
        if isinstance(module, FP8LoraLinear):
            theirs = plain.get_submodule(name)
            expected = theirs.base_layer.weight.detach().clone()
            for adapter in names:
                if adapter in theirs.lora_A:
                    expected += theirs.get_delta_weight(adapter).detach()
            if cosine(module.base_layer.dequantize(torch.float32), expected) < 0.999:
                return False
    return True


def logits(model):
    with torch.no_grad():
        return model(tokens()).logits


ACTIVE = [["default"], ["second"], ["third"], ["default", "second"], ["second", "default", "third"]]


@pytest.mark.parametrize("granularity", ["block", "channel"])
def test_active_adapters_each_with_its_own_factor(folder, granularity):
    model = adapted(folder, granularity, fp8_products=False)  # so that nothing but the adapters differs
    plain = twin(model)
    for names in ACTIVE:
        for each in (model, plain):
            each.base_model.set_adapter(names)
        assert cosine(logits(model), logits(plain)) > 0.9995, names
    for each in (model, plain):
        for module in each.modules():
            if hasattr(module, "set_scale") and "third" in module.scaling:
                module.set_scale("third", 3.0)
    assert cosine(logits(model), logits(plain)) > 0.9995


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
def test_several_merged_and_the_very_bytes_back(folder, granularity):
    model = adapted(folder, granularity)
    plain, before, first = twin(model), weights(model), logits(model)
    for names in (["default", "second"], ["third", "second", "default"]):
        model.merge_adapter(names)
        assert delta_is(model, plain, names) and not delta_is(model, plain, names[:1])
        layer = model.base_model.model.model.layers[0]
        assert layer.mlp.up_proj.merged_adapters == names
        model.unmerge_adapter()
        assert same(weights(model), before) and not layer.mlp.up_proj.merged
        assert torch.equal(logits(model), first)
    model.merge_adapter(["default"])
    model.merge_adapter(["second"])  # one after the other
    assert delta_is(model, plain, ["default", "second"])
    model.unmerge_adapter()
    assert same(weights(model), before)


def test_what_comes_back_is_what_was_there_before_the_last_merge(folder):
    model = adapted(folder)
    model.merge_adapter()
    model.unmerge_adapter()
    for module in model.modules():  # another base in between
        if isinstance(module, FP8FrozenLinear):
            module.load_state_dict({"weight": torch.randn(module.weight.shape)}, strict=False)
    before = weights(model)
    model.merge_adapter()
    assert not same(weights(model), before)
    model.unmerge_adapter()
    assert same(weights(model), before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_safe_merging_looks_at_what_it_merges(folder, value):
    model = adapted(folder)
    before = weights(model)
    broken = model.base_model.model.model.layers[0].self_attn.q_proj  # the first that is merged
    broken.lora_B["second"].weight.data[3, 1] = value
    with pytest.raises(ValueError, match="second seems to be broken"):
        model.merge_adapter(["second"], safe_merge=True)
    assert same(weights(model), before) and not broken.merged
    model.merge_adapter(["default"], safe_merge=True)
    assert broken.merged_adapters == ["default"]


@pytest.mark.parametrize("method", ["merged_16bit", "merged_fp8"])
@pytest.mark.parametrize("names", [["default"], ["default", "second"]])
def test_what_is_exported_is_what_was_active_once(folder, tmp_path, method, names):
    """Merged before or not, each adapter is in the checkpoint once."""
    model = adapted(folder, "block")
    model.base_model.set_adapter(names)
    expected = {}
    for name, module in twin(model).named_modules():
        if hasattr(module, "lora_A") and isinstance(getattr(module, "base_layer", None), nn.Linear):
            key = name.removeprefix("base_model.model.") + ".weight"
            deltas = [module.get_delta_weight(adapter) for adapter in names if adapter in module.lora_A]
            expected[key] = (module.base_layer.weight + sum(deltas)).detach()
    for merged in (False, True):
        if merged:
            model.merge_adapter(names)
        before = weights(model)
        FastLanguageModel.save_pretrained_merged(model, tmp_path / "out", save_method=method)
        assert same(weights(model), before)
        state = load_file(tmp_path / "out" / "model.safetensors")
        assert not [name for name in state if "lora" in name]
        for name, exact in expected.items():
            actual = state[name].float()
            if method == "merged_fp8":
                scale = state[name.replace("weight", SCALE_NAME)]
                actual = (
                    actual
                    * scale.repeat_interleave(128, 0)[: exact.shape[0]].repeat_interleave(128, 1)[:, : exact.shape[1]]
                )
            error = (actual - exact).norm() / exact.norm()
            assert error < 0.04, (name, merged)  # one rounding to FP8; an adapter more, or less, is 10 % and more
    model.unmerge_adapter()


@pytest.mark.parametrize("method", ["merged_16bit", "merged_fp8"])
def test_all_of_a_model_is_exported_and_nothing_of_another(tmp_path, method):
    """Biases are, the head is as it was, and parts of a larger model that was there before are gone."""
    plain = small_llama(**WHOLE_BLOCKS, attention_bias=True)
    for name, parameter in plain.named_parameters():
        if name.endswith(".bias"):
            nn.init.normal_(parameter, std=0.5)
    plain.save_pretrained(tmp_path / "in")
    model, _ = FastLanguageModel.from_pretrained(str(tmp_path / "in"), load_in_fp8="block", tokenizer=False)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model-00001-of-00002.safetensors").write_bytes(b"of another")
    FastLanguageModel.save_pretrained_merged(model, tmp_path / "out", save_method=method)
    assert [file.name for file in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name in state if SCALE_NAME not in name} == set(plain.state_dict())
    for name, value in plain.state_dict().items():
        if not name.endswith("proj.weight"):
            assert torch.equal(state[name], value), name


def test_what_is_disabled_is_not_exported_even_if_it_was_merged(folder, tmp_path):
    model = adapted(folder, "block")
    before = weights(model)
    model.merge_adapter(["default"])
    with model.disable_adapter():
        FastLanguageModel.save_pretrained_merged(model, tmp_path / "out", save_method="merged_fp8")
    assert same(weights(model), before)
    state = load_file(tmp_path / "out" / "model.safetensors")
    for name, (data, _) in before.items():
        key = name.removeprefix("base_model.model.").removesuffix(".base_layer")
        assert torch.equal(state[f"{key}.weight"].view(torch.uint8), data)


def test_merging_and_unloading_leaves_a_base_in_fp8(folder):
    model = adapted(folder)
    plain = twin(model)
    for each in (model, plain):
        each.base_model.set_adapter(["default", "third"])
    merged = model.merge_and_unload(adapter_names=["default", "third"])
    assert not any(isinstance(m, FP8LoraLinear) for m in merged.modules())
    assert cosine(logits(merged), logits(plain.merge_and_unload(adapter_names=["default", "third"]))) > 0.97


def e5m2_checkpoint(folder, granularity):
    make_fp8_checkpoint(folder, granularity)
    original = small_llama(**WHOLE_BLOCKS)
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if name.endswith(SCALE_NAME)]:
        key = name.replace(SCALE_NAME, "weight")
        state[key], state[name] = quantize_weight(original.get_parameter(key), granularity, "E5M2")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return original


@pytest.mark.parametrize("granularity", ["block", "tensor"])
def test_a_base_in_e5m2(granularity, tmp_path):
    """Its bytes mean other numbers: loaded, in state dicts, merged, saved and exported."""
    original = e5m2_checkpoint(tmp_path, granularity)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=OctavoConfig())
    linear = model.model.layers[0].mlp.up_proj
    assert linear.quantized.data.dtype == torch.float8_e5m2
    assert cosine(logits(model), logits(original)) > 0.95
    actual = model.state_dict()
    assert actual["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e5m2
    # Into a copy whose weights are others, and again by bytes alone, as sharded checkpoints hold them.
    for as_bytes in (False, True):
        again = copy.deepcopy(model)
        for module in again.modules():
            if isinstance(module, FP8FrozenLinear):
                module.set_weight(quantize_weight(torch.randn(module.weight.shape), module.granularity, "E5M2"))
        assert not same(weights(again), weights(model))
        given = {
            name: value.view(torch.uint8) if as_bytes and value.dtype == torch.float8_e5m2 else value
            for name, value in actual.items()
        }
        assert not again.load_state_dict(given).missing_keys
        assert same(weights(again), weights(model)) and torch.equal(logits(again), logits(model))
    # One that was in E4M3 takes what it is given.
    other = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=OctavoConfig())
    for module in other.modules():
        if isinstance(module, FP8FrozenLinear):
            module.set_weight(quantize_weight(torch.randn(module.weight.shape), module.granularity))
    other.load_state_dict(actual)
    assert same(weights(other), weights(model)) and torch.equal(logits(other), logits(model))
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    assert same(weights(again), weights(model)) and torch.equal(logits(again), logits(model))
    octavo.export_fp8(model, tmp_path / "out")  # others read E4M3
    written = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert written.dtype == torch.float8_e4m3fn
    adapted = fill(peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["up_proj"])))
    before = linear.dequantize(torch.float32)
    adapted.merge_adapter()
    assert linear.quantized.data.dtype == torch.float8_e5m2
    exact = before + adapted.base_model.model.model.layers[0].mlp.up_proj.get_delta_weight("default")
    assert cosine(linear.dequantize(torch.float32), exact) > 0.995


def test_state_dicts_of_other_precisions(folder):
    model, _ = FastLanguageModel.from_pretrained(folder, load_in_fp8="block", tokenizer=False)
    expected = weights(model)
    other = small_llama(seed=1, **WHOLE_BLOCKS)
    model.load_state_dict(other.state_dict(), strict=False)  # in BF16: quantised as they come
    for name, module in model.named_modules():
        if isinstance(module, FP8FrozenLinear):
            exact = quantize_weight(other.get_submodule(name).weight, "block")
            assert torch.equal(module.quantized.data.view(torch.uint8), exact.data.view(torch.uint8))
            assert torch.equal(module.quantized.scale, exact.scale)
    model.load_state_dict(small_llama(**WHOLE_BLOCKS).state_dict(), strict=False)
    assert same(weights(model), expected)
    state = model.state_dict()
    del state[f"model.layers.0.mlp.up_proj.{SCALE_NAME}"]
    with pytest.raises(RuntimeError, match=f"up_proj.{SCALE_NAME} is missing"):
        model.load_state_dict(state)
