"""The FP8 product: values and both gradients against float64, for every recipe, layout and way to broadcast."""

import pytest
import torch
from bounds import assert_product_close, cosine
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import fp8_autocast
from octavo.nn import product as product_module
from octavo.nn.product import fp8_product
from octavo.numerics import FP8TrainingConfig
from octavo.numerics.scaling import SLOTS
from octavo.ops import ProductSpec

RECIPES = ("delayed", "current", "channel", "block", "mx")
CASES = {
    "linear": ((5, 7, 70), (50, 70), {"b_is_nk": True}),
    "right": ((2, 3, 9, 20), (20, 31), {}),
    "right per head": ((2, 1, 33, 70), (4, 70, 50), {}),
    "left": ((31, 20), (4, 20, 11), {"a_is_weight": True, "b_is_weight": False}),
    "activations": ((3, 9, 20), (3, 20, 31), {"b_is_weight": False}),
    "square": ((16, 24), (24, 24), {}),
    "blocks": ((150, 200), (200, 140), {}),
    "one row": ((1, 16), (16, 1), {}),
}


def fp8(a, b, config, bias=None, **options):
    recipe = config.recipe
    product = ProductSpec(
        a=recipe.w if options.get("a_is_weight") else recipe.x,
        b=recipe.w if options.get("b_is_weight", True) else recipe.x,
        g=recipe.g,
        out_dtype=a.dtype,
        **options,
    )
    states = tuple(torch.zeros(SLOTS) for _ in range(3))
    return fp8_product(a, b, bias, product, states), states


def check(config, a, b, dtype=torch.float32, **options):
    """Value and gradients of one product within the bounds derived in `bounds.py`."""
    a, b = a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_()
    y, states = fp8(a, b, config, **options)
    b_kn = b.mT if options.get("b_is_nk") else b
    forward, backward = config.recipe.x.format, config.recipe.g.format
    assert y.dtype == dtype and y.shape == (a @ b_kn).shape
    assert_product_close(y, a, b_kn, forward, forward)
    g = torch.randn_like(y)
    da, db = torch.autograd.grad(y, (a, b), g)
    assert da.dtype == a.dtype and db.dtype == b.dtype
    assert_product_close(da, g, b_kn.mT, backward, forward)
    db_kn = db.mT if options.get("b_is_nk") else db
    rows_a, rows_g = (a.flatten(0, -2), g.flatten(0, -2)) if b.dim() == 2 else (a, g)
    assert_product_close(db_kn, rows_a.mT, rows_g, forward, backward)
    return states


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_value_and_gradients(recipe, case):
    a_shape, b_shape, options = CASES[case]
    torch.manual_seed(0)
    check(FP8TrainingConfig.from_recipe(recipe), torch.randn(a_shape), torch.randn(b_shape), **options)


@pytest.mark.parametrize("fp8_format", ["E4M3", "E5M2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_formats_and_dtypes(fp8_format, dtype):
    torch.manual_seed(0)
    check(FP8TrainingConfig(fp8_format=fp8_format), torch.randn(3, 20, 48), torch.randn(48, 40), dtype)


@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 70), k=st.integers(1, 150), n=st.integers(1, 70), recipe=st.sampled_from(RECIPES))
def test_any_size(m, k, n, recipe):
    torch.manual_seed(m * 10007 + k * 101 + n)
    check(FP8TrainingConfig.from_recipe(recipe), torch.randn(m, k), torch.randn(k, n))


def test_only_wanted_gradients_are_computed():
    a, b = torch.randn(8, 16, requires_grad=True), torch.randn(16, 8)
    y, _ = fp8(a, b, FP8TrainingConfig())
    y.sum().backward()
    assert a.grad is not None and b.grad is None
    a, b = torch.randn(8, 16), torch.randn(16, 8, requires_grad=True)
    y, _ = fp8(a, b, FP8TrainingConfig())
    y.sum().backward()
    assert_product_close(b.grad, a.mT, torch.ones(8, 8), "E4M3", "E5M2")


def test_bias():
    a, b = torch.randn(3, 5, 20), torch.randn(7, 20)
    bias = torch.randn(7, requires_grad=True)
    y, _ = fp8(a, b, FP8TrainingConfig(), bias, b_is_nk=True)
    without, _ = fp8(a, b, FP8TrainingConfig(), None, b_is_nk=True)
    assert torch.equal(y, without + bias)
    g = torch.randn_like(y)
    y.backward(g)
    torch.testing.assert_close(bias.grad, g.sum((0, 1)))


def test_activations_are_kept_in_fp8():
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        a, w = torch.randn(64, 32, requires_grad=True), torch.randn(32, 48, requires_grad=True)
        fp8(a, w, FP8TrainingConfig())
    large = [x for x in saved if x.numel() > 1]
    assert {x.dtype for x in large} == {torch.float8_e4m3fn, torch.float32}
    assert all(x is w for x in large if x.dtype == torch.float32), "the only high-precision tensor saved is the weight"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_stays_visible_and_local(bad):
    a, b = torch.randn(8, 32), torch.randn(32, 16)
    a[3, 5] = bad
    y, states = fp8(a, b, FP8TrainingConfig())
    assert y[3].isnan().all() and y[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()
    assert states[0][3] == 1 and states[1][3] == 0


def test_stochastic_gradients_are_unbiased():
    """Mean over many rows; 2000 draws of relative error < 2^-3 leave < 2^-3 / √2000 = 0.3 %, four sigma."""
    torch.manual_seed(0)
    config = FP8TrainingConfig(rounding={"g": "stochastic"})
    a, b = torch.ones(100, 16, requires_grad=True), torch.eye(16)
    g = torch.rand(1, 16) + 0.1
    total = torch.zeros(1, 16)
    for _ in range(20):
        y, _ = fp8(a, b, config)
        total += torch.autograd.grad(y, a, g.expand(100, 16))[0].sum(0)
    assert ((total / 2000 - g) / g).abs().max() < 4 * 2**-3 / 2000**0.5


@pytest.mark.parametrize("recipe", ["delayed", "current", "channel", "block", "mx"])
def test_a_product_with_its_own_transpose(recipe, monkeypatch):
    """One quantised operand serves as both: the same values as two, and the same gradient but for rounding."""
    x = torch.randn(2, 3, 40, 24)
    results = []
    for shortcut in (False, True):
        monkeypatch.setattr(product_module, "_saves_a_copy", lambda *_, on=shortcut: on)
        q = (x * 1.0).requires_grad_()
        with fp8_autocast(FP8TrainingConfig.from_recipe(recipe)) as context:
            y = (q @ q.mT).tril(-1)
        y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
        results.append((y.detach(), q.grad, context.scaling.statistics()))
    (y, gradient, _), (y_once, gradient_once, statistics) = results
    torch.testing.assert_close(y_once, y)
    same = recipe in ("delayed", "current")  # else g and its transpose have other scales along their rows
    assert cosine(gradient_once, gradient) > (0.999999 if same else 0.999)
    assert statistics["matmul.0.a"] == statistics["matmul.0.b"]
