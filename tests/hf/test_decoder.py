"""Hugging Face decoders through `convert_to_fp8`: the same models in every respect but their arithmetic."""

import inspect
import json

import pytest
import torch
from bounds import cosine
from decoder_cases import RECIPES, assert_close_to, batch, build, every_family, run
from torch._dynamo.testing import CompileCounterWithBackend

from octavo import FP8TrainingConfig, convert_to_fp8, restore
from octavo.hf.quantizer import OctavoConfig
from octavo.nn.linear import LinearInFP8
from octavo.numerics import FP8ScalingManager

transformers = pytest.importorskip("transformers")


@every_family
def test_report(family):
    report = convert_to_fp8(build(family))
    assert len(report.in_fp8) == 14 and "lm_head" in {e.name for e in report.not_in_fp8}
    text = report.summary()
    assert "q, k and v in one product (2)" in text
    assert "MLP with its activation in one function (2)" in text
    if family == "Gemma2":
        assert "loss not fused: final_logit_softcapping" in text
    else:
        assert "head and loss in chunks, head in BF16" in text and "cuDNN" in text
    assert report.to_dict()["fused"] == report.fused and text in str(report)


@every_family
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_loss_and_gradients(family, precision):
    expected = run(build(family), **batch())
    model = build(family)
    convert_to_fp8(model, precision=precision)
    actual = run(model, **batch())
    if precision == "bf16":  # the same arithmetic in another order
        torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)
        for name, gradient in actual[1].items():
            torch.testing.assert_close(gradient, expected[1][name], rtol=1e-3, atol=1e-5)
    else:
        assert_close_to(actual, expected)


def with_biases(where):
    """A Llama with biases of its attention, its MLP or its head, which `build` makes large."""
    if where != "head":
        return build(**{f"{where}_bias": True})
    model = build()
    head = torch.nn.Linear(*reversed(model.lm_head.weight.shape), bias=True)
    torch.nn.init.normal_(head.bias, std=0.5)
    model.lm_head = head
    return model


@pytest.mark.parametrize("where", ["attention", "mlp", "head"])
def test_biases(where):
    expected = run(with_biases(where), **batch())
    model = with_biases(where)
    report = convert_to_fp8(model)
    assert_close_to(run(model, **batch()), expected)
    assert ("its linears have biases" in report.summary()) == (where == "mlp")
    assert ("its head has a bias" in report.summary()) == (where == "head")


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("family", ["Llama", "Gemma"])
def test_every_recipe(family, name):
    expected = run(build(family), **batch())
    model = build(family)
    report = convert_to_fp8(model, RECIPES[name])
    assert ("head in FP8" in report.summary()) == (name == "FP8 head")
    for _ in range(2):
        assert_close_to(run(model, **batch()), expected)
    statistics = report.scaling.statistics()
    assert {"model.layers.1.self_attn.qkv.x", "model.layers.0.mlp.gate_up.g", "model.layers.0.mlp.down_proj.w"} <= set(
        statistics
    )
    assert ("lm_head.w" in statistics) == (name == "FP8 head")


@pytest.mark.parametrize("name", ["current", "delayed"])
def test_the_head_is_scaled_as_the_layers_are(name):
    model = build()
    convert_to_fp8(model, FP8TrainingConfig.from_recipe(name, fp8_head=True))
    assert model._octavo_head[0].x.delayed is (name == "delayed")


@every_family
def test_nothing_else_changes(family, tmp_path):
    model = build(family)
    parameters, keys = dict(model.named_parameters()), list(model.state_dict())
    modules, signature = dict(model.named_modules()), inspect.signature(model.forward)
    convert_to_fp8(model)
    assert list(model.state_dict()) == keys
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert all(m is modules[name] for name, m in model.named_modules())
    assert inspect.signature(model.forward) == signature
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architectures"] == [f"{family}ForCausalLM"] and "octavo" not in json.dumps(saved)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded).__name__ == f"{family}ForCausalLM"
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


@every_family
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_restore(family, precision):
    model = build(family)
    before = model(**batch())
    attributes = {name: (type(m), set(vars(m))) for name, m in model.named_modules()}
    attention = model.config._attn_implementation
    convert_to_fp8(model, precision=precision)
    with pytest.raises(ValueError, match="already converted"):
        convert_to_fp8(model)
    run(model, **batch())
    restore(model)
    after = model(**batch())
    assert torch.equal(before.loss, after.loss) and torch.equal(before.logits, after.logits)
    assert {name: (type(m), set(vars(m))) for name, m in model.named_modules()} == attributes
    assert model.config._attn_implementation == attention
    convert_to_fp8(model, precision=precision)  # and again
    run(model, **batch())


@every_family
def test_evaluation_and_inference_have_logits(family):
    reference, model = build(family), build(family)
    convert_to_fp8(model)
    inputs = batch()
    with torch.no_grad():
        outputs = model(**inputs)
        assert cosine(outputs.logits, reference(**inputs).logits) > 0.99 and outputs.loss is not None
    assert model(input_ids=inputs["input_ids"]).logits.requires_grad
    model.eval()
    outputs = model(**inputs)
    assert outputs.logits.shape == (3, 21, 160) and outputs.loss is not None
    model.train()
    outputs = model(**inputs)
    assert outputs.logits is None or family == "Gemma2"


@every_family
def test_generate(family):
    model = build(family).eval()
    prompt = batch()["input_ids"][:, :7]
    convert_to_fp8(model, precision="bf16")
    fused = model.generate(prompt, max_new_tokens=6, do_sample=False)
    restore(model)
    assert torch.equal(fused, model.generate(prompt, max_new_tokens=6, do_sample=False))
    report = convert_to_fp8(model)
    assert model.generate(prompt, max_new_tokens=6, do_sample=False).shape == fused.shape
    assert not report.scaling.statistics()  # evaluation teaches nothing


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["delayed", "block", "FP8 head"])
def test_gradient_checkpointing(use_reentrant, name):
    models = [build("Qwen2"), build("Qwen2")]
    for model in models:
        convert_to_fp8(model, RECIPES[name])
    models[1].gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    for _ in range(2):
        (loss, plain), (loss_again, checkpointed) = (run(model, **batch()) for model in models)
        assert torch.equal(loss, loss_again)
        for key, gradient in plain.items():
            torch.testing.assert_close(checkpointed[key], gradient, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", ["delayed", "current", "channel", "block", "mx"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_layers_compile_to_one_graph_for_all(family, name):
    torch._dynamo.reset()
    eager, model = build(family, use_cache=False), build(family, use_cache=False)  # a cache alone makes it two
    for m in (eager, model):
        convert_to_fp8(m, RECIPES[name])
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    for _ in range(2):
        expected, actual = run(eager, **batch()), run(model, **batch())
    assert counter.frame_count == 1
    torch.testing.assert_close(actual[0], expected[0])
    for key, gradient in expected[1].items():
        torch.testing.assert_close(actual[1][key], gradient, rtol=1e-3, atol=1e-4)


STATES = ("state_x", "state_w", "state_g")


def trained():
    model = build()
    convert_to_fp8(model, FP8TrainingConfig.from_recipe("delayed", fp8_head=True, activations="fp8"))
    return model


def adapted(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=OctavoConfig("tensor"))
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(model.train(), peft.LoraConfig(target_modules=["q_proj", "v_proj", "gate_proj"]))


@pytest.mark.parametrize("kind", ["trained", "frozen with adapters"])
def test_scaling_states_follow_weights_that_were_moved_by_their_data(kind, tmp_path, monkeypatch):
    """`fully_shard` moves those of a model in host memory. Here the states are left elsewhere, which is the same."""
    if kind != "trained":
        build().save_pretrained(tmp_path)
    make = trained if kind == "trained" else lambda: adapted(tmp_path)
    expected, model = run(make(), **batch()), make()
    linears = [module for module in model.modules() if isinstance(module, LinearInFP8)]
    states = [(each, name, getattr(each, name)) for each in linears for name in STATES if hasattr(each, name)]
    for linear, name, state in states:
        setattr(linear, name, torch.empty_like(state, device="meta"))
    moved = []

    def bring(_manager, device):
        moved.append(device)
        for linear, name, state in states:
            setattr(linear, name, state)

    monkeypatch.setattr(FP8ScalingManager, "to", bring)
    actual = run(model, **batch())
    assert moved == [torch.device("cpu")] and torch.equal(actual[0], expected[0])
    assert all(torch.equal(actual[1][name], gradient) for name, gradient in expected[1].items())


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_layers_compile_for_any_size(family):
    """With torch 2.11, too, whose Dynamo fails at sizes that it takes for variables and then for constants."""
    torch._dynamo.reset()
    eager, model = build(family, use_cache=False), build(family, use_cache=False)
    for m in (eager, model):
        convert_to_fp8(m, "channel")
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    expected, actual = run(eager, **batch()), run(model, **batch())
    torch.testing.assert_close(actual[0], expected[0])
    for key, gradient in expected[1].items():
        torch.testing.assert_close(actual[1][key], gradient, rtol=1e-3, atol=1e-4)
