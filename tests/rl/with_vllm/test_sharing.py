"""vLLM on the trainer's modules, in FP32 with products in FP32: what can differ is the order of sums.

A logit of a few units is a sum of FP32 numbers in another order: some 1e-6. The bound of 1e-5 is ten times that; a
policy that three optimiser steps have moved is off by 0.1 and more.
"""

import gc
import re
from dataclasses import replace

import pytest
import torch
from decoder_cases import build
from trainer_cases import byte_tokenizer

from octavo import FastLanguageModel
from octavo.rl import NativeEngine, Sampling
from octavo.rl.stops import StopTexts

pytest.importorskip("vllm")
from octavo.rl.vllm import VLLMEngine

PROMPTS = [[5, 9, 33], [7, 8, 2, 61, 90, 14, 3], [44], list(range(20, 53))]
SHAPES = {"head_dim": 32, "max_position_embeddings": 96}  # vLLM's attention on a CPU takes heads of 32 and more
CHANGES = {"Mistral": {"sliding_window": 16}, "Gemma": {"tie_word_embeddings": True}}
BOUND = 1e-5


@pytest.fixture
def folder(tmp_path):
    yield tmp_path / "model"
    gc.collect()  # engines are in cycles, each with its cache


def load(folder, family="Llama", granularity="channel", **options):
    build(family, **SHAPES | CHANGES.get(family, {})).save_pretrained(folder)
    settings = {"dtype": torch.float32, "load_in_fp8": granularity, "fp8_products": False, "tokenizer": False}
    model, _ = FastLanguageModel.from_pretrained(str(folder), **settings | options)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model


def adapted(model, **options):
    model = FastLanguageModel.get_peft_model(model, r=8, use_gradient_checkpointing=False, **options)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model.eval()


def engine_for(model, **options):
    # With pages of 32 tokens, the last prompt fills one, which vLLM would use again.
    return VLLMEngine(model, **{"cache_bytes": 2**24, "block_size": 32} | options)


def greedy(model, new=10):
    tokens = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        tokens.append(model.generate(ids, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :].tolist())
    return tokens


@torch.no_grad()
def full_forward(model, completion, temperature=1.0):
    """Log-probabilities of a completion's tokens by the trainer, of the whole sequence at once."""
    prompt = PROMPTS[completion.prompt]
    was_training = model.training
    logits = model.eval()(torch.tensor([prompt + completion.tokens])).logits[0, len(prompt) - 1 : -1]
    model.train(was_training)
    tokens = torch.tensor(completion.tokens)
    return (logits.float() / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def gap(model, completions, temperature=1.0):
    parts = [(full_forward(model, c, temperature) - torch.tensor(c.logprobs)).abs().max() for c in completions]
    return float(torch.stack(parts).max())


def train(model, optimizer, steps=1):
    """Make steps on random tokens: where to does not matter."""
    model.train()
    ids = torch.randint(1, 160, (4, 16), generator=torch.Generator().manual_seed(7))
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("family", "granularity"),
    [("Llama", "block"), ("Llama", "channel"), ("Qwen3", "block"), ("Qwen3", "channel"), ("Mistral", "block"),
     ("Mistral", "channel"), ("Gemma", "block"), ("Gemma", "channel")],
)  # fmt: skip
def test_no_weights_of_its_own_and_no_word_after_a_step(folder, family, granularity):
    model = adapted(load(folder, family, granularity))
    engine = engine_for(model)
    start = greedy(model)
    sampling = Sampling(max_new_tokens=10, temperature=0)
    completions = engine.generate(PROMPTS, 1, sampling)
    native = NativeEngine(model).generate(PROMPTS, 1, sampling)
    assert [c.tokens for c in completions] == [c.tokens for c in native] == start
    assert torch.allclose(*(torch.tensor([c.logprobs for c in x]) for x in (completions, native)), rtol=0, atol=BOUND)
    assert gap(model, completions) <= BOUND
    assert engine.own_weight_bytes() == 0
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        train(model, optimizer)
        assert gap(model, engine.generate(PROMPTS, 2, Sampling(max_new_tokens=6, seed=1))) <= BOUND
        assert model.training  # as it was
    # The control: those adapters, frozen at the start. Its log-probabilities of what it said are off by far more.
    assert gap(model, completions) >= 100 * BOUND
    assert [c.tokens for c in engine.generate(PROMPTS, 1, sampling)] == greedy(model.eval())
    assert engine.own_weight_bytes() == 0


def test_what_vllm_holds_is_tables_and_a_cache(folder):
    """Whatever is no Parameter is a table of rotations, or one of the scales that its attention has anyway."""
    engine = engine_for(load(folder))
    names = [name for name, _ in engine.vllm_model().named_buffers()]
    assert all("rotary_emb" in name or name.endswith("_scale") for name in names)
    assert engine.own_weight_bytes() == 0
    trainer = dict(engine.policy.model.named_parameters())
    for name, parameter in engine.vllm_model().named_parameters():
        assert parameter is trainer[name]  # norms; no linear, embedding or head has a Parameter


def test_planted_copy_is_counted(folder):
    engine = engine_for(load(folder))
    norm = engine.vllm_model().model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach().clone())
    assert engine.own_weight_bytes() == norm.weight.nbytes


def test_log_probabilities_after_temperature(folder):
    model = adapted(load(folder))
    engine = engine_for(model)
    for temperature in (1.0, 0.6, 1.7):
        sampling = Sampling(max_new_tokens=8, temperature=temperature, seed=3)
        whole = engine.generate(PROMPTS, 3, sampling)
        assert [c.prompt for c in whole] == [i for i in range(len(PROMPTS)) for _ in range(3)]
        assert len({tuple(c.tokens) for c in whole}) > 6
        assert gap(model, whole, temperature) <= BOUND
        cut = engine.generate(PROMPTS, 2, replace(sampling, top_k=5, top_p=0.9))
        assert gap(model, cut, temperature) <= BOUND  # over the whole vocabulary all the same
    likeliest = [c.tokens for c in engine.generate(PROMPTS, 1, Sampling(max_new_tokens=8, temperature=0))]
    assert [c.tokens for c in engine.generate(PROMPTS, 1, Sampling(max_new_tokens=8, min_p=1.0))] == likeliest


def test_seeds_and_stops(folder):
    model = load(folder)
    engine = engine_for(model)
    sampling = Sampling(max_new_tokens=12, seed=5)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    first = engine.generate(PROMPTS, 2, sampling)
    assert torch.equal(torch.get_rng_state(), state)  # the trainer's own numbers are not drawn from
    assert engine.generate(PROMPTS, 2, sampling) == first
    assert engine.generate(PROMPTS, 2, Sampling(max_new_tokens=12, seed=6)) != first
    torch.manual_seed(11)
    drawn = engine.generate(PROMPTS, 1, Sampling(max_new_tokens=12))
    torch.manual_seed(11)
    assert engine.generate(PROMPTS, 1, Sampling(max_new_tokens=12)) == drawn
    stop = first[0].tokens[4]
    place = first[0].tokens.index(stop)
    ended = engine.generate(PROMPTS, 2, Sampling(max_new_tokens=12, seed=5, stop_ids=(stop,)))[0]
    assert ended.tokens == first[0].tokens[: place + 1] and ended.stopped and not first[0].stopped
    model.generation_config.eos_token_id = [stop]
    assert engine.generate(PROMPTS, 2, sampling)[0].tokens == ended.tokens
    assert len(engine.generate(PROMPTS, 2, Sampling(max_new_tokens=12, seed=5, stop_ids=()))[0].tokens) == 12
    assert engine.statistics()["tokens"] == 12 * 8 and engine.statistics()["seconds"] > 0


def test_texts_that_end_completions(folder, monkeypatch):
    model, tokenizer = load(folder), byte_tokenizer()
    engine, options = engine_for(model), {"max_new_tokens": 12, "temperature": 0.0}
    whole = engine.generate(PROMPTS, 1, Sampling(**options))
    texts = [tokenizer.decode(completion.tokens) for completion in whole]
    stops = [found[0] for text in texts if (found := re.search(r"(?<=..)[!-~]{1,2}", text))]
    assert stops
    sampling = Sampling(**options, stop_texts=StopTexts(tokenizer, stops))
    expected = NativeEngine(model).generate(PROMPTS, 1, sampling)
    assert any(len(ended.tokens) < 12 for ended in expected)
    found = engine.generate(PROMPTS, 1, sampling)
    assert [(each.tokens, each.stopped) for each in found] == [(each.tokens, each.stopped) for each in expected]
    assert engine.generate(PROMPTS, 1, Sampling(**options)) == whole
    monkeypatch.setattr(StopTexts, "end", lambda *_: None)  # vLLM itself has written no further
    assert [each.tokens for each in engine.generate(PROMPTS, 1, sampling)] == [each.tokens for each in expected]


def test_fp8_products_and_bf16(folder):
    """With products as the model's own, a rounding that flips moves the probabilities of all tokens after it."""
    model = adapted(load(folder, dtype=torch.bfloat16, fp8_products=True))
    engine = engine_for(model, products="fp8")
    own = gap(model, engine.generate(PROMPTS, 2, Sampling(max_new_tokens=6, seed=1)))
    assert 0 < own < 0.5
    assert engine.own_weight_bytes() == 0


def test_dropout_is_for_training(folder):
    model = adapted(load(folder), lora_dropout=0.5).train()
    engine = engine_for(model)
    assert gap(model, engine.generate(PROMPTS, 1, Sampling(max_new_tokens=6, temperature=0))) <= BOUND
    assert all(module.training for module in model.modules())


def test_trained_weights_are_held(folder):
    """A full fine-tune: FP8 weights for the length of a rollout, quantised as the trainer does."""
    model = load(folder, load_in_fp8="block", full_finetuning=True, fp8_products=None)
    engine = engine_for(model, products="fp8")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        completions = engine.generate(PROMPTS, 1, Sampling(max_new_tokens=6, seed=1))
        assert gap(model, completions) < 0.1
        assert engine.policy.held.nbytes > 0 == engine.own_weight_bytes()
        train(model, optimizer, steps=2)
    assert gap(model, completions) > 0.1
    engine.standby()
    assert engine.policy.held.nbytes == 0


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1 is empty"),
        ([[1, 160]], "prompt 0 has the token 160; the model's vocabulary is 0 to 159"),
        ([[1] * 96], "prompt 0 has 96 tokens, and 96 positions leaves no room"),
    ],
)
def test_prompts_that_cannot_be_completed(folder, prompts, message):
    with pytest.raises(ValueError, match=message):
        VLLMEngine(load(folder)).generate(prompts, 1, Sampling())


def test_what_graphs_would_not_see(folder):
    """On a GPU decoding is recorded. Here nothing is, so the flag is set by hand."""
    model = adapted(load(folder))
    engine = engine_for(model)
    sampling = Sampling(max_new_tokens=2, temperature=0)
    engine.generate(PROMPTS, 1, sampling)
    engine._has_graphs = True
    train(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    engine.generate(PROMPTS, 1, sampling)  # values may change
    with model.disable_adapter(), pytest.raises(ValueError, match=r"CUDA graphs read those: make a new VLLMEngine"):
        engine.generate(PROMPTS, 1, sampling)
    engine.generate(PROMPTS, 1, sampling)
    with pytest.raises(ValueError, match=r"in torch.bfloat16; vLLM has started with cpu and torch.float32"):
        engine_of_moved = engine.policy.model.to(torch.bfloat16)
        engine.generate(PROMPTS, 1, sampling)
    assert engine_of_moved is engine.policy.model


def test_after_a_call_that_broke_off(folder, monkeypatch):
    """A call that broke off, by Ctrl-C in a notebook, leaves nothing to be completed with the next one."""
    engine = engine_for(adapted(load(folder)))
    sampling = Sampling(max_new_tokens=6, seed=3)
    expected = engine.generate(PROMPTS, 2, sampling)
    original, calls = engine.policy.logits, []

    def interrupted(hidden):
        calls.append(hidden)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(hidden)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(engine.policy, "logits", interrupted)
        engine.generate(PROMPTS[::-1], 2, sampling)
    assert engine._llm.llm_engine.get_num_unfinished_requests() == 0  # with any, vLLM would wait for them
    assert engine.generate(PROMPTS, 2, sampling) == expected


def test_modules_are_those_of_now(folder):
    """PEFT puts copies beside them, which adapters may be without; and an assignment is seen, too."""
    model = load(folder, load_in_fp8=False, fp8_products=None)
    engine = engine_for(model)
    sampling = Sampling(max_new_tokens=6, temperature=0)
    engine.generate(PROMPTS, 1, sampling)
    model.model.norm.weight = torch.nn.Parameter(torch.randn(64), requires_grad=False)
    assert gap(model, engine.generate(PROMPTS, 1, sampling)) <= BOUND
    model = adapted(model, target_modules=["q_proj"], modules_to_save=["norm", "mlp"])
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    assert gap(model, engine.generate(PROMPTS, 1, sampling)) <= BOUND
    with model.disable_adapter():
        assert gap(model, engine.generate(PROMPTS, 1, sampling)) <= BOUND


def test_layers_that_do_more_than_those_of_vllm_are_refused(folder):
    model = adapted(load(folder))
    engine, layer = engine_for(model), model.get_base_model().model.layers[1]
    sampling = Sampling(max_new_tokens=4, temperature=0)
    layer.self_attn.q_proj.register_forward_hook(lambda *_: None)  # of a linear, which is called
    engine.generate(PROMPTS, 1, sampling)
    hook = layer.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    with pytest.raises(ValueError, match=r"model\.layers\.1 has hooks, .* take engine='native'"):
        engine.generate(PROMPTS, 1, sampling)
    hook.remove()
    layer.mlp.act_fn = torch.nn.ReLU()
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp has another activation than its configuration says"):
        engine.generate(PROMPTS, 1, sampling)


@pytest.mark.parametrize(
    "options",
    [{"modules_to_save": ["embed_tokens"]}, {"trainable_token_indices": PROMPTS[0]}],
    ids=lambda x: next(iter(x)),
)
def test_embeddings_that_peft_trains(folder, options):
    """Before the engine is made and after it: with `fast_inference=True`, adapters always come later."""
    model = load(folder)
    engine = engine_for(model)
    model = adapted(model, **options)
    (trained,) = (p for name, p in model.named_parameters() if p.requires_grad and "lora" not in name)
    torch.nn.init.normal_(trained)
    sampling = Sampling(max_new_tokens=6, temperature=0)
    assert gap(model, engine.generate(PROMPTS, 1, sampling)) <= BOUND
    engine_for(model)
    with model.disable_adapter():
        assert gap(model, engine.generate(PROMPTS, 1, sampling)) <= BOUND


def test_adapters_on_the_embedding_are_refused_whenever_they_come(folder):
    model = load(folder, load_in_fp8=False, fp8_products=None)
    engine = engine_for(model)
    adapted(model, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(ValueError, match=r"embedding is a peft.*lora.layer.Embedding: .*on linears alone, or take"):
        engine.generate(PROMPTS, 1, Sampling(max_new_tokens=2))
    with pytest.raises(ValueError, match="the embedding is a peft"):
        engine_for(model)


def test_other_tokens_than_vllm_started_with(folder):
    model = load(folder)
    engine = engine_for(model)
    model.resize_token_embeddings(170, mean_resizing=False)
    prompts = [[5, 165]]
    assert len(engine.generate(prompts, 1, Sampling(max_new_tokens=2))) == 1
    model.resize_token_embeddings(180, mean_resizing=False)
    with pytest.raises(ValueError, match="the model knows 180 tokens; vLLM has started with 170: make a new"):
        engine.generate(prompts, 1, Sampling(max_new_tokens=2))


def test_greedy_completions_of_a_prompt_are_equal(folder):
    engine = engine_for(load(folder))
    one, two = (engine.generate(PROMPTS, n, Sampling(max_new_tokens=4, temperature=0)) for n in (1, 2))
    assert two == [completion for completion in one for _ in range(2)]


def test_disabled_adapters_are_not_computed(folder):
    model = adapted(load(folder))
    engine = engine_for(model, exact_logprobs=True)
    sampling = Sampling(max_new_tokens=6, temperature=0)
    with model.disable_adapter():
        without = engine.generate(PROMPTS, 1, sampling)
        assert gap(model, without) <= BOUND
    assert gap(model, without) > 100 * BOUND
    with pytest.raises(ValueError, match="top_k=5 with exact_logprobs=True"):
        engine.generate(PROMPTS, 1, Sampling(top_k=5))


def test_what_is_refused(folder, monkeypatch):
    model = load(folder, load_in_fp8="tensor", fp8_products=True)
    with pytest.raises(ValueError, match=r"granularity='tensor': .*neighbours"):
        VLLMEngine(model)
    with pytest.raises(ValueError, match="products='bf16'"):
        VLLMEngine(load(folder), products="bf16")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ValueError, match=r"VLLM_ENABLE_V1_MULTIPROCESSING=1: .*set it to 0"):
        VLLMEngine(load(folder))
