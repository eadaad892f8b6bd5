"""Activation checkpointing under the autocast: the recomputation is in FP8, with the very same scales."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from octavo import fp8_autocast
from octavo.numerics.scaling import CALLS


class Model(nn.Module):
    def __init__(self, use_reentrant=None, nested=False):
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(4, 16, 32) * 0.1)
        self.linear = nn.Linear(32, 16)
        self.use_reentrant, self.nested = use_reentrant, nested

    def inner(self, x):
        return self.linear(F.relu(x @ self.w)).mean(1, keepdim=True)

    def block(self, x):
        h = checkpoint(self.inner, x, use_reentrant=False) if self.nested else self.inner(x)
        return x + h + 0.01 * (x @ x.mT).sum(-1, keepdim=True)

    def forward(self, x):
        x = x @ torch.eye(16)
        for _ in range(3):
            x = (
                self.block(x)
                if self.use_reentrant is None
                else checkpoint(self.block, x, use_reentrant=self.use_reentrant)
            )
        return x.square().sum()


def run(model, x, backward_inside=False):
    context = fp8_autocast()
    x = x.clone().requires_grad_()
    with context:
        loss = model(x)
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    return loss.detach(), [x.grad, *(p.grad for p in model.parameters())], context


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize(("use_reentrant", "nested"), [(False, False), (False, True), (True, False), (True, True)])
def test_same_as_without(use_reentrant, nested, backward_inside):
    x = torch.randn(2, 1, 8, 16)
    loss, gradients, plain = run(Model(), x)
    loss_again, gradients_again, context = run(Model(use_reentrant, nested), x, backward_inside)
    assert torch.equal(loss, loss_again)
    for mine, theirs in zip(gradients_again, gradients, strict=True):
        # Reentrant checkpointing adds the gradients up in another order.
        torch.testing.assert_close(mine, theirs, rtol=1e-5 if use_reentrant else 0, atol=1e-5 if use_reentrant else 0)
    assert [e.name for e in context.report.in_fp8] == [e.name for e in plain.report.in_fp8]
    scales = {name: values["scale"] for name, values in plain.scaling.statistics().items()}
    scales_again = {name: values["scale"] for name, values in context.scaling.statistics().items()}
    assert scales_again == pytest.approx(scales, rel=1e-6)


def test_recomputation_really_recomputes_in_fp8():
    _, _, context = run(Model(False), torch.randn(2, 1, 8, 16))
    row = context.scaling.register("matmul.1.a")
    assert row[CALLS] == 2, "once in forward, once in backward"


def test_evaluation_does_not_attach_to_anything():
    model = Model(False).eval()
    context = fp8_autocast()
    with torch.no_grad(), context:
        model(torch.randn(2, 1, 8, 16))
    assert len(context.report.in_fp8) == 10
