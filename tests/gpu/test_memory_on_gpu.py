"""Memory of a step on a GPU: kinds that add up to the peak, and an allocator that has no more."""

import gc

import pytest
import torch
from torch import nn

from octavo import FP8Trainer, measure_memory
from octavo.optim import build_optimizer, step_in_backward
from octavo.tools.run_memory import planned_memory
from octavo.training.data import load_data
from octavo.training.learner import Learner
from octavo.training.settings import settings_from_options

MIB = 2**20


def deep(layers=8, width=1024):
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to("cuda", torch.bfloat16)


def stepped(**how):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = deep()
    optimizer = build_optimizer("adamw", model.parameters(), 1e-3)
    if how:
        step_in_backward(optimizer, **how)
    for _ in range(2):
        model(torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return measure_memory(model, optimizer)


def test_kinds_add_up_to_the_peak():
    actual = stepped()
    assert (actual.weights, actual.gradients, actual.states, actual.host) == (16 * MIB, 16 * MIB, 32 * MIB, 0)
    assert actual.peak == sum(actual.parts.values()) and actual.rest > 0


def test_states_in_host_memory_are_told_apart():
    actual = stepped(offload=True)
    assert (actual.gradients, actual.states, actual.host) == (2 * MIB, 0, 32 * MIB)


def test_out_of_memory_is_explained():
    model = deep()
    trainer = FP8Trainer(model, torch.optim.AdamW(model.parameters()), convert_model_to_fp8=False, loss_fn=_loss)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, 2**30 / total))
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            trainer.training_step((torch.randn(2**19, 1024, device="cpu").bfloat16(), torch.zeros(1)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    (note,) = caught.value.__notes__
    assert "more were asked for" in note and "weights 16.0 MiB" in note and "half the batch" in note


def _loss(y, _target):
    return y.float().square().mean()


@pytest.mark.parametrize(("precision", "fused"), [("fp32", False), ("bf16", False), ("fp8", False), ("fp8", True)])
def test_a_bdh_takes_what_was_planned(precision, fused):
    """Not compiled, and with the optimiser: steps of `octavo train`."""
    options = {"size": "25m", "batch": 4, "seq": 512, "micro_batches": 2, "precision": precision, "device": "cuda"}
    settings = settings_from_options({**options, "steps": 2, "warmup": 1, "fused": fused, "compile": False})
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # of tests before this one
    learner = Learner(settings, load_data(None, sequence=settings.seq, held_out=settings.held_out))
    for number in (1, 2):
        learner.step(number)
    planned = planned_memory(settings.to_dict())
    peak = measure_memory(learner.model, learner.optimizer).peak - before
    assert peak == pytest.approx(planned.peak, rel=0.08)
