"""The native engine on a GPU: recorded steps against steps as they are, `generate`, memory, nothing that waits."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from rollout_cases import FAMILIES, PROMPTS, adapted, frozen, gaps, hf_generate, move_adapters, plain

import octavo
from octavo.rl import NativeEngine, Sampling
from octavo.rl.stops import StopTexts

WIDE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 256,
}  # fmt: skip
GREEDY = Sampling(max_new_tokens=40, temperature=0)
SAMPLED = Sampling(max_new_tokens=40, temperature=0.8, seed=0)
WAYS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "truncated": Sampling(max_new_tokens=40, top_k=20, top_p=0.9, seed=0),
}
MODELS = {
    "block": lambda: adapted(frozen("Llama", "block", torch.bfloat16, **WIDE)),
    "channel": lambda: adapted(frozen("Qwen3", "channel", torch.bfloat16, **WIDE)),
    "window": lambda: adapted(frozen("Mistral", "channel", torch.bfloat16, **WIDE)),
    "BF16": lambda: plain("Llama", torch.bfloat16, **WIDE),
    "BF16 and LoRA": lambda: adapted(plain("Gemma3", torch.bfloat16, **WIDE)),
}


def on_gpu(model):
    return model.cuda()


def tokens(completions):
    return [c.tokens for c in completions]


def assert_same(found, expected):
    assert tokens(found) == tokens(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_graphs_compute_what_steps_do(name, kv_dtype, way):
    model = on_gpu(MODELS[name]())
    eager = NativeEngine(model, slots=5, kv_dtype=kv_dtype, graphs=False)
    recorded = NativeEngine(model, slots=5, kv_dtype=kv_dtype)
    assert recorded.graphs and not eager.graphs
    expected = eager.generate(PROMPTS, 3, WAYS[way])
    assert_same(recorded.generate(PROMPTS, 3, WAYS[way]), expected)
    assert_same(recorded.generate(PROMPTS, 3, WAYS[way]), expected)  # replayed from the start


class Numbers:
    """A tokenizer whose texts are the numbers of the tokens."""

    @staticmethod
    def decode(tokens, **_):
        return "".join(f"t{token}," for token in tokens)


def test_texts_end_completions_within_a_stride():
    engine = NativeEngine(on_gpu(MODELS["channel"]()), slots=5)
    whole = engine.generate(PROMPTS, 3, GREEDY)
    text = Numbers.decode(whole[0].tokens[10:12])
    sampling = Sampling(max_new_tokens=40, temperature=0, stop_texts=StopTexts(Numbers, text))
    for ended, longer in zip(engine.generate(PROMPTS, 3, sampling), whole, strict=True):
        places = [k for k in range(2, 41) if Numbers.decode(longer.tokens[k - 2 : k]) == text]
        assert ended.tokens == longer.tokens[: places[0] if places else 40] and ended.stopped == bool(places)


@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate_in_fp32(family, granularity):
    model = on_gpu(adapted(frozen(family, granularity, products=False)))
    expected = hf_generate(model.eval(), PROMPTS, 12)
    completions = NativeEngine(model, slots=5).generate(PROMPTS, 3, Sampling(max_new_tokens=12, temperature=0))
    assert tokens(completions) == [each for each in expected for _ in range(3)]
    assert gaps(model, PROMPTS, completions).max() < 1e-4  # sums of other kernels, in another order


@pytest.mark.parametrize("products", ["weights", "fp8"])
@pytest.mark.parametrize("name", ["block", "channel"])
def test_gap_in_bf16(name, products):
    model = on_gpu(MODELS[name]())
    completions = NativeEngine(model, slots=16, products=products).generate(PROMPTS, 8, SAMPLED)
    found = gaps(model, PROMPTS, completions, temperature=0.8)
    print(f"{name}, products={products}: mean gap {found.mean():.4f}, largest {found.max():.3f}")
    assert found.mean() < 0.2


def test_a_graph_for_each_number_of_slots():
    engine = NativeEngine(on_gpu(MODELS["channel"]()), slots=16)
    for n, count in ((40, 16), (16, 16), (3, 4), (1, 1)):  # the largest first: another cache has other graphs
        engine.generate(PROMPTS[:1], n, GREEDY)
        assert engine.statistics()["slots"] == count
    assert sorted(engine._steps) == [(1, 1), (4, 4), (16, 16)]
    assert all(len(step._graphs) == 1 for step in engine._steps.values())


def test_graphs_see_new_adapters():
    model = on_gpu(MODELS["channel"]())
    engine, eager = NativeEngine(model, slots=5), NativeEngine(model, slots=5, graphs=False)
    before = engine.generate(PROMPTS, 2, GREEDY)
    graph = next(iter(engine._steps[5, 2]._graphs.values()))
    move_adapters(model, seed=3, std=0.3)
    after = engine.generate(PROMPTS, 2, GREEDY)
    assert tokens(before) != tokens(after)
    assert_same(after, eager.generate(PROMPTS, 2, GREEDY))
    assert next(iter(engine._steps[5, 2]._graphs.values())) is graph
    with model.disable_adapter():
        base = engine.generate(PROMPTS, 2, GREEDY)
        assert_same(base, eager.generate(PROMPTS, 2, GREEDY))
    assert tokens(base) != tokens(after)
    assert_same(engine.generate(PROMPTS, 2, GREEDY), after)


@pytest.mark.parametrize("recipe", ["block", "channel"])
def test_full_fine_tune(recipe):
    model = on_gpu(plain("Llama", torch.bfloat16, **WIDE)).requires_grad_(True).train()
    octavo.convert_to_fp8(model, recipe)
    engine, eager = NativeEngine(model, slots=5), NativeEngine(model, slots=5, graphs=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    for _ in range(2):
        seen.append(engine.generate(PROMPTS, 2, GREEDY))
        assert_same(seen[-1], eager.generate(PROMPTS, 2, GREEDY))
        ids = torch.tensor([PROMPTS[1]]).cuda()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [c.logprobs for c in seen[0]] != [c.logprobs for c in seen[1]]


def test_standby_gives_the_cache_back_and_graphs_hold_after_it():
    model = on_gpu(MODELS["channel"]())
    model.config.max_position_embeddings = 2**16
    engine = NativeEngine(model, slots=64)
    # Every token ends a completion, so the cache is large and the rollout short.
    large = Sampling(max_new_tokens=40_000, stop_ids=tuple(range(engine.policy.vocabulary)))
    engine.generate(PROMPTS, 16, large)  # kernels, workspaces and all that stays
    expected = engine.generate(PROMPTS, 2, GREEDY)
    engine.standby()
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    engine.generate(PROMPTS, 16, large)
    cache = engine.statistics()["cache_bytes"]
    assert cache > 2**30
    assert torch.cuda.mem_get_info()[0] < before - 0.9 * cache
    engine.standby()
    torch.cuda.synchronize()
    lost = before - torch.cuda.mem_get_info()[0]
    print(f"cache {cache / 2**30:.2f} GiB; not given back {lost / 2**20:.0f} MiB")
    assert lost < 0.05 * cache
    engine.wake()
    assert torch.cuda.mem_get_info()[0] < before - 0.9 * cache
    assert_same(engine.generate(PROMPTS, 2, GREEDY), expected)
    assert_same(engine.generate(PROMPTS, 2, GREEDY), expected)


def test_steps_wait_for_nothing():
    model = on_gpu(MODELS["channel"]())
    for graphs in (False, True):
        engine = NativeEngine(model, slots=8, graphs=graphs)
        engine.generate(PROMPTS, 2, SAMPLED)
        step = engine._steps[8, 2]
        with engine.policy.rollout("weights"):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(3):
                    step.run(SAMPLED)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_a_recording_that_breaks_off(monkeypatch):
    model = on_gpu(MODELS["channel"]())
    engine = NativeEngine(model, slots=5)
    expected = NativeEngine(model, slots=5, graphs=False).generate(PROMPTS, 2, SAMPLED)

    def broken(*_, **__):
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr("octavo.rl.step.choose", broken)
        with pytest.raises(RuntimeError, match="planted"):
            engine.generate(PROMPTS, 2, SAMPLED)
    assert_same(engine.generate(PROMPTS, 2, SAMPLED), expected)


def test_a_cache_that_does_not_fit():
    model = on_gpu(MODELS["channel"]())
    model.config.max_position_embeddings = 2**24
    engine = NativeEngine(model, slots=64)
    before = torch.cuda.memory_allocated()
    with pytest.raises(ValueError, match=r"a cache of 64 slots of .* lower slots=64"):
        engine.generate([[5]], 64, Sampling(max_new_tokens=2**23))
    assert torch.cuda.memory_allocated() <= before + 2**20
