"""What recording a step as a CUDA graph relies on, seen on a CPU: fixed memory, and nothing done for empty slots."""

import subprocess
import sys

import torch
from rollout_cases import PROMPTS, adapted, frozen, gaps

from octavo.rl import NativeEngine, Sampling

SAMPLED = Sampling(max_new_tokens=6, seed=0)


def memory(engine, slots):
    """All tensors that a step reads or writes."""
    found = {name: value for name, value in vars(slots).items() if isinstance(value, torch.Tensor)}
    for part in ("prefix", "suffix"):
        for layer, cache in enumerate(getattr(engine._cache, part)):
            found |= {f"{part} {layer} {i}": x for i, x in enumerate(cache) if x is not None}
    return found | {"prefix_lengths": engine._cache.prefix_lengths, "hidden": engine._hidden}


def test_a_step_of_empty_slots_changes_nothing():
    engine = NativeEngine(adapted(frozen()), slots=5, kv_dtype="fp8")
    engine.generate(PROMPTS, 3, SAMPLED)
    step = engine._steps[5, 4]
    step.slots.reset((), 1.0)
    before = {name: value.clone() for name, value in memory(engine, step.slots).items()}
    with engine.policy.rollout("weights"):
        for _ in range(3):
            step.run(SAMPLED)
    after = memory(engine, step.slots)
    assert before.keys() == after.keys() and len(before) > 20
    for name, value in after.items():
        assert torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (value, before[name]))), name  # unwritten is NaN


def test_rollouts_use_the_same_memory():
    engine = NativeEngine(adapted(frozen("Llama", "channel", torch.bfloat16)), slots=5)
    found = []
    for seed in range(3):
        engine.generate(PROMPTS, 3, Sampling(max_new_tokens=6, seed=seed))
        with engine.policy.rollout("weights"):
            state = engine.policy.state()
        slots = engine._steps[5, 4].slots
        found.append(({name: x.data_ptr() for name, x in memory(engine, slots).items()}, state))
    assert found[0] == found[1] == found[2]


def test_other_adapters_are_another_state():
    model = adapted(frozen())
    engine = NativeEngine(model, slots=5)
    states = []
    for context in (torch.no_grad(), model.disable_adapter(), torch.no_grad()):
        with context, engine.policy.rollout("weights"):
            states.append(engine.policy.state())
    assert states[0] == states[2] != states[1]


def test_a_bf16_cache_beside_an_fp32_model():
    model = adapted(frozen(products=False))
    completions = NativeEngine(model, slots=5, kv_dtype="bf16").generate(PROMPTS, 1, SAMPLED)
    found = gaps(model, PROMPTS, completions)
    assert 1e-6 < found.mean() < 0.02


def test_importing_needs_torch_alone():
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('transformers', 'peft', 'trl', 'triton', 'accelerate', 'vllm'):
            raise ImportError(name + ' was imported')
sys.meta_path.insert(0, Refuse())
import octavo.rl
assert all(hasattr(octavo.rl, name) for name in octavo.rl.__all__)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
