"""Accuracy of the head's gradient: in FP16 under a loss scale, and as a sum over many chunks of tokens."""

import pytest
import torch
import torch.nn.functional as F
from bounds import cosine
from torch import nn

from octavo import FP8TrainingConfig
from octavo.nn import loss as module
from octavo.nn.loss import FP8Head, linear_cross_entropy
from octavo.numerics.scaling import new_states

COUNT, SCALE = 2.0**17, 2.0**16  # tokens of an accumulated batch; where torch's GradScaler begins


def fp8_head():
    recipe = FP8TrainingConfig().recipe
    return {"head": FP8Head(recipe.x, recipe.w), "states": tuple(new_states(2, device="cpu").unbind())}


def inputs(tokens, width, vocabulary, hidden_dtype, weight_dtype):
    hidden = torch.randn(tokens, width).to(hidden_dtype).requires_grad_()
    weight = nn.Parameter((0.3 * torch.randn(vocabulary, width)).to(weight_dtype))
    return hidden, weight, torch.randint(0, vocabulary, (tokens,))


def exact_gradients(hidden, weight, labels, factor):
    doubles = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss = F.cross_entropy(doubles[0] @ doubles[1].t(), labels, reduction="sum") * factor
    return torch.autograd.grad(loss, doubles)


def error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.fixture(params=["one chunk", "chunks"])
def chunks(request, monkeypatch):
    if request.param == "chunks":
        for name in ("CHUNK_BYTES", "FROZEN_CHUNK_BYTES"):
            monkeypatch.setattr(module, name, 1)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("fp8", [False, True], ids=["FP16 head", "FP8 head"])
@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float32])
def test_fp16_with_a_loss_scale(weight_dtype, fp8):
    """A gradient of 1 / (count · vocabulary) is below anything that FP16 holds, until the loss scale comes in."""
    hidden, weight, labels = inputs(300, 24, 2000, torch.float16, weight_dtype)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = linear_cross_entropy(hidden, weight, labels, count=COUNT, **(fp8_head() if fp8 else {}))
    (SCALE * loss).backward()
    for x, expected in zip((hidden, weight), exact_gradients(hidden, weight, labels, SCALE / COUNT), strict=True):
        assert x.grad.dtype == x.dtype
        assert cosine(x.grad, expected) > (0.99 if fp8 else 0.99999)
        assert abs(x.grad.double().norm() / expected.norm() - 1) < (0.03 if fp8 else 1e-3)
        assert (x.grad == 0).double().mean() < 0.001


def test_fp16_probabilities_far_below_one():
    """Rows of tokens that the model all but excludes: their gradient is small, and not zero."""
    hidden, weight, labels = inputs(64, 16, 300, torch.float16, torch.float32)
    hidden = torch.full_like(hidden, 1.0).requires_grad_()
    with torch.no_grad():
        weight[:] = 0
        weight[150:] = -1.0  # by e⁻¹⁶
    labels %= 150
    with torch.autocast("cpu", dtype=torch.float16):
        (SCALE * linear_cross_entropy(hidden, weight, labels, count=COUNT)).backward()
    expected = exact_gradients(hidden, weight, labels, SCALE / COUNT)[1]
    torch.testing.assert_close(weight.grad[150:], expected[150:].float(), rtol=0.01, atol=0)


@pytest.mark.parametrize("fp8", [False, True], ids=["BF16 head", "FP8 head"])
def test_many_chunks_are_as_accurate_as_one(fp8, monkeypatch):
    hidden, weight, labels = inputs(32 * 128, 16, 40, torch.bfloat16, torch.bfloat16)
    errors = []
    for chunk_bytes in (2**30, 1):
        monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
        how = fp8_head() if fp8 else {}
        actual = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, **how), weight)[0]
        if not fp8:
            expected = exact_gradients(hidden, weight, labels, 1 / len(labels))[1]
        elif chunk_bytes > 1:  # FP8 costs more than the sum: against the same products in one
            weight_fp32 = nn.Parameter(weight.detach().float())
            loss = linear_cross_entropy(hidden, weight_fp32, labels, **fp8_head())
            expected = torch.autograd.grad(loss, weight_fp32)[0].double()
        errors.append(error(actual, expected))
    assert errors[1] < 1.2 * errors[0], errors
