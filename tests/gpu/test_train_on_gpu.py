"""`octavo train` on the GPU: the fused layers by default, steps that wait for nothing, and exact resuming."""

import signal

import pytest
import torch
from run_cases import curve, run

from octavo.models.bdh import is_fused
from octavo.training.data import load_data
from octavo.training.learner import Learner
from octavo.training.run_trainer import TakenStep
from octavo.training.settings import settings_from_options
from octavo.training.signals import Interrupted

SMALL = {"dim": 128, "heads": 4, "neurons": 1024, "layers": 2, "batch": 4, "seq": 128, "micro_batches": 1}
BRIEF = {"device": "cuda", "steps": 12, "warmup": 2, "evaluation_batches": 2, "sample_bytes": 5, "lr": 3e-3}


def make(**options):
    settings = settings_from_options({**SMALL, **BRIEF, **options})
    return Learner(settings, load_data(None, sequence=settings.seq, held_out=settings.held_out))


def loss(step):
    return step.result.loss if isinstance(step, TakenStep) else step.loss


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"precision": "bf16"}])
def test_a_step_waits_for_nothing(options):
    torch._dynamo.reset()
    learner = make(**options)
    assert is_fused(learner.model) == (options.keys() <= {"micro_batches"})
    for number in (1, 2, 3):
        learner.step(number)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps = [learner.step(number) for number in (4, 5)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(isinstance(step, TakenStep) and step.seconds > 0 and not step.result.skipped for step in steps)


def test_fused_layers_learn_what_the_autocast_does():
    fused, plain = make(), make(fused=False, compile=False)
    losses = [(loss(fused.step(number)), loss(plain.step(number))) for number in range(1, 13)]
    assert losses[-1][0] < losses[0][0] - 0.5
    for ours, theirs in losses:
        assert ours == pytest.approx(theirs, rel=0.01)


def test_a_step_that_is_not_finite_changes_nothing():
    learner = make()
    learner.step(1)
    with torch.no_grad():
        learner.model.lm_head[0, 0] = float("nan")
    before = learner.model.encoder.detach().clone()
    states = {name: value.clone() for name, value in learner.optimizer.state[learner.model.encoder].items()}
    assert learner.step(2).result.skipped
    assert torch.equal(learner.model.encoder, before)
    for name, value in states.items():
        assert torch.equal(learner.optimizer.state[learner.model.encoder][name], value)


def test_a_fused_run_resumes_bit_for_bit(tmp_path, monkeypatch):
    settings = make().settings
    whole = run(settings, tmp_path / "whole")
    real = Learner.step

    def step(self, number):
        if number == 7:
            signal.raise_signal(signal.SIGTERM)
        return real(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", step)
        with pytest.raises(Interrupted):
            run(settings, tmp_path / "parts")
    run(settings, tmp_path / "parts", resume=True)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert whole.results["fp8"].memory.peak > 0 and whole.results["fp8"].ms_per_step > 0
