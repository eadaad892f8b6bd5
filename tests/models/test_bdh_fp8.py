"""BDH (D=128, 6 layers) in FP8 through the autocast, the model unchanged: what is in FP8, how good its gradients are.

The bounds are those of the project: each product alone agrees with FP32 to a cosine of 0.997; the gradient of the whole
model to 0.98 at initialisation and to 0.998 after 100 steps (0.96 and 0.99 with E5M2 throughout). Models and batches
vary (E5M2 at initialisation: 0.953 to 0.967; HYBRID after training: 0.997 to 0.9997), so single cases fall below; it is
the median over three models with two batches each, or over five batches, that is held to the bound.
"""

import statistics
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from bounds import cosine

from octavo import FP8TrainingConfig, fp8_autocast
from octavo.models.bdh import BDH, BDHConfig

CONFIG = BDHConfig(dim=128, heads=4, neurons=1024, layers=6)
PRODUCTS = ("encoder", "", "", "encoder_v", "decoder")  # the weight of each product of a layer, if it has one


@pytest.fixture(scope="module")
def text():
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()


def batch(text, seed, rows=8, length=128):
    starts = torch.randint(len(text) - length - 1, (rows,), generator=torch.Generator().manual_seed(seed))
    windows = torch.stack([text[i : i + length + 1] for i in starts])
    return windows[:, :-1], windows[:, 1:]


def train(text):
    """A hundred steps in FP8, on small batches to be quick."""
    torch.manual_seed(0)
    model = BDH(CONFIG)
    context = fp8_autocast(model=model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(100):
        with context:
            loss = model(*batch(text, step, rows=2, length=64))[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 3.5
    return model


def gradient(model, tokens, context):
    model.zero_grad()
    with context:
        loss = model(*tokens)[1]
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def agreements(model, text, seeds, rows=8):
    """For each format, one cosine for each batch; all formats against the same gradient in FP32."""
    actual = {"HYBRID": [], "E5M2": []}
    for seed in seeds:
        tokens = batch(text, seed, rows)
        exact = gradient(model, tokens, nullcontext())
        for fp8_format, cosines in actual.items():
            context = fp8_autocast(FP8TrainingConfig(fp8_format=fp8_format), model=model)
            cosines.append(cosine(gradient(model, tokens, context), exact))
    return actual


def test_every_product_of_a_layer_is_in_fp8(text):
    model = BDH(CONFIG)
    context = fp8_autocast(model=model)
    gradient(model, batch(text, 0, rows=1, length=33), context)
    names = [f"matmul.{i}" + (f"[{w}]" if w else "") for i, w in enumerate(PRODUCTS * CONFIG.layers)]
    assert [entry.name for entry in context.report.in_fp8] == names
    assert [entry.reason for entry in context.report.not_in_fp8] == ["left alone: config.skip names its weight"]


@pytest.mark.parametrize("fp8_format", ["HYBRID", "E4M3"])
def test_each_product_alone(text, monkeypatch, fp8_format):
    """Every product of the model with its own operands and its own upstream gradient."""
    model = BDH(CONFIG)
    seen = []
    honest = torch.Tensor.__matmul__

    def spy(a, b):
        y = honest(a, b)
        g = torch.empty_like(y)
        y.register_hook(g.copy_)
        seen.append((a.detach(), b.detach(), g))
        return y

    monkeypatch.setattr(torch.Tensor, "__matmul__", spy)
    model(*batch(text, 1, rows=4, length=64))[1].backward()
    monkeypatch.undo()
    assert len(seen) == 5 * CONFIG.layers + 1
    for a, b, g in seen:
        a, b = a.requires_grad_(), b.requires_grad_()
        with fp8_autocast(FP8TrainingConfig(fp8_format=fp8_format)):
            y = a @ b
        exact = a @ b
        assert cosine(y, exact) > 0.997
        for mine, theirs in zip(torch.autograd.grad(y, (a, b), g), torch.autograd.grad(exact, (a, b), g), strict=True):
            assert cosine(mine, theirs) > 0.997


def test_gradient_of_one_model_at_initialisation(text):
    """Without the median, on a quarter of the batch."""
    tokens, model = batch(text, 1000, rows=2), BDH(CONFIG)
    exact = gradient(model, tokens, nullcontext())
    assert cosine(gradient(model, tokens, fp8_autocast(model=model)), exact) >= 0.975


@pytest.mark.slow
def test_gradient_at_initialisation(text):
    actual = {"HYBRID": [], "E5M2": []}
    for seed in range(3):
        torch.manual_seed(seed)
        for fp8_format, cosines in agreements(BDH(CONFIG), text, seeds=(1000, 1001)).items():
            actual[fp8_format] += cosines
    for fp8_format, bound in (("HYBRID", 0.98), ("E5M2", 0.96)):
        assert statistics.median(actual[fp8_format]) >= bound, actual


@pytest.mark.slow
def test_gradient_after_100_steps(text):
    actual = agreements(train(text), text, seeds=range(1000, 1005), rows=4)
    for fp8_format, bound in (("HYBRID", 0.998), ("E5M2", 0.99)):
        assert statistics.median(actual[fp8_format]) >= bound, actual
