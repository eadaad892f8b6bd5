"""Models that change between rollouts, and two models at a time: what a rollout has changed is as it was."""

import copy
import threading

import pytest
import torch
from rollout_cases import PROMPTS, adapted, frozen, hf_generate, plain

import octavo
from octavo.decoders.fuse import fuse_loaded
from octavo.rl import NativeEngine, Sampling
from octavo.rl.vllm import _check_layers

GREEDY = Sampling(8, 0.0, stop_ids=())
peft = pytest.importorskip("peft")


def tokens(engine, prompts=PROMPTS):
    return [completion.tokens for completion in engine.generate(prompts, 1, GREEDY)]


def at_once(*engines):
    """Rollouts that begin one after the other and end in that order, though the second takes longer."""
    began = threading.Event()

    def run(engine, new):
        engine.generate([[5, 6, 7]], 1, Sampling(new, 0.0, stop_ids=()))

    def first(engine):
        original = engine._run
        engine._run = lambda *args: began.set() or original(*args)
        run(engine, 12)

    threads = [threading.Thread(target=first, args=engines[:1])]
    threads[0].start()
    assert began.wait(60)
    threads.append(threading.Thread(target=run, args=(engines[1], 40)))
    threads[1].start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)


def test_two_models_in_two_threads_leave_compilation_on():
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))  # imports Dynamo
    before = torch._dynamo.eval_frame._stance.stance
    at_once(NativeEngine(plain()), NativeEngine(plain("Qwen3")))
    assert torch._dynamo.eval_frame._stance.stance == before == "default"


def test_two_models_with_one_configuration_take_turns():
    one = plain().eval()
    other = type(one)(one.config).eval()
    assert other.config is one.config
    before = one.config._attn_implementation
    engines = NativeEngine(one), NativeEngine(other)
    assert engines[0].policy.lock is engines[1].policy.lock is not NativeEngine(plain()).policy.lock
    at_once(*engines)
    assert one.config._attn_implementation == before
    one(torch.tensor([[5, 6]]))


def test_restored_and_converted_anew():
    model = plain().requires_grad_(True).eval()
    in_high_precision = tokens(NativeEngine(model))
    octavo.convert_to_fp8(model, "channel")
    engine = NativeEngine(model)
    by_channel = tokens(engine)
    octavo.restore(model)
    assert tokens(engine) == in_high_precision
    octavo.convert_to_fp8(model, "block")
    by_block = tokens(engine)
    assert by_block == tokens(NativeEngine(model))
    octavo.restore(model)
    octavo.convert_to_fp8(model, "channel")
    assert tokens(engine) == by_channel


def test_more_tokens():
    model = adapted(frozen(products=False)).eval()
    engine = NativeEngine(model)
    tokens(engine)
    model.get_base_model().resize_token_embeddings(256, mean_resizing=False)
    with torch.no_grad():
        model.get_base_model().lm_head.weight[200:] += 0.5  # so that these are chosen, too
    prompts = [[5, 201, 7], [9]]
    found = tokens(engine, prompts)
    assert found == hf_generate(model, prompts, 8)


def test_adapters_with_a_bias():
    model = plain(dtype=torch.bfloat16)
    config = peft.LoraConfig(r=4, lora_bias=True, init_lora_weights=False, target_modules=["q_proj", "o_proj"])
    model = peft.get_peft_model(model, config).eval()
    assert len(tokens(NativeEngine(model))) == len(PROMPTS)
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}


def test_layers_that_were_asked_for_hidden_states_once_are_those_of_vllm():
    """The hooks by which transformers captures them stay for good, and change nothing."""
    model = plain()
    model(torch.tensor([PROMPTS[0]]), output_hidden_states=True)
    assert any(layer._forward_hooks for layer in model.model.layers)
    _check_layers(model)
    model.model.layers[1].register_forward_hook(lambda _module, _inputs, output: output)
    with pytest.raises(ValueError, match=r"model\.layers\.1 has hooks, .* take engine='native'"):
        _check_layers(model)


def test_layers_that_were_copied():
    """A copied layer has a configuration of its own, from which its attention learns how to attend."""
    for model in (frozen(products=False), plain("Gemma2")):
        copied = copy.deepcopy(model.model.layers[1])
        copied.self_attn.layer_idx = len(model.model.layers)
        engine = NativeEngine(model.eval())
        before = tokens(engine)
        model.model.layers.append(copied)
        model.config.num_hidden_layers = len(model.model.layers)
        if hasattr(model.config, "layer_types"):
            model.config.layer_types = [*model.config.layer_types, model.config.layer_types[1]]
        implementations = [attention.self_attn.config._attn_implementation for attention in model.model.layers]
        found = tokens(engine)
        assert found == tokens(NativeEngine(model)) == hf_generate(model, PROMPTS, 8) != before
        assert [each.self_attn.config._attn_implementation for each in model.model.layers] == implementations


@pytest.mark.parametrize("when", ["before", "after"])
def test_layers_that_were_copied_before_they_were_fused(when):
    """Into the model before it is fused, or after: both train as a model that was never fused."""
    batch = {"input_ids": torch.tensor([PROMPTS[0] * 3, [0] * 3 + (PROMPTS[0] * 3)[3:]])}
    batch["attention_mask"] = (batch["input_ids"] != 0).long()
    losses = {}
    for fused in (False, True):
        model = plain().requires_grad_(True).train()
        copied = copy.deepcopy(model.model.layers[1])
        copied.self_attn.layer_idx = len(model.model.layers)
        if when == "before":
            model.model.layers.append(copied)
        if fused:
            fuse_loaded(model)
        if when == "after":
            model.model.layers.append(copied)
        model.config.num_hidden_layers = len(model.model.layers)
        for given in (batch, {"input_ids": batch["input_ids"]}):
            loss = model(**given, labels=given["input_ids"], use_cache=False).loss
            loss.backward()
            losses.setdefault(len(given), []).append(loss.item())
        gradient = copied.self_attn.q_proj.weight.grad
        losses.setdefault("gradient", []).append(gradient.norm().item())
        octavo.restore(model)
        assert {layer.self_attn.config._attn_implementation for layer in model.model.layers} == {"sdpa"}
    assert all(one == pytest.approx(other, rel=1e-5) for one, other in losses.values())


@pytest.mark.parametrize("training", [False, True])
def test_layers_that_were_compiled_one_by_one(training):
    """`torch.compile(layer)` puts a module around the layer, whose mode is that of the layer."""
    model = plain().train(training)
    expected = tokens(NativeEngine(model))
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    before = dict(model.model.layers[0].__dict__)
    engine = NativeEngine(model)
    assert tokens(engine) == expected and engine.policy.state() == engine.policy.state()
    assert model.model.layers[0].__dict__.keys() == before.keys()
    assert all(module.training == training for module in model.modules())


def test_layers_that_were_replaced():
    model = frozen(products=False).eval()
    engine = NativeEngine(model)
    before = tokens(engine)
    model.model.layers[0] = copy.deepcopy(model.model.layers[1])
    model.model.layers[0].self_attn.layer_idx = 0
    assert tokens(engine) == hf_generate(model, PROMPTS, 8) != before
    model.model.layers[0] = model.model.layers[1]
    with pytest.raises(ValueError, match="attentions of layers"):
        tokens(engine)
