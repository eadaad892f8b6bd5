"""One step: FP32 accumulation over micro-batches, clipping, skipping non-finite steps, and an exact state."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.models.bdh import BDH
from octavo.optim import build_optimizer, set_learning_rate
from octavo.training.checkpoint import load_checkpoint, save_checkpoint
from octavo.training.data import ByteData, get_batch, load_data
from octavo.training.errors import UserError
from octavo.training.learner import Learner
from octavo.training.settings import TrainSettings
from octavo.training.trainer import FP8Trainer


def data_of(settings: TrainSettings) -> ByteData:
    return load_data(settings.data, sequence=settings.seq, held_out=settings.held_out)


def make(make_settings: Any, **options: Any) -> Learner:
    settings = make_settings(**options)
    return Learner(settings, data_of(settings))


def parameters_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in learner.model.named_parameters()}


@pytest.mark.parametrize("precision", ["fp8", "bf16", "fp32"])
def test_it_learns_in_every_precision(make_settings: Any, precision: str) -> None:
    learner = make(make_settings, precision=precision, steps=40, lr=0.01)
    before = parameters_of(learner)
    losses = [learner.step(number).loss for number in range(1, 41)]
    assert losses[-1] < losses[0] - 1
    for name, value in learner.model.named_parameters():
        assert value.dtype == torch.float32 and not torch.equal(value, before[name]), name


@pytest.mark.parametrize("optimizer", ["adamw8bit", "adamw4bit", "adamwfp8"])
def test_it_learns_with_low_bit_optimizers(make_settings: Any, optimizer: str) -> None:
    learner = make(make_settings, optimizer=optimizer, steps=20, lr=0.01, dim=32, neurons=64)
    losses = [learner.step(number).loss for number in range(1, 21)]
    assert losses[-1] < losses[0] - 0.5


def test_micro_batches_average_to_the_gradient_of_the_whole(make_settings: Any) -> None:
    """Two micro-batches of 2 against their four sequences at once: the same mean loss and the same gradient norm."""
    parts = make(make_settings, precision="fp32", micro_batches=2)
    whole = make(make_settings, precision="fp32")
    batches = [
        get_batch(parts.data.train, seed=0, step=1, micro_batch=m, batch=2, sequence=parts.settings.seq) for m in (0, 1)
    ]
    loss = whole.model(torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches]))[1]
    loss.backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in whole.model.parameters()]))
    step = parts.step(1)
    assert step.loss == pytest.approx(loss.item(), rel=1e-6)
    assert step.grad_norm == pytest.approx(norm.item(), rel=1e-5)


def test_clipping_bounds_what_the_optimizer_sees(make_settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for clip, bound in ((0.1, 0.1), (0.0, None)):
        learner = make(make_settings, precision="fp32", clip=clip)
        norms: list[float] = []
        parameters = list(learner.model.parameters())
        monkeypatch.setattr(
            learner.optimizer,
            "step",
            lambda p=parameters, n=norms: n.append(torch.cat([q.grad.flatten() for q in p]).norm().item()),
        )
        reported = learner.step(1).grad_norm
        assert reported > 0.1
        assert norms[0] == pytest.approx(bound or reported, rel=1e-4)


@pytest.mark.parametrize("precision", ["fp8", "fp32"])
def test_a_step_that_is_not_finite_is_skipped_and_forgotten(make_settings: Any, precision: str) -> None:
    learner = make(make_settings, precision=precision)
    learner.step(1)
    clean = parameters_of(learner)
    with torch.no_grad():
        learner.model.lm_head[0, 0] = float("nan")
    broken = learner.step(2)
    assert broken.skipped
    assert torch.equal(learner.model.encoder, clean["encoder"])
    with torch.no_grad():
        learner.model.lm_head.copy_(clean["lm_head"])
    state = copy.deepcopy(learner.state_dict()["scaling"])
    assert not learner.step(3).skipped
    if state is not None:  # the good step after a bad one counts: every history moved
        steps = learner.state_dict()["scaling"]["_steps"]
        assert (steps == state["_steps"] + 1).all()


def test_a_step_with_an_infinite_loss_is_skipped_though_its_gradient_is_finite(make_settings: Any) -> None:
    learner = make(make_settings, micro_batches=2)
    learner.step(1)
    before = parameters_of(learner)
    learner.model.register_forward_hook(lambda _module, _args, output: (output[0], output[1] + float("inf")))
    step = learner.step(2)
    assert step.skipped and step.loss == float("inf") and 0 < step.grad_norm < float("inf")
    assert all(torch.equal(value, before[name]) for name, value in learner.model.named_parameters())


def test_a_step_is_that_of_fp8_trainer(make_settings: Any) -> None:
    """Settings of a run, and the class that users call: the same losses, norms and weights."""
    learner = make(make_settings, micro_batches=3, clip=0.05, lr=0.01)
    settings = learner.settings
    torch.manual_seed(settings.seed)
    model = BDH(settings.shape)
    optimizer = build_optimizer("adamw", model.parameters(), lr=1.0, weight_decay=0.1, betas=(0.9, 0.95))
    trainer = FP8Trainer(model, optimizer, settings.fp8, gradient_accumulation_steps=3, max_grad_norm=0.05)
    for number in (1, 2, 3):
        set_learning_rate(optimizer, settings.learning_rate(number))
        for m in range(3):
            batch = get_batch(
                learner.data.train, seed=0, step=number, micro_batch=m, batch=settings.batch, sequence=settings.seq
            )
            trainer.training_step(batch)
        assert learner.step(number) == trainer.last_step
    for name, value in learner.model.named_parameters():
        assert torch.equal(value, model.get_parameter(name)), name


@pytest.mark.parametrize("optimizer", ["adamw", "adamw4bit"])
def test_a_saved_state_continues_bit_for_bit(make_settings: Any, tmp_path: Path, optimizer: str) -> None:
    options = {"optimizer": optimizer, "dropout": 0.2, "fp8": {"rounding": ["nearest", "nearest", "stochastic"]}}
    learner = make(make_settings, **options)
    for number in (1, 2, 3):
        learner.step(number)
    path = save_checkpoint(tmp_path, 3, learner.model.state_dict(), learner.state_dict())
    wanted = [learner.step(number) for number in (4, 5, 6)]

    resumed = make(make_settings, **options)
    resumed.load_state_dict(*load_checkpoint(path, resumed.device))
    assert [resumed.step(number) for number in (4, 5, 6)] == wanted

    control = make(make_settings, **options)
    control.load_state_dict(*load_checkpoint(path, control.device))
    torch.manual_seed(99)
    assert [control.step(number) for number in (4, 5, 6)] != wanted


def test_evaluation_and_sampling_leave_no_trace(make_settings: Any) -> None:
    with_pause, without = make(make_settings), make(make_settings)
    with_pause.step(1)
    without.step(1)
    products = with_pause.report.to_dict()["products"]
    assert with_pause.evaluate() == with_pause.evaluate()
    torch_state = torch.get_rng_state()
    assert with_pause.sample().prompt == "def hatch(egg):\n"
    assert torch.equal(torch_state, torch.get_rng_state())
    assert [product["name"] for product in with_pause.report.to_dict()["products"]] == [p["name"] for p in products]
    assert with_pause.step(2) == without.step(2)


def test_a_gpu_that_is_not_there(make_settings: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="--device cpu"):
        make(make_settings, device="cuda")
