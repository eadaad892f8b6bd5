"""The native engine against transformers' `generate` and against full forwards of the same model."""

import pytest
from rollout_cases import FAMILIES, PROMPTS, adapted, frozen, gaps, hf_generate

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
