"""The custom operators: schema, fake implementations and dispatch by opcheck; the same numbers as the spec."""

import pytest
import torch
from norm_cases import angles, new_norm, saved_of
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

import octavo.ops.norm
import octavo.ops.rotary  # noqa: F401, registers operators, as does the one before
from octavo import ops
from octavo.numerics import E4M3, E5M2, FP8TrainingConfig, OperandRecipe, padded_gemm_nt
from octavo.numerics.norm import rms_norm
from octavo.numerics.operand import quantize_operand
from octavo.numerics.rotary import Heads
from octavo.numerics.scaling import SLOTS
from octavo.support import is_deterministic

RECIPES = {
    "delayed": OperandRecipe(E4M3, delayed=True),
    "current E5M2": OperandRecipe(E5M2, margin=2.0),
    "percentile": OperandRecipe(E4M3, percentile=99.0),
    "channel": OperandRecipe(E4M3, "channel"),
    "block 1x128": OperandRecipe(E4M3, "block", (1, 128)),
    "block 128x128": OperandRecipe(E4M3, "block", (128, 128)),
    "mx": OperandRecipe(E4M3, "mx"),
}
SHAPES = [(1, 1), (1, 40), (40, 1), (130, 131), (2, 3, 33, 35), (3, 1, 5), (0, 40), (40, 0), (2, 0, 5)]
by_recipe = pytest.mark.parametrize("name", RECIPES)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run_quantize(x, state, recipe, layout, record=True):
    return [t for q in ops.quantize(x, state, recipe, record=record, layout=layout) for t in q]


def bits(t):
    return t.view(torch.uint8) if t.element_size() == 1 else t


@by_recipe
@pytest.mark.parametrize("layout", ["rows", "columns", "both"])
def test_quantize_gives_what_the_spec_gives(name, layout):
    recipe, x = RECIPES[name], randn(33, 150)
    state, spec_state = torch.zeros(SLOTS), torch.zeros(SLOTS)
    actual = run_quantize(x, state, recipe, layout)
    expected = [t for q in quantize_operand(x, spec_state, recipe, layout=layout) for t in q]
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(actual, expected, strict=True))
    assert torch.equal(state, spec_state) and state.any()
    run_quantize(x * 2, state, recipe, layout, record=False)
    assert torch.equal(state, spec_state)


@by_recipe
@pytest.mark.parametrize("shape", SHAPES)
def test_fake_results_look_like_real_ones(name, shape):
    """Shapes, dtypes and strides; the stride of a dimension of one element or of an empty tensor means nothing."""
    recipe = RECIPES[name]
    for layout in ("rows", "columns", "both"):
        for x in (randn(*shape), randn(*shape).mT.contiguous().mT):
            real = run_quantize(x, torch.zeros(SLOTS), recipe, layout)
            with FakeTensorMode() as mode:
                fake = run_quantize(mode.from_tensor(x), mode.from_tensor(torch.zeros(SLOTS)), recipe, layout)
            for r, f in zip(real, fake, strict=True):
                assert (r.shape, r.dtype) == (f.shape, f.dtype)
                assert r.is_contiguous() and f.is_contiguous()


@by_recipe
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_do_not_share_memory(name, shape):
    x, state = randn(*shape), torch.zeros(SLOTS)
    outputs = run_quantize(x, state, RECIPES[name], "both")
    pointers = [t.untyped_storage().data_ptr() for t in (*outputs, x, state) if t.numel()]
    assert len(set(pointers)) == len(pointers)


@by_recipe
def test_opcheck_quantize(name):
    recipe = RECIPES[name].encode()
    for x, record, layout in (
        (randn(33, 7).mT, True, "rows"),
        (randn(2, 3, 5).bfloat16(), True, "columns"),
        (randn(1, 9), False, "columns"),
        (randn(7, 33), True, "both"),
        (randn(2, 3, 5), False, "both"),
        (randn(1, 9), True, "both"),
    ):
        opcheck(torch.ops.octavo.quantize, (x, torch.zeros(SLOTS), recipe, record, layout, None))


PRODUCTS = [
    # a, b, batch of the result
    ((5, 40), (7, 40), ()),
    ((16, 32), (16, 32), ()),
    ((1, 33), (1, 33), ()),
    ((2, 3, 5, 40), (3, 7, 40), (2, 3)),
    ((2, 3, 5, 40), (2, 3, 7, 40), (3,)),
    ((2, 3, 5, 40), (2, 3, 7, 40), ()),
    ((2, 3, 5, 40), (3, 7, 40), (2, 1)),
]


def product_arguments(recipe, a, b, batch, out_dtype=torch.float32, bias=None):
    a, b = (quantize_operand(randn(*shape), torch.zeros(SLOTS), recipe)[0] for shape in (a, b))
    return a, b, (a.data, a.scale, b.data, b.scale, bias, out_dtype, list(batch), False, False)


@by_recipe
@pytest.mark.parametrize(("a", "b", "batch"), PRODUCTS)
def test_gemm_nt_gives_what_the_spec_gives_and_its_fake_looks_like_it(name, a, b, batch):
    for out_dtype, bias in ((torch.float32, None), (torch.bfloat16, randn(b[-2]))):
        a_q, b_q, arguments = product_arguments(RECIPES[name], a, b, batch, out_dtype, bias)
        y = ops.gemm_nt(*arguments)
        assert torch.equal(y, padded_gemm_nt(a_q, b_q, bias=bias, out_dtype=out_dtype, batch=batch))
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in arguments]
            f = torch.ops.octavo.gemm_nt(*fake)
        assert (y.shape, y.dtype) == (f.shape, f.dtype) and y.is_contiguous() and f.is_contiguous()


@pytest.mark.parametrize("name", ["delayed", "channel", "block 128x128", "mx"])
def test_opcheck_gemm_nt(name):
    for i, (a, b, batch) in enumerate(PRODUCTS[::3]):
        bias = randn(b[-2]) if i % 2 else None
        _, _, arguments = product_arguments(RECIPES[name], a, b, batch, (torch.float32, torch.bfloat16)[i % 2], bias)
        # Not `test_schema`: it multiplies inputs to compare them, which float8 cannot. What it looks for, by hand:
        before = [t.clone() if isinstance(t, torch.Tensor) else t for t in arguments]
        y = torch.ops.octavo.gemm_nt(*arguments)
        tensors = [(a, b) for a, b in zip(arguments, before, strict=True) if isinstance(a, torch.Tensor)]
        assert all(torch.equal(bits(a), bits(b)) and a.data_ptr() != y.data_ptr() for a, b in tensors)
        opcheck(torch.ops.octavo.gemm_nt, arguments, test_utils=("test_faketensor", "test_aot_dispatch_dynamic"))


@pytest.mark.parametrize("config", ["delayed", "channel", "block", "mx"])
def test_compiled_without_graph_breaks_the_bits_are_the_same(config):
    recipe = FP8TrainingConfig.from_recipe(config).recipe

    def product(x, w, x_state, w_state):
        x_q, _ = ops.quantize(x, x_state, recipe.x, record=True, layout="both")
        (w_q,) = ops.quantize(w, w_state, recipe.w, record=True, layout="rows")
        return ops.gemm_nt(*x_q, *w_q, None, torch.float32, [], False, False) * 2

    x, w = randn(33, 50, seed=1), randn(7, 50, seed=2)
    states, compiled_states = ([torch.zeros(SLOTS), torch.zeros(SLOTS)] for _ in range(2))
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    for factor in (1, 3):
        y = product(x * factor, w, *states)
        assert torch.equal(compiled(x * factor, w, *compiled_states), y)
        assert all(torch.equal(a, b) for a, b in zip(states, compiled_states, strict=True))


def norm_arguments(k, how):
    """Of the operators of a norm, forward and backward."""
    h, y, g = (randn(7, k, seed=seed).bfloat16() for seed in range(3))
    norm = new_norm(k, torch.bfloat16, shifted=False)
    x, inverse = rms_norm(h, norm)
    saved = saved_of(h, x, how)
    for other in (None, y):
        yield torch.ops.octavo.rms_norm, (h, other, *norm)
        for needs in ([True, True], [True, False], [False, True]):
            yield torch.ops.octavo.norm_gradients, (g, *saved, *norm, inverse, other, needs)


def rotary_arguments(heads):
    """Of the operators of q, k and v, forward and backward, with norms and without."""
    qkv, (cos, sin) = randn(12, heads.features).bfloat16(), angles(6, heads.width, torch.bfloat16)
    gradients = [randn(12, count, heads.width).bfloat16() for count in (heads.q, heads.kv, heads.kv)]
    weights = [new_norm(heads.width, torch.bfloat16, shifted=False).weight for _ in range(2)]
    for each, needs in (([], [False, False]), (weights, [True, True]), (weights, [False, True])):
        yield torch.ops.octavo.rotary, (qkv, cos, sin, each, list(heads), 1e-6, False)
        kept = qkv if each else None
        yield torch.ops.octavo.rotary_backward, (*gradients, kept, cos, sin, each, list(heads), 1e-6, False, needs)


def test_opcheck_norms_and_rotation():
    cases = [*norm_arguments(48, "h"), *rotary_arguments(Heads(2, 1, 16))]
    for operator, arguments in cases:
        opcheck(operator, arguments)
    for operator, arguments in norm_arguments(256, "block"):  # float8 cannot be compared, as above
        opcheck(operator, arguments, test_utils=("test_faketensor", "test_aot_dispatch_dynamic"))


@by_recipe
def test_nothing_reads_uninitialised_memory(name, monkeypatch):
    recipe, x = RECIPES[name], randn(33, 150)
    state = torch.zeros(SLOTS)
    plain = run_quantize(x, state, recipe, "both")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        poisoned_state = torch.zeros(SLOTS)
        poisoned = run_quantize(x, poisoned_state, recipe, "both")
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(state, poisoned_state)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(plain, poisoned, strict=True))


def test_compiled_code_asks_for_deterministic_algorithms():
    """Dynamo cannot trace torch's own questions; compiled code follows the setting all the same."""
    choose = torch.compile(lambda x: x * 2 if is_deterministic() else x + 1, backend="eager", fullgraph=True)
    x = torch.full((1,), 3.0)
    assert choose(x) == 4
    try:
        torch.use_deterministic_algorithms(True)
        assert choose(x) == 6
    finally:
        torch.use_deterministic_algorithms(False)
    assert choose(x) == 4
