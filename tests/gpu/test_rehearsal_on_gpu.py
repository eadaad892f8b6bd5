"""A rehearsal of a layer's first step compiles its kernels and changes nothing else."""

import copy

import pytest
import torch
from test_decoder_on_gpu import batch, build

from octavo import FP8TrainingConfig, convert_to_fp8
from octavo.decoders import forwards, rehearsal
from octavo.kernels import launch
from octavo.numerics import scaling


def step(model, inputs):
    torch.manual_seed(3)
    torch.cuda.manual_seed(3)
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *[p.grad for p in model.parameters()], torch.cuda.get_rng_state(), torch.get_rng_state()]


@pytest.fixture
def counted(monkeypatch):
    calls = []
    monkeypatch.setattr(rehearsal, "_KINDS", set())
    monkeypatch.setattr(forwards, "rehearse", lambda *args: calls.append(args) or rehearsal.rehearse(*args))
    return calls


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpointed", "reentrant"])
@pytest.mark.parametrize("recipe", ["delayed", "block", "stochastic"])
def test_the_first_step_is_the_same(counted, monkeypatch, recipe, checkpointing):
    stochastic = FP8TrainingConfig(rounding={"g": "stochastic"})
    config = stochastic if recipe == "stochastic" else FP8TrainingConfig.from_recipe(recipe)
    model = build()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    convert_to_fp8(model, config)
    other = copy.deepcopy(model)
    rehearsed = step(model, batch(2, 256))
    assert len(counted) == 1, "once for layers of one kind"
    monkeypatch.setattr(forwards, "needs_rehearsal", lambda *_: False)
    for actual, expected in zip(rehearsed, step(other, batch(2, 256)), strict=True):
        assert torch.equal(actual, expected)
    rows, others = (
        [x for m in one.modules() for x in m.__dict__.values() if isinstance(x, torch.Tensor)] for one in (model, other)
    )
    added_up = [scaling.SATURATED, scaling.UNDERFLOW, scaling.RESCALED]  # by atomics, in any order
    for x, y in zip(rows, others, strict=True):
        x[added_up] = y[added_up] = 0.0
        assert torch.equal(x, y)
    assert rows


def test_kernels_are_compiled_and_not_launched(counted, monkeypatch):
    """After the rehearsal, the layer's own step compiles nothing any more."""
    model = build(hidden_size=640, intermediate_size=1152, num_attention_heads=5, num_key_value_heads=5)
    convert_to_fp8(model, FP8TrainingConfig())
    late = []
    compile_and_run = launch._Launch.compile_and_run

    def watched(self, tensors, seed):
        caches = self.kernel.device_caches[torch.cuda.current_device()][0]
        before = len(caches)
        compile_and_run(self, tensors, seed)
        if len(caches) > before:
            late.append(self.kernel.fn.__name__)

    monkeypatch.setattr(launch._Launch, "compile_and_run", watched)
    step(model, batch(2, 256))
    assert len(counted) == 1
    assert not late
