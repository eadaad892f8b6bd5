"""The autocast: every spelling of a product, every place of the weight, values and gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from bounds import assert_product_close, cosine
from torch import nn

from octavo import FP8TrainingConfig, fp8_autocast, get_fp8_autocast_context

SPELLINGS = {
    "@": lambda a, b: a @ b,
    "matmul": torch.matmul,
    "Tensor.matmul": lambda a, b: a.matmul(b),
    "mm": torch.mm,
    "Tensor.mm": lambda a, b: a.mm(b),
    "linear": lambda a, b: F.linear(a, b.mT),
    "addmm": lambda a, b: torch.addmm(torch.zeros(b.shape[1]), a, b),
    "einsum": lambda a, b: torch.einsum("ik,kj->ij", a, b),
    "einsum list": lambda a, b: torch.einsum("ik,kj", [a, b]),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_runs_in_fp8(spelling):
    a, b = torch.randn(20, 40, requires_grad=True), torch.randn(40, 30, requires_grad=True)
    context = fp8_autocast()
    with context:
        y = SPELLINGS[spelling](a, b)
    assert len(context.report.in_fp8) == 1 and not context.report.not_in_fp8
    assert not torch.equal(y, a @ b), "computed in FP32"
    assert_product_close(y, a, b)
    g = torch.randn_like(y)
    y.backward(g)
    assert_product_close(a.grad, g, b.mT, "E5M2", "E4M3")
    assert_product_close(b.grad, a.mT, g, "E4M3", "E5M2")


def test_square_weights_are_not_transposed():
    x, w = torch.randn(32, 32), nn.Parameter(torch.randn(32, 32))
    with fp8_autocast():
        y = x @ w
    assert cosine(y, x @ w) > 0.99 and abs(cosine(y, x @ w.mT)) < 0.2


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((7, 33), (33, 5)),
        ((2, 7, 33), (33, 5)),
        ((2, 1, 7, 33), (4, 33, 5)),
        ((7, 33), (4, 33, 5)),
        ((4, 7, 33), (4, 33, 5)),
    ],
)
@pytest.mark.parametrize("weight", ["left", "right", "neither"])
def test_weight_anywhere_batched_and_broadcast(a_shape, b_shape, weight):
    a, b = torch.randn(a_shape, requires_grad=True), torch.randn(b_shape, requires_grad=True)
    a = nn.Parameter(a.detach()) if weight == "left" else a
    b = nn.Parameter(b.detach()) if weight == "right" else b
    with fp8_autocast():
        y = a @ b
    g = torch.randn_like(y)
    y.backward(g)
    assert_product_close(y, a, b)
    assert a.grad.shape == a.shape and b.grad.shape == b.shape
    exact_a, exact_b = torch.autograd.grad(a @ b, (a, b), g)
    assert cosine(a.grad, exact_a) > 0.997 and cosine(b.grad, exact_b) > 0.997


def test_views_of_a_weight():
    w = nn.Parameter(torch.randn(3, 16, 24))
    x = torch.randn(5, 24)
    context = fp8_autocast(FP8TrainingConfig.from_recipe("block"))
    with context:
        y = x @ w[1].mT
    y.sum().backward()
    assert_product_close(y, x, w[1].mT)
    assert w.grad[0].eq(0).all() and w.grad[1].ne(0).any()


def test_views_are_named_skipped_and_scaled_as_weights():
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(16, 16))
    model.lm_head = nn.Parameter(torch.randn(16, 16))
    context = fp8_autocast(FP8TrainingConfig(margin={"w": 1}), model=model)
    with context:
        y = (model.w.mT @ torch.randn(16, 16)) @ model.lm_head.mT
    y.sum().backward()
    assert [entry.name for entry in context.report.in_fp8] == ["matmul.0[w]"] and len(context.report.not_in_fp8) == 1
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    scales = context.scaling.statistics()
    assert scales["matmul.0[w].a"]["scale"] == pytest.approx(2 * model.w.abs().max().item() / 448, rel=1e-6)
    assert scales["matmul.0[w].b"]["scale"] == pytest.approx(scales["matmul.0[w].b"]["amax"] / 448, rel=1e-6)


def test_baddbmm_alpha_beta():
    base = torch.full((2, 4, 6), float("nan"))
    a, b = torch.randn(2, 4, 18), torch.randn(2, 18, 6)
    with fp8_autocast():
        zero_beta = torch.baddbmm(base, a, b, beta=0, alpha=2)
        added = torch.baddbmm(torch.ones(2, 4, 6), a, b, beta=3)
        product = torch.bmm(a, b)
    assert torch.equal(zero_beta, 2 * product) and torch.equal(added, product + 3)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bhtd,bhsd->bhts", [(2, 3, 5, 18), (2, 3, 7, 18)]),
        ("btd,hdn->bhtn", [(2, 5, 18), (3, 18, 6)]),
        ("...td,dn->...tn", [(2, 3, 5, 18), (18, 6)]),
        ("ij,jk,kl->il", [(4, 25), (25, 26), (26, 7)]),
        ("ijk,jl->kl", [(3, 24, 5), (24, 6)]),
        ("bij,bkj->bik", [(2, 4, 25), (2, 6, 25)]),
    ],
)
def test_einsum(equation, shapes):
    operands = [torch.randn(shape, requires_grad=True) for shape in shapes]
    context = fp8_autocast()
    with context:
        y = torch.einsum(equation, *operands)
    exact = torch.einsum(equation, *operands)
    assert y.shape == exact.shape and cosine(y, exact) > 0.99
    assert len(context.report.in_fp8) == len(shapes) - 1
    g = torch.randn_like(y)
    for mine, theirs in zip(torch.autograd.grad(y, operands, g), torch.autograd.grad(exact, operands, g), strict=True):
        assert mine.shape == theirs.shape and cosine(mine, theirs) > 0.99


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: torch.randn(4, 4) @ torch.randn(4), "matrix-vector"),
        (lambda: torch.mv(torch.randn(4, 4), torch.randn(4)), "matrix-vector"),
        (lambda: torch.randn(4, 4, dtype=torch.float64) @ torch.randn(4, 4, dtype=torch.float64), "float64"),
        (lambda: torch.ones(4, 4, dtype=torch.int64) @ torch.ones(4, 4, dtype=torch.int64), "int64"),
        (lambda: torch.mm(torch.randn(4, 4), torch.randn(4, 4), out=torch.empty(4, 4)), "out="),
        (lambda: torch.einsum("ii,ij->j", torch.randn(4, 4), torch.randn(4, 4)), "repeated index"),
        (lambda: torch.einsum("i,j->ij", torch.randn(4), torch.randn(4)), "contracts nothing"),
        (lambda: F.conv1d(torch.randn(1, 2, 8), torch.randn(3, 2, 3)), "convolutions"),
        (lambda: F.scaled_dot_product_attention(*[torch.randn(1, 2, 4, 8)] * 3), "fp8_dpa is off"),
        (lambda: torch.randn(0, 4) @ torch.randn(4, 4), "empty"),
    ],
)
def test_what_stays_in_high_precision_is_counted_with_its_reason(call, reason):
    torch.manual_seed(3)
    expected = call()
    context = fp8_autocast()
    with context:
        torch.manual_seed(3)
        y = call()
        call()
    assert torch.equal(y, expected)
    assert not context.report.in_fp8
    assert {reason in entry.reason for entry in context.report} == {True}
    assert sum(entry.calls for entry in context.report) == 2


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 1.0}, {"enable_gqa": True}, {"mask": torch.bool}, {"mask": torch.float32}],
)
def test_attention_with_fp8_dpa(options):
    options = dict(options)
    heads = 2 if options.get("enable_gqa") else 4
    q, k, v = (torch.randn(2, h, 19, 16, requires_grad=True) for h in (4, heads, heads))
    dtype = options.pop("mask", None)
    if dtype is not None:
        mask = torch.rand(19, 19) > 0.3
        mask[4] = False  # a row with nothing to attend to
        options["attn_mask"] = mask if dtype == torch.bool else torch.randn(19, 19)
    context = fp8_autocast(FP8TrainingConfig(fp8_dpa=True))
    with context:
        y = F.scaled_dot_product_attention(q, k, v, **options)
    assert [entry.op for entry in context.report.in_fp8] == ["attention", "attention"]
    exact = F.scaled_dot_product_attention(q, k, v, **options)
    assert cosine(y, exact) > 0.99
    g = torch.randn_like(y)
    for mine, theirs in zip(
        torch.autograd.grad(y, (q, k, v), g), torch.autograd.grad(exact, (q, k, v), g), strict=True
    ):
        assert mine.isfinite().all() and cosine(mine, theirs) > 0.98


def test_attention_dropout_with_fp8_dpa():
    """Values that are the identity make the result the attention weights, as dropped."""
    q, k = torch.randn(2, 2, 64, 16), torch.randn(2, 2, 32, 16)
    context = fp8_autocast(FP8TrainingConfig.from_recipe("current", fp8_dpa=True))
    with context:
        weights = F.scaled_dot_product_attention(q, k, torch.eye(32).expand(2, 2, 32, 32))
        dropped = F.scaled_dot_product_attention(q, k, torch.eye(32).expand(2, 2, 32, 32), dropout_p=0.25)
    assert len(context.report.in_fp8) == 4 and weights.gt(1e-3).float().mean() > 0.9
    survived = dropped > 1e-3
    assert 0.7 < survived.sum() / weights.gt(1e-3).sum() < 0.8
    # FP8 rounds each weight by up to 1/16, before and after it is divided by 0.75.
    torch.testing.assert_close(dropped[survived], weights[survived] / 0.75, rtol=0.14, atol=1e-3)


def test_nested_and_disabled_regions():
    a, b = torch.randn(8, 16), torch.randn(16, 8)
    outer, inner = fp8_autocast(), fp8_autocast(FP8TrainingConfig(fp8_format="E5M2"))
    with outer:
        first = a @ b
        with fp8_autocast(enabled=False):
            plain = a @ b
        with inner:
            coarse = a @ b
        last = a @ b
    assert torch.equal(plain, a @ b) and torch.equal(first, last) and not torch.equal(first, coarse)
    assert len(outer.report) == 2 and len(inner.report) == 1


def test_the_same_context_inside_itself_goes_on_counting():
    """Three products, three slots: scales and histories of their own, before, inside and after."""
    context = fp8_autocast()
    factors = (1.0, 8.0, 64.0)
    a, b = torch.randn(8, 16), nn.Parameter(torch.randn(16, 8))
    optimizer = torch.optim.SGD([b], lr=0.0)
    for _ in range(2):
        with context:
            loss = (a * factors[0] @ b).sum()
            with context:
                loss = loss + (a * factors[1] @ b).sum()
            loss = loss + (a * factors[2] @ b).sum()
        loss.backward()
        optimizer.step()
    assert [(entry.name, entry.calls) for entry in context.report] == [(f"matmul.{i}", 2) for i in range(3)]
    statistics = context.scaling.statistics()
    for i, factor in enumerate(factors):
        assert statistics[f"matmul.{i}.a"]["amax"] == pytest.approx(factor * a.abs().max().item())


def test_products_are_told_apart_by_order_and_named_by_weight():
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(16, 16))
    model.lm_head = nn.Parameter(torch.randn(16, 16))
    context = fp8_autocast(model=model)
    for _ in range(3):
        with context:
            (torch.randn(4, 16) @ model.w @ model.w @ model.lm_head).sum().backward()
    assert [entry.name for entry in context.report.in_fp8] == ["matmul.0[w]", "matmul.1[w]"]
    assert [entry.calls for entry in context.report] == [3, 3, 3]
    assert "config.skip" in context.report.not_in_fp8[0].reason
    assert context.report.entries[0].where.startswith("test_autocast.py:")
    assert "matmul.1[w].g" in context.scaling.statistics()


def test_histories_roll_with_the_optimizer_and_survive_a_round_trip():
    w = nn.Parameter(torch.randn(16, 16))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def steps(context, n):
        for _ in range(n):
            with context:
                loss = (torch.randn(4, 16) @ w).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    context = fp8_autocast()
    steps(context, 3)
    assert context.scaling.state_dict()["_steps"].tolist() == [3, 3, 3]
    saved, weights, rng = context.scaling.state_dict(), w.detach().clone(), torch.get_rng_state()
    steps(context, 2)
    expected = w.detach().clone()

    w.data.copy_(weights)
    torch.set_rng_state(rng)
    fresh = fp8_autocast()
    fresh.scaling.load_state_dict(saved)
    steps(fresh, 2)
    assert torch.equal(w, expected)
    assert fresh.scaling.state_dict()["_steps"].tolist() == [5, 5, 5]


def test_torch_autocast_inside():
    w = nn.Parameter(torch.randn(16, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16), fp8_autocast():
        y = torch.randn(4, 16) @ w
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert w.grad.dtype == torch.float32


def test_too_many_products_is_an_error():
    context = fp8_autocast(max_products=2)
    with context, pytest.raises(RuntimeError, match="max_products=2"):
        for _ in range(3):
            torch.randn(4, 16) @ torch.randn(16, 4)


def test_generating_in_one_region_needs_no_slot_for_every_product():
    context = fp8_autocast(max_products=2)
    a, b = torch.randn(4, 16), torch.randn(16, 4)
    with torch.no_grad(), context:
        results = [a @ b for _ in range(5)]
    assert all(torch.equal(results[0], y) for y in results) and len(context.report) == 2


def test_the_context_around_the_whole_loop():
    w = nn.Parameter(torch.randn(16, 16))
    optimizer = torch.optim.SGD([w], lr=0.1)
    context = fp8_autocast()
    with context:
        for _ in range(4):
            (torch.randn(4, 16) @ w).square().mean().backward()
            optimizer.step()
    assert len(context.report) == 1 and context.scaling.state_dict()["_steps"].tolist() == [4, 4, 4]


def test_evaluation_in_inference_mode_first():
    w = nn.Parameter(torch.randn(16, 16))
    context = fp8_autocast()
    with torch.inference_mode(), context:
        torch.randn(4, 16) @ w
    with context:
        y = torch.randn(4, 16) @ w
    y.sum().backward()
    torch.optim.SGD([w], lr=0.1).step()
    assert context.scaling.state_dict()["_steps"].tolist() == [1, 1, 1]


def test_recurrent_layers_are_reported():
    context = fp8_autocast()
    with context:
        nn.LSTM(4, 4)(torch.randn(3, 2, 4))
    assert [entry.op for entry in context.report] == ["lstm"] and "recurrent" in context.report.entries[0].reason


def test_the_two_names_are_one():
    assert get_fp8_autocast_context is fp8_autocast


def test_module_of_linears_and_report_prints():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    context = fp8_autocast(model=model)
    with context:
        model(torch.randn(3, 16)).sum().backward()
    assert "2 of 2 in FP8" in str(context.report) and "linear.0[0.weight]" in str(context.report)
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert math.isclose(
        context.scaling.statistics()["linear.0[0.weight].b"]["amax"], model[0].weight.abs().max().item()
    )
