"""Activation checkpointing under the autocast: the recomputation is in FP8, with the very same scales."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from octavo import FP8TrainingConfig, fp8_autocast
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
    state = context.scaling.register("matmul.1.a")
    assert state[CALLS] == 2, "once in forward, once in backward"


def test_evaluation_does_not_attach_to_anything():
    model = Model(False).eval()
    context = fp8_autocast()
    with torch.no_grad(), context:
        model(torch.randn(2, 1, 8, 16))
    assert len(context.report.in_fp8) == 10


class Nest(nn.Module):
    """Blocks of four products, checkpointed or not; `around` each block, `inside` around the two in its middle."""

    def __init__(self, use_reentrant=None, around=nullcontext, inside=nullcontext, blocks=2):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = blocks
        self.w = nn.ParameterList(torch.randn(32, 32) * 0.2 for _ in range(4))
        self.use_reentrant, self.around, self.inside = use_reentrant, around, inside

    def block(self, x):
        h = x @ self.w[0]
        with self.inside():
            h = F.relu(h @ self.w[1]) @ self.w[2]
        return x + h @ self.w[3]

    def forward(self, x):
        for _ in range(self.blocks):
            with self.around():
                if self.use_reentrant is None:
                    x = self.block(x)
                else:
                    x = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return x.square().sum()


def kinds_of_nesting():
    """What is around the model, around each block, and inside it. Contexts are made anew for every run."""

    def fp8(**options):
        # Current scales: each block enters the context anew, so that they share slots.
        return fp8_autocast(FP8TrainingConfig.from_recipe("current", **options))

    def always(context):
        return lambda: context

    one, other = (fp8(), fp8())
    off = fp8_autocast(enabled=False)
    return {
        "inside alone": (nullcontext(), nullcontext, always(fp8())),
        "another inside": (fp8(), nullcontext, always(fp8(fp8_format="E5M2"))),
        "disabled inside": (fp8(), nullcontext, always(off)),
        "the same inside": (one, nullcontext, always(one)),
        "another around": (fp8(), always(fp8(fp8_format="E5M2")), nullcontext),
        "disabled around": (fp8(), always(off), nullcontext),
        "disabled around, the same inside": (other, always(off), always(other)),
        "torch.autocast off inside": (fp8(), nullcontext, lambda: torch.autocast("cpu", enabled=False)),
        "torch.autocast on around": (fp8(), lambda: torch.autocast("cpu", torch.bfloat16), nullcontext),
    }


def run_nest(kind, use_reentrant, backward_inside):
    outside, around, inside = kinds_of_nesting()[kind]
    model = Nest(use_reentrant, around, inside)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with outside:
        loss = model(x)
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    return loss.detach(), [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", kinds_of_nesting())
def test_contexts_around_and_inside_a_region(kind, use_reentrant, backward_inside):
    loss, gradients = run_nest(kind, None, False)
    loss_again, gradients_again = run_nest(kind, use_reentrant, backward_inside)
    assert torch.equal(loss, loss_again)
    for mine, theirs in zip(gradients_again, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("inside", ["the same", "another"])
def test_recomputation_finds_its_slots(inside, use_reentrant):
    """Delayed scales of three steps, of a context that goes on counting inside itself or around another."""

    def train(use_reentrant):
        outer, inner = fp8_autocast(), fp8_autocast()
        inner = outer if inside == "the same" else inner
        model = Nest(use_reentrant, inside=lambda: inner, blocks=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(3):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).requires_grad_()
            with outer:
                loss = model(x @ torch.eye(32))
            loss.backward()
            optimizer.step()
        actual = [context.scaling.statistics() for context in dict.fromkeys((outer, inner))]
        return [{name: (v["scale"], v["amax"]) for name, v in statistics.items()} for statistics in actual]

    actual, expected = train(use_reentrant), train(None)
    assert [len(names) for names in actual] == ([15] if inside == "the same" else [9, 6])
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5), name


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_context_between_two_regions(use_reentrant):
    """Inside the outer region, around the inner one: the rest of the outer one stays in high precision."""
    torch.manual_seed(0)
    w = [nn.Parameter(torch.randn(32, 32) * 0.2) for _ in range(4)]
    x = torch.randn(8, 32, requires_grad=True)

    def inner(h):
        return F.relu(h @ w[1]) @ w[2]

    def outer(x, again):
        h = x @ w[0]
        with fp8_autocast(FP8TrainingConfig.from_recipe("current")):
            h = again(inner, h)
        return x + h @ w[3]

    def gradients(again):
        for p in (x, *w):
            p.grad = None
        again(lambda x: outer(x, again), x).square().sum().backward()  # reentrant regions know no autograd.grad
        return [p.grad for p in (x, *w)]

    def plain(function, x):
        return function(x)

    actual = gradients(lambda function, x: checkpoint(function, x, use_reentrant=use_reentrant))
    for mine, theirs in zip(actual, gradients(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_backward_alone_inside_a_context(use_reentrant):
    model, plain = Nest(use_reentrant), Nest()
    x = torch.randn(8, 32, requires_grad=True)
    loss = model(x)
    context = fp8_autocast()
    with context:
        loss.backward()
    plain(x.detach()).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert not context.report.in_fp8


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_sequence_in_segments(use_reentrant):
    def run_layers(segments):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        x = torch.randn(8, 32, requires_grad=True)
        with fp8_autocast():
            y = checkpoint_sequential(layers, segments, x, use_reentrant=use_reentrant) if segments else layers(x)
        y.square().sum().backward()
        return [x.grad, *(p.grad for p in layers.parameters())]

    for mine, theirs in zip(run_layers(2), run_layers(0), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_compiled_inside_a_region(use_reentrant):
    """Refused, because compiled code cannot attach itself; the way out that the error names gives the same numbers."""
    torch._dynamo.reset()
    layer, x = nn.Linear(32, 32), torch.randn(8, 32, requires_grad=True)
    context = fp8_autocast(model=layer)
    compiled = torch.compile(layer, backend="aot_eager")
    with context, pytest.raises(RuntimeError, match="enter the context inside the compiled function"):
        checkpoint(compiled, x, use_reentrant=use_reentrant)

    def inside(x):
        with context:
            return layer(x)

    def gradient_of(function):
        layer.zero_grad()
        function(x).square().sum().backward()
        return layer.weight.grad

    compiled_inside = torch.compile(inside, backend="aot_eager", fullgraph=True)
    actual = gradient_of(lambda x: checkpoint(compiled_inside, x, use_reentrant=use_reentrant))
    torch.testing.assert_close(actual, gradient_of(inside))
