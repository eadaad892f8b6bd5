"""FP8Trainer: batches of both kinds, FP32 accumulation, clipping, files, and a state that resumes exactly."""

import io
import logging
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from octavo import FP8Linear, FP8Trainer, FP8TrainingConfig
from octavo.models.bdh import BDH, BDHConfig, fuse


class WithLoss(nn.Module):
    """Returns an object with `.loss`, as Hugging Face models do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x, labels=None):
        return SimpleNamespace(loss=(self.body(x) - labels).square().mean(), logits=None)


def make(model=None, config=None, **options):
    model = model or WithLoss()
    return FP8Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config, **options)


def batches(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(8, 16, generator=generator), "labels": torch.ones(8, 16)} for _ in range(n)]


def test_dict_batches_train():
    trainer = make()
    losses = [trainer.training_step(batch).item() for batch in batches(40)]
    assert isinstance(trainer.model.body[0], FP8Linear)
    assert losses[-1] < losses[0] / 4 and trainer.step == 40
    assert "2 of 2 in FP8" in str(trainer.report)


def test_tuple_batches_run_raw_parameters_under_the_autocast():
    trainer = make(BDH(BDHConfig(dim=32, heads=2, neurons=64, layers=1)))
    tokens = torch.randint(256, (2, 17))
    losses = [trainer.training_step((tokens[:, :-1], tokens[:, 1:])).item() for _ in range(15)]
    assert losses[-1] < losses[0] - 1
    assert len(trainer.report.in_fp8) == 5


def test_loss_fn():
    model = nn.Linear(16, 4)
    trainer = make(model, loss_fn=nn.functional.cross_entropy)
    loss = trainer.training_step([torch.randn(8, 16), torch.randint(4, (8,))])
    assert loss.dim() == 0 and not loss.requires_grad


def test_a_model_without_a_loss_is_an_error():
    with pytest.raises(TypeError, match=r"without a loss.*loss_fn"):
        make(nn.Linear(16, 4)).training_step((torch.randn(8, 16),))


def test_without_conversion_the_model_is_trained_as_it_is():
    trainer = make(convert_model_to_fp8=False)
    trainer.training_step(batches(1)[0])
    assert type(trainer.model.body[0]) is nn.Linear and trainer.scaling is None


def test_accumulation_is_in_fp32():
    """1 + 2^-9 eight times: a BF16 sum would drop every addend below 2^-8."""

    class Scalar(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))

        def forward(self, factor):
            return (self.p * factor.bfloat16()).sum().float()

    model = Scalar()
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.p.grad.clone()))
    trainer = FP8Trainer(model, optimizer, convert_model_to_fp8=False, gradient_accumulation_steps=16)
    for factor in [16.0] + [2.0**-5] * 15:
        trainer.training_step((torch.tensor(factor),))
    exact = (16 + 15 * 2.0**-5) / 16
    naive = torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(15):
        naive = naive + torch.tensor(2.0**-9, dtype=torch.bfloat16)
    assert naive == 1 and seen == [torch.tensor([exact]).bfloat16()] and seen[0] > 1
    assert trainer.step == 1 and not trainer.state_dict()["accumulated"]


def test_micro_batches_equal_one_batch():
    """The same data whole or in four parts: the same gradient but for FP8 rounding (current scales: nothing saturates).

    Each of the 16 × 32 sums has a relative error of about 2^-4; over that many, the norm's is below 2 %.
    """
    norms = []
    for parts in (1, 4):
        trainer = make(config=FP8TrainingConfig.from_recipe("current"), gradient_accumulation_steps=parts)
        batch = batches(1)[0]
        for part in range(parts):
            trainer.training_step({k: v.chunk(parts)[part] for k, v in batch.items()})
        norms.append(trainer.grad_norm.item())
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_clipping(accumulation):
    seen = []
    trainer = make(max_grad_norm=1e-3, gradient_accumulation_steps=accumulation)
    trainer.optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm().item())
    )
    for batch in batches(accumulation):
        trainer.training_step(batch)
    assert trainer.grad_norm > 1e-3 and len(seen) == 1 and seen[0] == pytest.approx(1e-3, rel=1e-3)


def test_a_non_finite_gradient_skips_the_step_and_is_said(caplog):
    trainer = make()
    good, bad = batches(2)
    trainer.training_step(good)
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    history = trainer.scaling.state_dict()["_history"]
    bad["x"][0, 0] = float("inf")
    with caplog.at_level(logging.WARNING, "octavo"):
        trainer.training_step(bad)
    assert trainer.skipped_steps == 1 and trainer.step == 1 and "step skipped" in caplog.text
    assert all(torch.equal(p, w) for p, w in zip(trainer.model.parameters(), weights, strict=True))
    assert torch.equal(trainer.scaling.state_dict()["_history"], history)
    trainer.training_step(good)
    assert trainer.step == 2


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "folder"])
def test_save_and_load(tmp_path, name):
    trainer = make()
    trainer.training_step(batches(1)[0])
    path = trainer.save_model(tmp_path / name)
    assert path.exists() and not list(tmp_path.rglob("*.tmp"))
    other = make()
    other.load_model(tmp_path / name)
    for mine, theirs in zip(other.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    WithLoss().load_state_dict(trainer.model.state_dict())
    with pytest.raises(FileNotFoundError, match="no such model file"):
        other.load_model(tmp_path / "absent.pt")


@pytest.mark.parametrize("at", [4, 5], ids=["between steps", "inside an accumulation"])
@pytest.mark.parametrize("kind", ["linears", "autocast", "fused"])
def test_state_resumes_exactly(kind, at):
    def build():
        if kind == "linears":
            return make(gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = BDH(BDHConfig(dim=16, heads=2, neurons=32, layers=1))
        if kind == "fused":
            fuse(model)
        trainer = make(model, gradient_accumulation_steps=2)
        assert ("layers.0.kept.s" in trainer.scaling.names) == (kind == "fused")
        return trainer

    tokens = [torch.randint(256, (2, 2, 9)) for _ in range(10)]
    data = batches(10) if kind == "linears" else [(t[0], t[1]) for t in tokens]
    trainer = build()
    for batch in data[:at]:
        trainer.training_step(batch)
    state = trainer.state_dict()
    state = {**state, "model": {k: v.clone() for k, v in state["model"].items()}}
    torch.save(state, buffer := io.BytesIO())
    expected = [trainer.training_step(batch).item() for batch in data[at:]]
    buffer.seek(0)
    resumed = build()
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    assert [resumed.training_step(batch).item() for batch in data[at:]] == expected
    assert resumed.step == trainer.step == 5


def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches_also_when_resumed():
    trainer, resumed = (make(gradient_accumulation_steps=4) for _ in range(2))
    data = batches(4)
    losses = [trainer.training_step(batch).item() for batch in data[:2]]
    assert trainer.last_step is None
    torch.save(trainer.state_dict(), buffer := io.BytesIO())
    losses += [trainer.training_step(batch).item() for batch in data[2:]]
    assert trainer.last_step.loss == pytest.approx(sum(losses) / 4, rel=1e-6)
    assert trainer.last_step.grad_norm == trainer.grad_norm.item() and not trainer.last_step.skipped
    buffer.seek(0)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    for batch in data[2:]:
        resumed.training_step(batch)
    assert resumed.last_step == trainer.last_step


def test_autocast_dtype_is_that_of_forward_alone():
    seen = []

    class Model(WithLoss):
        def forward(self, x, labels=None):
            seen.append(torch.is_autocast_enabled("cpu"))
            seen.append(self.body(x).dtype)
            return super().forward(x, labels)

    trainer = make(Model(), convert_model_to_fp8=False, autocast_dtype=torch.bfloat16)
    trainer.optimizer.register_step_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    trainer.training_step(batches(1)[0])
    assert seen == [True, torch.bfloat16, False]
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    with trainer.autocast():
        assert trainer.model.body(torch.randn(2, 16)).dtype == torch.bfloat16


class Random(WithLoss):
    """Dropout, and layers left out by Python's random numbers."""

    def forward(self, x, labels=None):
        x = nn.functional.dropout(x, 0.5)
        return super().forward(x * random.random(), labels)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_random_numbers_resume_as_well(accumulation):
    config = FP8TrainingConfig.from_recipe("current", rounding={"g": "stochastic"})
    trainer = make(Random(), config, gradient_accumulation_steps=accumulation)
    data = batches(6)
    for batch in data[:3]:
        trainer.training_step(batch)
    torch.save(trainer.state_dict(), buffer := io.BytesIO())
    expected = [trainer.training_step(batch).item() for batch in data[3:]]
    buffer.seek(0)
    resumed = make(Random(), config, gradient_accumulation_steps=accumulation)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    assert [resumed.training_step(batch).item() for batch in data[3:]] == expected
    for mine, theirs in zip(resumed.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_state_of_before_loads_and_says_what_it_lacks(caplog):
    trainer = make()
    state = trainer.state_dict()
    del state["rng"]
    with caplog.at_level(logging.WARNING, "octavo"):
        trainer.load_state_dict(state)
    assert "without random number states" in caplog.text


def test_info_logging_says_what_happens(caplog):
    with caplog.at_level(logging.INFO, "octavo"):
        make()
    assert "FP8 training enabled with format: hybrid" in caplog.text and "emulated on cpu" in caplog.text


@pytest.mark.parametrize("bad", [0, -1.0])
def test_max_grad_norm_must_be_positive(bad):
    with pytest.raises(ValueError, match="max_grad_norm"):
        make(max_grad_norm=bad)


def test_raw_parameters_beside_a_skipped_head_run_under_the_autocast():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.lm_head = nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 4)

        def forward(self, x):
            return self.lm_head(x @ self.w).square().mean()

    trainer = make(Model())
    trainer.training_step((torch.randn(4, 16),))
    assert [entry.name for entry in trainer.report.in_fp8] == ["matmul.0[w]"]


def test_bad_batches_and_losses():
    with pytest.raises(TypeError, match="batch is a Tensor"):
        make().training_step(torch.randn(4, 16))
    with pytest.raises(ValueError, match="a scalar with a graph"):
        make(nn.Linear(4, 4), loss_fn=lambda y, _: y).training_step((torch.randn(2, 4), None))
    with pytest.raises(ValueError, match=r"ends in .safetensors"):
        make().save_model("model.bin")


def test_a_saved_state_does_not_change_with_training():
    trainer = make(gradient_accumulation_steps=2)
    first, second = batches(2)
    trainer.training_step(first)
    state = trainer.state_dict()["accumulated"]
    before = {name: value.clone() for name, value in state.items()}
    trainer.training_step(second)
    assert all(torch.equal(state[name], before[name]) for name in state)


class NoMemory(WithLoss):
    def forward(self, x, labels=None):
        if x.shape[0] > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(x, labels)


def test_out_of_memory_is_explained(tmp_path):
    trainer = make(NoMemory())
    trainer.training_step(batches(1)[0])
    path = trainer.save_model(tmp_path / "model")
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2") as caught:
        trainer.training_step({"x": torch.randn(16, 16), "labels": torch.ones(16, 16)})
    (note,) = caught.value.__notes__
    assert note.startswith("out of GPU memory: 2.0 GiB more were asked for")
    assert "gradient_accumulation_steps=2" in note and 'build_optimizer("adamw4bit", …)' in note
    assert "release_gradients=True" in note and str(path) in note and "is intact" in note
    trainer.training_step(batches(1)[0])  # and it can go on with a smaller batch


def test_nothing_is_offered_that_would_be_refused():
    trainer = make(NoMemory(), max_grad_norm=1.0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.training_step({"x": torch.randn(16, 16), "labels": torch.ones(16, 16)})
    assert "release_gradients" not in caught.value.__notes__[0]
