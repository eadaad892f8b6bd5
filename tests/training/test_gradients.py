"""Sums of gradients over micro-batches: right on average in any precision, in the bytes promised, and resumable."""

import io

import pytest
import torch
from torch import nn

from octavo import FP8Trainer
from octavo.training.gradients import GRADIENTS

ROWS, COLUMNS, STEPS = 96, 200, 8  # blocks of 128 and of 72
BYTES = {"fp32": 4, "bf16": 2, "fp8": 1 + 4 * 2 / COLUMNS}


class Given(nn.Module):
    """Its gradient is what it is given."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=dtype))
        self.vector = nn.Parameter(torch.zeros(COLUMNS, dtype=dtype))

    def forward(self, gradient, also_vector=True):
        y = (self.matrix * gradient.to(self.matrix.dtype)).sum(dtype=torch.float32)
        return y + (self.vector * gradient[0].to(self.vector.dtype)).sum(dtype=torch.float32) if also_vector else y


def make(kind, dtype=torch.bfloat16, steps=STEPS):
    model = Given(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = {}
    optimizer.register_step_pre_hook(lambda *_: seen.update({n: p.grad.clone() for n, p in model.named_parameters()}))
    options = {"gradient_accumulation_steps": steps, "gradients": kind}
    return FP8Trainer(model, optimizer, convert_model_to_fp8=False, **options), seen


def gradients(count=STEPS):
    """Of one sign, so that sums grow; from row to row of very different size."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-6, 3, ROWS)[:, None]
    return [(torch.rand(ROWS, COLUMNS, generator=generator) * sizes).bfloat16() for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", GRADIENTS)
def test_sums_are_right_on_average(kind, dtype):
    trainer, seen = make(kind, dtype)
    given = gradients()
    for gradient in given:
        trainer.training_step((gradient,))
    exact = torch.stack([g.double() / STEPS for g in given]).sum(0)
    error = (seen["matrix"].double() - exact) / exact
    # Seven additions are rounded, each with a variance of at most (step / 2)², and the result to BF16.
    step = {"fp32": 0, "bf16": 2**-7, "fp8": 2**-3}[kind]
    spread = (STEPS - 1) ** 0.5 * step / 2 + (2**-8 if dtype == torch.bfloat16 else 1e-6)
    assert error.square().mean().sqrt() < spread
    assert abs(error.mean()) < 5 * spread / error.numel() ** 0.5
    torch.testing.assert_close(seen["vector"].double(), exact[0], rtol=2**-7, atol=0)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_what_rounding_to_the_nearest_would_lose(kind):
    """Large ones first, then small ones: each below half a step of the sum."""
    trainer, seen = make(kind, torch.float32, steps=64)
    start = torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) + 1
    small = 2**-10 if kind == "bf16" else 2**-7
    for i in range(64):
        trainer.training_step((start if i == 0 else start * small,))
    grown = seen["matrix"] * 64 / start - 1
    assert grown.mean() == pytest.approx(63 * small, rel=0.05)
    # One in eight times or more, whatever the element: with the same random numbers in every micro-batch, some never.
    assert (grown > small / 2).float().mean() > 0.99


class Pair(nn.Module):
    """Two parameters with the same gradients."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.zeros(ROWS, COLUMNS)) for _ in range(2))

    def forward(self, gradient):
        return (self.one * gradient + self.other * gradient).sum()


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_parameters_have_random_numbers_of_their_own(kind):
    model = Pair()
    trainer = FP8Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.0), convert_model_to_fp8=False, gradient_accumulation_steps=3,
        gradients=kind,
    )  # fmt: skip
    for gradient in gradients(2):
        trainer.training_step((gradient.float() * 1.01,))
    one, other = (x if kind == "bf16" else x[0].float() for x in trainer.state_dict()["accumulated"].values())
    assert (one != other).float().mean() > 0.2


@pytest.mark.parametrize("kind", GRADIENTS)
def test_bytes_and_no_gradients_beside_the_sums(kind):
    trainer, _ = make(kind)
    trainer.training_step((gradients()[0],))
    assert all(p.grad is None for p in trainer.model.parameters())
    actual = trainer.state_dict()["accumulated"]
    parts = actual["matrix"] if kind == "fp8" else [actual["matrix"]]
    assert sum(part.nbytes for part in parts) == pytest.approx(BYTES[kind] * ROWS * COLUMNS)
    assert actual["vector"].dtype == torch.float32


def test_gradients_are_taken_one_by_one():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    most = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: most.append(sum(p.grad is not None for p in model.parameters()))
        )
    trainer = FP8Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=nn.functional.mse_loss,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer.training_step((torch.randn(4, 8), torch.randn(4, 8)))
    assert max(most) == 1


@pytest.mark.parametrize("kind", GRADIENTS)
def test_a_parameter_without_a_gradient_in_the_last_micro_batch(kind):
    trainer, seen = make(kind, steps=2)
    first, second = gradients(2)
    trainer.training_step((first,))
    trainer.training_step((second, False))
    torch.testing.assert_close(seen["vector"], first[0] / 2)


@pytest.mark.parametrize("kind", GRADIENTS)
def test_an_accumulation_resumes_exactly(kind):
    trainer, expected = make(kind)
    given = gradients()
    for gradient in given[:5]:
        trainer.training_step((gradient,))
    torch.save(trainer.state_dict(), file := io.BytesIO())
    other, actual = make(kind)
    other.training_step((given[6],))
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for gradient in given[5:]:
        torch.rand(3)  # other random numbers make no difference
        trainer.training_step((gradient,))
    for gradient in given[5:]:
        other.training_step((gradient,))
    assert all(torch.equal(actual[name], expected[name]) for name in ("matrix", "vector"))


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match=r"gradients='fp16': choose from 'fp32', 'bf16', 'fp8'|gradients='fp16'"):
        make("fp16")
    for kind in ("fp8", "fp32"):
        with pytest.raises(ValueError, match=rf"gradients='{kind}' with gradient_accumulation_steps=1.*\(bf16\)"):
            make(kind, steps=1)
    assert make("bf16", steps=1)[0].gradients == make(None, steps=1)[0].gradients == "bf16"
    assert make(None)[0].gradients == "fp32"
    trainer, _ = make("fp8")
    trainer.training_step((gradients()[0],))
    with pytest.raises(ValueError, match=r"gradients='bf16': .*gradients='fp8'; go on with that"):
        make("bf16")[0].load_state_dict(trainer.state_dict())
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=1: .*in the middle of an accumulation"):
        make(None, steps=1)[0].load_state_dict(trainer.state_dict())


@pytest.mark.parametrize("steps", [1, 4])
def test_a_backward_that_breaks_off_leaves_nothing_behind(steps):
    """Whoever catches an error of memory and goes on with less must not count gradients twice."""
    expected, actual = (make("fp32" if steps > 1 else None, torch.float32, steps) for _ in range(2))
    given = gradients(steps)
    for gradient in given:
        expected[0].training_step((gradient,))

    trainer, seen = actual

    def broken(_gradient):
        raise torch.OutOfMemoryError("none left")

    if steps > 1:
        trainer.training_step((given[0],))
    handle = trainer.model.vector.register_hook(broken)  # that of the matrix is there by then, or comes after
    with pytest.raises(torch.OutOfMemoryError):
        trainer.training_step((given[0],))
    handle.remove()
    assert trainer.micro_step == 0
    for gradient in given:
        trainer.training_step((gradient,))
    assert trainer.step == expected[0].step == 1
    assert all(torch.equal(seen[name], expected[1][name]) for name in ("matrix", "vector"))
