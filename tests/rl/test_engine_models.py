"""Rollouts of every kind of model: FP8 products, BF16, adapters that move, full fine-tunes; all left as they were."""

import copy
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rollout_cases import PROMPTS, adapted, frozen, gaps, hf_generate, move_adapters, plain

import octavo
from octavo.decoders import forwards
from octavo.nn import held
from octavo.nn.linear import FP8Linear
from octavo.rl import NativeEngine, Sampling

GREEDY = Sampling(max_new_tokens=12, temperature=0)
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 128}


def flags(model):
    return [(name, module.training) for name, module in model.named_modules()]


@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "Gemma3"])
def test_fp8_products(family, granularity):
    """Most tokens agree as in FP32; where an FP8 rounding flips, they do not."""
    model = adapted(frozen(family, granularity))
    engine = NativeEngine(model, slots=5, products="fp8")
    completions = engine.generate(PROMPTS, 3, Sampling(max_new_tokens=24, seed=0))
    found = gaps(model, PROMPTS, completions)
    assert found.mean() <= 1e-3
    assert found.median() < 1e-5


def test_the_first_difference_of_fp8_products_is_one_flipped_byte(monkeypatch):
    """Rollout and full forward agree to FP32 rounding until one FP8 code of an activation is the next one."""
    model = frozen("Llama", "block", **WIDE)
    prompt, slots, new = PROMPTS[0], 32, 60
    calls = []
    spec = sys.modules["octavo.ops.quantize"].spec
    original = spec.quantize_group

    def recording(xs, *args, **kwargs):
        found = original(xs, *args, **kwargs)
        calls.append((xs[0], found[0].data.view(torch.uint8)))
        return found

    monkeypatch.setattr(spec, "quantize_group", recording)
    sampling = Sampling(max_new_tokens=new, seed=0)
    completions = NativeEngine(model, slots=slots, products="fp8").generate([prompt], slots, sampling)
    rollout, length = list(calls), len(prompt) + new
    calls.clear()
    ids = torch.tensor([[*prompt, *c.tokens] for c in completions])
    with torch.no_grad():
        model.eval()(input_ids=ids)
    per_pass = len(calls)  # quantised inputs of one pass through the model
    assert per_pass * new == len(rollout) and per_pass >= 8

    def compared(row, position, call):
        """Input and bytes in the full forward and in the rollout."""
        whole = [x[row * length + position] for x in calls[call]]
        before = position - len(prompt)
        step, index = (0, position) if before < 0 else (before + 1, row)
        return whole, [x[index] for x in rollout[step * per_pass + call]]

    flips = 0
    for row in range(slots):
        places = ((p, c) for p in range(length - 1) for c in range(per_pass))
        for position, call in places:
            (x, codes), (x_rollout, codes_rollout) = compared(row, position, call)
            different = (codes != codes_rollout).nonzero()[:, 0]
            if len(different) == 0:
                continue
            # Up to here all bytes agree, and so do the inputs, to FP32 rounding.
            assert (x - x_rollout).abs().max() < 1e-5 * x.abs().max()
            assert len(different) == 1
            assert abs(int(codes[different]) - int(codes_rollout[different])) == 1
            flips += 1
            break
    assert flips > 0


def test_weights_only_needs_no_flip():
    """The same model, with activations as they are: no token is off."""
    model = frozen("Llama", "block", **WIDE)
    completions = NativeEngine(model, slots=32).generate(PROMPTS[:1], 32, Sampling(max_new_tokens=60, seed=0))
    for module in model.modules():
        if hasattr(module, "fp8_products"):
            module.fp8_products = False
    assert gaps(model, PROMPTS, completions).max() < 1e-5


def test_adapters_move_between_calls():
    model = adapted(frozen(products=False))
    engine = NativeEngine(model, slots=5)
    before = engine.generate(PROMPTS, 1, GREEDY)
    move_adapters(model, seed=1, std=0.3)
    after = engine.generate(PROMPTS, 1, GREEDY)
    assert [c.tokens for c in after] != [c.tokens for c in before]
    assert [c.tokens for c in after] == hf_generate(model.eval(), PROMPTS, 12)
    assert gaps(model, PROMPTS, after).max() < 1e-5
    with model.disable_adapter():
        base = engine.generate(PROMPTS, 1, GREEDY)
        assert gaps(model, PROMPTS, base).max() < 1e-5
    assert [c.tokens for c in base] != [c.tokens for c in after]


def test_adapters_in_fp32_are_copied_beside_a_bf16_model():
    model = adapted(frozen("Llama", "channel", torch.bfloat16, products=False))
    parameters = {name: p for name, p in model.named_parameters() if "lora" in name}
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    engine = NativeEngine(model, slots=5)
    first = engine.generate(PROMPTS, 2, GREEDY)
    copies = list(engine.policy._copies)
    assert {c.dtype for c in copies} == {torch.bfloat16} and len(copies) == len(parameters)
    assert {name: id(p) for name, p in model.named_parameters() if "lora" in name} == {
        name: id(p) for name, p in parameters.items()
    }
    move_adapters(model, seed=2, std=0.3)
    second = engine.generate(PROMPTS, 2, GREEDY)
    assert [c.data_ptr() for c in engine.policy._copies] == [c.data_ptr() for c in copies]
    assert [c.tokens for c in first] != [c.tokens for c in second]
    # Two roundings of BF16 in a layer are 2⁻⁸ each; the mean over tokens and layers is below that.
    assert gaps(model, PROMPTS, second).mean() < 0.05
    engine.standby()
    assert not engine.policy._copies


class Calls:
    """Counts what a rollout calls one by one: PEFT's linears, and products of dense linears side by side."""

    def __init__(self, monkeypatch):
        import peft

        self.of_peft, self.groups = 0, 0
        kind, original, group = peft.tuners.lora.Linear, peft.tuners.lora.Linear.forward, forwards.dense_group

        def forward(module, *args, **kwargs):
            self.of_peft += 1
            return original(module, *args, **kwargs)

        def dense(*args):
            y = group(*args)
            self.groups += y is not None
            return y

        monkeypatch.setattr(kind, "forward", forward)
        monkeypatch.setattr(forwards, "dense_group", dense)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Gemma3"])
def test_adapters_of_dense_linears_are_added_together(family, monkeypatch):
    """Qwen2 has biases, and Gemma 3 a norm between o_proj and the addition."""
    model = adapted(plain(family))
    calls = Calls(monkeypatch)
    completions = NativeEngine(model, slots=5).generate(PROMPTS, 2, GREEDY)
    assert calls.of_peft == 0 and calls.groups > 0
    assert gaps(model, PROMPTS, completions).max() < 1e-5
    with model.disable_adapter():
        base = NativeEngine(model, slots=5).generate(PROMPTS, 2, GREEDY)
        assert calls.of_peft > 0  # what PEFT does then is its own
        assert gaps(model, PROMPTS, base).max() < 1e-5
    assert [c.tokens for c in base] != [c.tokens for c in completions]


def _with_a_hook(model):
    model.get_submodule("base_model.model.model.layers.0.mlp.up_proj.lora_B.default").register_forward_hook(
        lambda _module, _inputs, y: 2 * y
    )


def _merged(model):
    model.merge_adapter()


def _of_two(model):
    import peft

    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    move_adapters(model, seed=3)
    model.base_model.set_adapter(["default", "other"])


@pytest.mark.parametrize("change", [_with_a_hook, _merged, _of_two])
def test_unusual_adapters_of_dense_linears(change):
    model = adapted(plain())
    change(model)
    completions = NativeEngine(model, slots=5).generate(PROMPTS, 2, GREEDY)
    assert gaps(model, PROMPTS, completions).max() < 1e-5


def test_dora_on_dense_linears():
    import peft

    config = peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(plain(), config)
    move_adapters(model, seed=0)
    completions = NativeEngine(model, slots=5).generate(PROMPTS, 2, GREEDY)
    assert gaps(model, PROMPTS, completions).max() < 1e-5


def test_logits_are_fp32_beside_a_bf16_model():
    model = plain(dtype=torch.bfloat16)
    engine = NativeEngine(model, slots=5)
    completions = engine.generate(PROMPTS, 1, GREEDY)
    assert 0 < gaps(model, PROMPTS, completions).mean() < 0.03  # the full forward has its logits in BF16
    hidden = torch.randn(3, model.config.hidden_size).bfloat16()
    with engine.policy.rollout("weights"):
        logits = engine.policy.logits(hidden)
    assert logits.dtype == torch.float32
    assert torch.allclose(logits, hidden.float() @ model.lm_head.weight.float().t(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("recipe", ["block", "channel"])
@pytest.mark.parametrize("products", ["weights", "fp8"])
def test_full_fine_tune(recipe, products, monkeypatch):
    """Weights are quantised once for a rollout, as the trainer does it, and again after a step."""
    model = plain("Qwen3", **WIDE).requires_grad_(True)
    octavo.convert_to_fp8(model, recipe)
    weights = {id(m.weight) for m in model.modules() if isinstance(m, FP8Linear)}
    counted = []
    original = held.quantize_group
    monkeypatch.setattr(held, "quantize_group", lambda xs, *rest: counted.append(len(xs)) or original(xs, *rest))
    engine = NativeEngine(model, slots=5, products=products)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        counted.clear()
        completions = engine.generate(PROMPTS, 2, GREEDY)
        assert sum(counted) == len(weights)
        if products == "fp8":  # but for flipped roundings, which a model as wild as this has some of
            found = gaps(model, PROMPTS, completions)
            assert found.median() < 1e-5 and found.mean() < 0.02
        else:
            assert gaps(_rounded(model, engine.policy.held), PROMPTS, completions).max() < 1e-5
        before = [c.logprobs for c in completions]
        model.train()
        model(input_ids=torch.tensor([PROMPTS[1]]), labels=torch.tensor([PROMPTS[1]])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert before != [c.logprobs for c in engine.generate(PROMPTS, 2, GREEDY)]
    assert held.current() is None
    engine.standby()
    assert engine.policy.held.nbytes == 0


def _rounded(model, weights):
    """The model in high precision, with weights that the FP8 ones dequantise to."""
    rounded = plain("Qwen3", **WIDE)
    rounded.load_state_dict(model.state_dict())
    names = {id(module): name for name, module in model.named_modules()}
    for members, copy_ in weights._copies.values():
        parts = copy_.dequantize(torch.float32).split([m.out_features for m in members])
        for member, part in zip(members, parts, strict=True):
            rounded.get_submodule(names[id(member)]).weight.data.copy_(part)
    return rounded


@pytest.mark.parametrize("kind", ["frozen", "trained"])
def test_the_model_is_left_as_it_was(kind):
    model = adapted(frozen()) if kind == "frozen" else plain().requires_grad_(True)
    if kind == "trained":
        octavo.convert_to_fp8(model, "block")
    inner = model.get_base_model() if kind == "frozen" else model
    inner.gradient_checkpointing_enable()
    inner.enable_input_require_grads()
    model.train()
    inner.model.layers[0].eval()  # somebody's own choice
    state = copy.deepcopy({name: value.clone() for name, value in model.state_dict().items()})
    before = flags(model), inner.config.use_cache, inner.config._attn_implementation
    engine = NativeEngine(model, slots=5)
    completions = engine.generate(PROMPTS, 2, GREEDY)
    assert (flags(model), inner.config.use_cache, inner.config._attn_implementation) == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()
    assert engine.generate(PROMPTS, 2, GREEDY) == completions
    ids = torch.tensor([PROMPTS[1]])
    model(input_ids=ids, labels=ids).loss.backward()  # and it trains as before


def test_threads_take_turns():
    """Two engines on one model, and one that frees its cache meanwhile; a hook lets the other thread run in between."""
    model = plain()
    one, other = NativeEngine(model, slots=3), NativeEngine(model, slots=5)
    expected = [each.tokens for each in one.generate(PROMPTS, 2, GREEDY)]
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: time.sleep(1e-4))
    before = flags(model), model.config._attn_implementation
    with ThreadPoolExecutor(3) as threads:
        found = [threads.submit(engine.generate, PROMPTS, 2, GREEDY) for engine in (one, other, one)]
        threads.submit(one.standby).result()
    assert [[each.tokens for each in future.result()] for future in found] == [expected] * 3
    assert (flags(model), model.config._attn_implementation) == before


def test_an_error_leaves_the_model_as_it_was(monkeypatch):
    model = adapted(frozen("Llama", "channel", torch.bfloat16)).train()
    inner = model.get_base_model()
    before = flags(model), [id(p) for p in model.parameters()], inner.config._attn_implementation
    engine = NativeEngine(model, slots=5)
    good = engine.generate(PROMPTS, 1, GREEDY)

    def broken(*_):
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr("octavo.rl.cache.decode_attention", broken)
        with pytest.raises(RuntimeError, match="planted"):
            engine.generate(PROMPTS, 1, GREEDY)
    assert (flags(model), [id(p) for p in model.parameters()], inner.config._attn_implementation) == before
    assert held.current() is None and torch.is_grad_enabled()
    assert engine.generate(PROMPTS, 1, GREEDY) == good


def test_a_cast_model_is_followed():
    model = plain()
    engine = NativeEngine(model, slots=5)
    engine.generate(PROMPTS, 1, GREEDY)
    model.to(torch.bfloat16)
    completions = engine.generate(PROMPTS, 1, GREEDY)
    assert engine._cache.format.dtype == torch.bfloat16
    assert gaps(model, PROMPTS, completions).mean() < 0.03


def test_autocast_does_not_reach_a_rollout():
    engine = NativeEngine(plain(), slots=5)
    expected = engine.generate(PROMPTS, 1, GREEDY)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert engine.generate(PROMPTS, 1, GREEDY) == expected


def test_a_head_in_fp32_beside_a_bf16_model():
    """What TRL's `cast_lm_head_to_fp32` makes of a model."""
    model = plain(dtype=torch.bfloat16, tie_word_embeddings=False)
    expected = NativeEngine(model, slots=5).generate(PROMPTS, 1, GREEDY)
    model.lm_head.float()
    assert NativeEngine(model, slots=5).generate(PROMPTS, 1, GREEDY) == expected


def test_inference_mode_leaves_nothing_that_cannot_be_written():
    model = adapted(frozen("Llama", "channel", torch.bfloat16))
    engine = NativeEngine(model, slots=5)
    with torch.inference_mode():
        first = engine.generate(PROMPTS, 1, GREEDY)
        engine.standby()
        engine.wake()
    assert engine.generate(PROMPTS, 1, GREEDY) == first
    with torch.inference_mode():
        assert engine.generate(PROMPTS, 1, GREEDY) == first


def test_weights_whose_masters_are_in_host_memory():
    """FP8-only weights: what the trainer multiplies with is what there is."""
    model = plain("Llama", hidden_size=256, intermediate_size=256, head_dim=64).requires_grad_(True)
    octavo.convert_to_fp8(model, "block")
    expected = NativeEngine(model, slots=5).generate(PROMPTS, 1, GREEDY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    octavo.optim.offload_master(model, optimizer)
    engine = NativeEngine(model, slots=5)
    assert engine.generate(PROMPTS, 1, GREEDY) == expected
    model.train()
    model(input_ids=torch.tensor([PROMPTS[1]]), labels=torch.tensor([PROMPTS[1]])).loss.backward()
    optimizer.step()
    assert [c.logprobs for c in engine.generate(PROMPTS, 1, GREEDY)] != [c.logprobs for c in expected]
