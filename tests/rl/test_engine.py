"""The native engine against transformers' `generate` and against full forwards of the same model."""

import pytest
import torch
from rollout_cases import FAMILIES, PROMPTS, VOCABULARY, adapted, frozen, full_logprobs, gaps, hf_generate, plain

from octavo.rl import NativeEngine, Sampling

GREEDY = Sampling(max_new_tokens=12, temperature=0)


@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family, granularity):
    """12 completions in 5 slots: prompts of different lengths, slots that are refilled, prompts that are shared."""
    model = adapted(frozen(family, granularity, products=False))
    expected = hf_generate(model.eval(), PROMPTS, GREEDY.max_new_tokens)
    engine = NativeEngine(model, slots=5)
    completions = engine.generate(PROMPTS, 3, GREEDY)
    assert [c.prompt for c in completions] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [c.tokens for c in completions] == [tokens for tokens in expected for _ in range(3)]
    assert gaps(model, PROMPTS, completions).max() < 1e-5
    assert engine.statistics()["prefills"] == len(PROMPTS)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3"])
def test_without_fp8(family):
    """A model whose attention is transformers' own, not a fused one."""
    model = plain(family)
    completions = NativeEngine(model, slots=3).generate(PROMPTS, 1, GREEDY)
    assert [c.tokens for c in completions] == hf_generate(model.eval(), PROMPTS, GREEDY.max_new_tokens)
    assert gaps(model, PROMPTS, completions).max() < 1e-5


def test_slots_make_no_difference():
    model = adapted(frozen(products=False))
    found = [
        [c.tokens for c in NativeEngine(model, slots=slots).generate(PROMPTS, 2, GREEDY)] for slots in (1, 2, 7, 64)
    ]
    assert all(tokens == found[0] for tokens in found)


def test_sampled_logprobs_are_those_of_the_temperature():
    model = adapted(frozen(products=False))
    sampling = Sampling(max_new_tokens=10, temperature=0.7, seed=1)
    completions = NativeEngine(model, slots=5).generate(PROMPTS, 3, sampling)
    assert gaps(model, PROMPTS, completions, temperature=0.7).max() < 1e-5
    assert gaps(model, PROMPTS, completions, temperature=1.0).max() > 0.1
    assert len({tuple(c.tokens) for c in completions}) == 12


def test_seed_decides():
    engine = NativeEngine(plain(), slots=4)

    def tokens(seed):
        return [c.tokens for c in engine.generate(PROMPTS, 2, Sampling(max_new_tokens=6, seed=seed))]

    assert tokens(3) == tokens(3) != tokens(4)
    torch.manual_seed(5)
    first = tokens(None)
    assert first != tokens(None)
    torch.manual_seed(5)
    assert first == tokens(None)


def test_stop_tokens_end_completions():
    """Sampled without refilling, so that each slot draws the same numbers with and without stop tokens."""
    engine = NativeEngine(plain(), slots=4)
    options = {"max_new_tokens": 12, "temperature": 1.5, "seed": 3}
    whole = engine.generate(PROMPTS, 1, Sampling(**options))
    stops = (whole[0].tokens[3], whole[1].tokens[0])
    assert stops[0] not in whole[0].tokens[:3]
    completions = engine.generate(PROMPTS, 1, Sampling(**options, stop_ids=stops))
    for completion, longer in zip(completions, whole, strict=True):
        ends = [i for i, token in enumerate(longer.tokens) if token in stops]
        expected = longer.tokens[: ends[0] + 1] if ends else longer.tokens
        assert completion.tokens == expected
        assert completion.stopped == bool(ends)
        assert len(completion.logprobs) == len(completion.tokens)
    assert [len(c.tokens) for c in completions[:2]] == [4, 1]
    assert engine.statistics()["no_stop_ids"] == 0


def test_stop_tokens_of_the_model():
    model = plain()
    engine = NativeEngine(model)
    first = engine.generate(PROMPTS[:1], 1, GREEDY)[0]
    assert not first.stopped and engine.statistics()["no_stop_ids"] == 1  # ends by length, and says so
    model.generation_config.eos_token_id = [first.tokens[0], 3]
    stopped = engine.generate(PROMPTS[:1], 1, GREEDY)[0]
    assert stopped.tokens == first.tokens[:1] and stopped.stopped
    assert not engine.generate(PROMPTS[:1], 1, Sampling(max_new_tokens=12, temperature=0, stop_ids=()))[0].stopped


def test_equal_prompts_are_prefilled_once():
    engine = NativeEngine(plain(), slots=5)
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[0]]
    completions = engine.generate(prompts, 2, GREEDY)
    assert [c.prompt for c in completions] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert completions[0].tokens == completions[5].tokens == completions[7].tokens != completions[2].tokens
    statistics = engine.statistics()
    assert statistics["prefills"] == 2
    assert statistics["prompt_tokens"] == len(PROMPTS[0]) + len(PROMPTS[1])
    assert statistics["tokens"] == 8 * 12 and statistics["seconds"] > 0


def test_prompts_may_be_tensors():
    engine = NativeEngine(plain(), slots=5)
    lists = engine.generate(PROMPTS[:1], 1, GREEDY)
    assert engine.generate(torch.tensor(PROMPTS[:1]), 1, GREEDY) == lists
    assert engine.generate(torch.tensor(PROMPTS[:1]).numpy(), 1, GREEDY) == lists


def test_many_prompts_in_few_places():
    """More prompts than the cache has places for: each is stored where another one was."""
    model = adapted(frozen(products=False))
    prompts = [[1 + i, 2 * i + 3, *range(i % 5)] for i in range(20)]
    engine = NativeEngine(model, slots=4)
    completions = engine.generate(prompts, 2, Sampling(max_new_tokens=5, temperature=0))
    assert gaps(model, prompts, completions).max() < 1e-5
    assert engine.statistics()["prefills"] == 20
    assert engine._cache.size.places < 20


def test_positions_and_max_length_bound_completions():
    model = plain()  # 64 positions
    long = list(range(1, 61))
    done = NativeEngine(model).generate([long, [5]], 1, Sampling(max_new_tokens=100, temperature=0))
    assert [len(c.tokens) for c in done] == [4, 63]
    assert not done[0].stopped
    done = NativeEngine(model, max_length=8).generate([[5, 6, 7], [5]], 1, Sampling(max_new_tokens=6, temperature=0))
    assert [len(c.tokens) for c in done] == [5, 6]
    assert gaps(model, [[5, 6, 7], [5]], done).max() < 1e-5


def test_first_and_later_tokens_have_the_distribution_of_the_model():
    """Pearson's statistic of 3,000 samples, for the token after the prompt and the one after that."""
    model = plain()
    samples = 3000
    sampling = Sampling(max_new_tokens=2, temperature=1.3, seed=0)
    completions = NativeEngine(model, slots=64).generate([PROMPTS[0]], samples, sampling)
    pairs = torch.tensor([c.tokens for c in completions])
    with torch.no_grad():
        ids = torch.cat([torch.tensor([PROMPTS[0]]).expand(samples, -1), pairs[:, :1]], dim=1)
        logits = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float() / 1.3
    for place in (0, 1):
        expected = logits[:, -2 + place].softmax(-1).sum(0)
        seen = torch.bincount(pairs[:, place], minlength=VOCABULARY).float()
        often = expected >= 5
        groups = [torch.cat([x[often], x[~often].sum()[None]]) for x in (seen, expected)]
        statistic = ((groups[0] - groups[1]) ** 2 / groups[1].clamp(min=1)).sum()
        freedom = len(groups[0]) - 1
        assert freedom > 20
        assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_truncated_sampling():
    model = plain()
    engine = NativeEngine(model, slots=64)
    prompt = PROMPTS[1]
    with torch.no_grad():
        shares = model.eval()(input_ids=torch.tensor([prompt])).logits[0, -1].float().softmax(-1)
    order = shares.argsort(descending=True).tolist()
    few = engine.generate([prompt], 300, Sampling(max_new_tokens=1, top_k=3, seed=0))
    assert {c.tokens[0] for c in few} == set(order[:3])
    nucleus = order[: int((shares[order].cumsum(0) < 0.5).sum()) + 1]
    drawn = engine.generate([prompt], 2000, Sampling(max_new_tokens=1, top_p=0.5, seed=0))
    assert {c.tokens[0] for c in drawn} <= set(nucleus)
    assert len({c.tokens[0] for c in drawn}) > len(nucleus) / 2
    whole = full_logprobs(model, prompt, few[0].tokens)
    assert abs(few[0].logprobs[0] - float(whole[0])) < 1e-5  # of the whole vocabulary, all the same


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_fp8_cache(family):
    """Keys and values in E4M3 have a relative error of 2⁻⁴ at most: tokens agree but for near-ties, of many here."""
    model = adapted(frozen(family, products=False))
    engine = NativeEngine(model, slots=5, kv_dtype="fp8")
    completions = engine.generate(PROMPTS, 2, GREEDY)
    agrees = []
    for completion in completions:  # with what a full forward takes for the likeliest, after the same tokens
        prompt = PROMPTS[completion.prompt]
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([[*prompt, *completion.tokens]])).logits[0]
        agrees.append(logits[len(prompt) - 1 : -1].argmax(-1) == torch.tensor(completion.tokens))
    assert torch.cat(agrees).float().mean() > 0.75
    found = gaps(model, PROMPTS, completions)
    assert 1e-6 < found.mean() < 0.1
    bytes_a_token = 2 * 2 * 2 * (16 + 4)  # k and v, layers, heads, width and scale
    assert engine.statistics()["cache_bytes"] == engine._cache.size.tokens * bytes_a_token


def test_standby_frees_the_cache_and_wake_brings_it_back():
    model = adapted(frozen("Qwen3", "channel", products=False))
    engine = NativeEngine(model, slots=5)
    engine.wake()  # nothing to bring back yet
    before = engine.generate(PROMPTS, 2, GREEDY)
    size = engine._cache.size
    engine.standby()
    assert engine._cache is None and not engine._steps and engine._hidden is None
    engine.standby()
    engine.wake()
    assert engine._cache.size == size
    assert engine.generate(PROMPTS, 2, GREEDY) == before
    engine.standby()
    assert engine.generate(PROMPTS, 2, GREEDY) == before  # wakes by itself


def test_a_larger_rollout_gets_a_larger_cache():
    engine = NativeEngine(plain(max_position_embeddings=512), slots=4)
    engine.generate([[5]], 1, Sampling(max_new_tokens=2))
    small = engine._cache.nbytes
    long = [3] * 200
    again = engine.generate([long, [5]], 4, Sampling(max_new_tokens=90, temperature=0))
    assert engine._cache.nbytes > small
    assert gaps(engine.policy.model, [long, [5]], again).max() < 1e-5
    kept = engine._cache
    engine.generate([[5]], 1, Sampling(max_new_tokens=2))
    assert engine._cache is kept
