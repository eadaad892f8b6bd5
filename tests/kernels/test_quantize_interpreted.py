"""The quantising kernels in Triton's interpreter against the specification, bit for bit."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    CONFIGS,
    assert_on_neighbours,
    assert_same_bits,
    assert_same_state,
    new_state,
    operands,
    sample,
    unusual,
)

from octavo.kernels import quantize as kernel
from octavo.numerics import E4M3, E5M2, OperandRecipe
from octavo.numerics import operand as spec
from octavo.numerics.operand import LAYOUTS
from octavo.numerics.scaling import AMAX, CALLS, RESCALED, SATURATED, SCALE, SEEN

OPERANDS = operands()
NAMES = list(OPERANDS)
SHAPES = [(66, 130), (2, 3, 17, 35), (130, 5), (1, 140), (65, 1), (64, 128), (1, 1)]
KINDS = list(unusual(2, 8))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DELAYED = OPERANDS["delayed x"]
GROUPED = ["delayed x", "current x", "channel x", "block x", "block w", "block, channel wgrad x", "mx x"]


def compare(x, recipe, layout, *, record=True, state=None):
    """Both, from the same row; the rows afterwards are equal, too."""
    mine, theirs = (new_state() if state is None else state.clone() for _ in range(2))
    actual = kernel.quantize_operand(x, mine, recipe, record=record, layout=layout)
    assert_same_bits(actual, spec.quantize_operand(x, theirs, recipe, record=record, layout=layout))
    assert_same_state(mine, theirs)
    return mine


@pytest.mark.matrix
@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_and_layout(name, layout):
    case = 3 * NAMES.index(name) + LAYOUTS.index(layout)
    compare(sample(*SHAPES[case % len(SHAPES)], dtype=DTYPES[case % 3]), OPERANDS[name], layout)


@pytest.mark.parametrize("name", GROUPED[1:])
@pytest.mark.parametrize("shape", SHAPES[1:-2], ids=str)
def test_odd_sizes(name, shape):
    compare(sample(*shape, dtype=torch.bfloat16), OPERANDS[name], "both")


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("shape", [(128, 70), (70, 128)], ids=str)
def test_one_side_alone_in_whole_tiles(name, shape):
    compare(sample(*shape, dtype=torch.bfloat16), OPERANDS[name], "both")


@pytest.mark.parametrize("name", [*GROUPED[:5], "mx x", "mx floor x", "delayed g", "little margin x"])
@pytest.mark.parametrize("kind", KINDS)
def test_unusual_values(name, kind):
    dtype = DTYPES[(NAMES.index(name) + KINDS.index(kind)) % 2]
    compare(unusual(9, 37, dtype=dtype)[kind], OPERANDS[name], "both")


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("format", "margin"), [(E4M3, 1.0), (E5M2, 1.0), (E4M3, 4.0), (E4M3, 0.25)])
def test_delayed_scales(layout, format, margin):
    """A scale that holds the tensor serves; one that does not gives way to the tensor's own."""
    recipe = replace(DELAYED, format=format, margin=margin)
    x = sample(40, 70)
    own = x.abs().max().item() / format.max * min(margin, 1)
    for factor, holds in ((1 / 9, False), (0.9, False), (0.97, True), (1, True), (100, True), (1e10, False)):
        before = new_state(own * factor)
        after = compare(x, recipe, layout, state=before)
        assert (after[SCALE] == before[SCALE]) == holds
        assert after[RESCALED] == (not holds)
        assert (after[SATURATED] > 0) == (margin < 1 and factor != 100)
        compare(x, recipe, layout, state=before, record=False)


@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_finite_value_saturates_however_small_the_scale(format, rounding):
    """x / scale may be beyond FP32: that is no infinity of x's, and no NaN. Infinities of x's are NaN."""
    recipe = replace(DELAYED, format=format, rounding=rounding)
    x = torch.zeros(9, 70)
    x[0, :6] = torch.tensor([1e38, -1e38, 3e38, float("inf"), float("-inf"), float("nan")])
    tiny = torch.tensor(2.0**-120)
    actual = kernel.quantize_group([x], new_state(), recipe, layout="both", scale=tiny)
    assert_same_bits(actual, spec.quantize_operand(x, new_state(), recipe, layout="both", scale=tiny))
    if rounding == "nearest":  # a delayed one gives way, and what overflowed in the first pass is done again
        compare(x, recipe, "both", state=new_state(2.0**-120))
    for q in (actual[0].data, actual[1].data.t()):
        assert q.float()[0, :3].isfinite().all() and q.float()[0, 3:6].isnan().all()


@pytest.mark.parametrize("recipe", ["delayed x", "current x", "channel x", "block w"])
def test_uses_add_up_in_the_row(recipe):
    state = new_state()
    for factor in (0.0, 1.0, 3.0, 0.1):  # zeros teach nothing; the first other use sets the scale
        state = compare(sample(20, 40) * factor, OPERANDS[recipe], "both", state=state)
    assert state[SEEN] == state[CALLS] == 4


@pytest.mark.parametrize("scale", [0.0, 0.01])
@pytest.mark.parametrize("recipe", ["delayed x", "current x", "channel x", "block x", "mx x"])
def test_nothing_is_learned_without_record(recipe, scale):
    state = new_state(scale)
    assert torch.equal(compare(sample(20, 40), OPERANDS[recipe], "both", record=False, state=state), state)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GROUPED)
def test_a_group_is_its_matrices_side_by_side(name, layout):
    xs = [sample(rows, 40) * factor for rows, factor in ((128, 1), (256, 9), (128, 0.1))]
    assert kernel.can_quantize(xs, OPERANDS[name])
    mine, theirs = new_state(), new_state()
    actual = kernel.quantize_group(xs, mine, OPERANDS[name], layout=layout)
    assert_same_bits(actual, spec.quantize_operand(torch.cat(xs), theirs, OPERANDS[name], layout=layout))
    assert_same_state(mine, theirs)


@pytest.mark.parametrize("name", ["delayed x", "channel x", "block w"])
def test_strided_inputs(name):
    wide = sample(2, 24, 90)
    for x in (wide[0, :, 3:50], wide[..., ::2], wide.mT, wide[0].t(), wide[:, 1:20], wide[0].expand(3, 24, 90)):
        compare(x, OPERANDS[name], "both")


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["channel x", "block x", "mx x", "mx floor x", "little margin x"])
def test_columns_of_whole_tiles(name, dtype, monkeypatch):
    """Their own kernel, which nothing else takes the place of."""
    monkeypatch.setattr(kernel, "scaled_kernel", None)
    x = sample(2, 128, 128, dtype=dtype)
    x[0, 3, 5] = float("inf")
    x[1, 100, 7] = float("nan")
    x[1, :, 9] = float("-inf")
    x[..., 10] = 0
    compare(x, OPERANDS[name], "columns", record=False)
    compare(x[:, :, 64:128], OPERANDS[name], "columns", record=False)
    xs = [sample(rows, 64, dtype=dtype) * factor for rows, factor in ((128, 1), (256, 9))]
    actual = kernel.quantize_group(xs, new_state(), OPERANDS[name], record=False, layout="columns")
    assert_same_bits(actual, spec.quantize_operand(torch.cat(xs), new_state(), OPERANDS[name], layout="columns"))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*(((37, 70), dtype) for dtype in DTYPES), *(((2, width), torch.bfloat16) for width in (5000, 9000, 17000))],
    ids=str,
)
def test_maxima_of_columns_are_found_on_the_way(shape, dtype):
    x = sample(*shape, dtype=dtype)
    x[1, 3], x[1, 5], x[:, 7] = float("inf"), float("nan"), float("-inf")
    actual = kernel.quantize_operand(x, new_state(), OPERANDS["channel x"], layout="both")
    assert_same_bits(actual, spec.quantize_operand(x, new_state(), OPERANDS["channel x"], layout="both"))


def test_what_is_refused():
    x = torch.randn(4, 4)
    assert not kernel.can_quantize([x.double()], DELAYED)
    assert not kernel.can_quantize([x[0]], DELAYED)
    assert not kernel.can_quantize([x[:0]], DELAYED)
    assert not kernel.can_quantize([x], replace(DELAYED, percentile=99.0))
    assert not kernel.can_quantize([x, x], DELAYED)  # a tile would straddle both


@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_stochastic_rounding_goes_to_a_neighbour(format, granularity):
    x = sample(40, 70)
    recipe = OperandRecipe(format, granularity, rounding="stochastic")
    rows, columns = kernel.quantize_operand(x, new_state(), recipe, layout="both")
    assert_on_neighbours(rows, x)
    assert_on_neighbours(columns, x.mT)
    if granularity == "tensor":
        assert torch.equal(columns.data.view(torch.uint8), rows.data.view(torch.uint8).mT)
    again = kernel.quantize_operand(x, new_state(), recipe)[0]
    assert not torch.equal(again.data.view(torch.uint8), rows.data.view(torch.uint8))


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("value", [1.03, -0.3, 0.01, 2.0**-8 / 3])
def test_stochastic_rounding_is_unbiased(value, layout):
    """The mean of n roundings to neighbours one step apart is within 5 standard deviations of step / 2√n."""
    n = 64 * 128
    recipe = OperandRecipe(E4M3, rounding="stochastic")
    x, one = torch.full((64, 128), value), torch.ones(())
    q = kernel.quantize_group([x], new_state(), recipe, layout=layout, scale=one)[0].data.float()
    step = q.max() - q.min()
    assert q.unique().numel() == 2 and (q.mean() - value).abs() < 5 * step / 2 / n**0.5


def test_a_planted_bug_is_seen():
    x = sample(40, 70)
    right, wrong = (kernel.quantize_operand(v, new_state(), DELAYED) for v in (x, x * (1 + 2.0**-9)))
    with pytest.raises(AssertionError, match="scales"):
        assert_same_bits(wrong, right)
    data = right[0].data.clone()
    data.view(torch.uint8)[7, 9] ^= 1
    with pytest.raises(AssertionError, match=r"1 of 2800, first at \[7, 9\]"):
        assert_same_bits([right[0]._replace(data=data)], right)
    state = new_state()
    state[AMAX] = 1e-3
    with pytest.raises(AssertionError):
        assert_same_state(state, new_state())


@pytest.mark.parametrize("shape", [(5, 64), (17, 300), (16, 4096), (3, 6144), (2, 14336)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["channel", "little margin"])
def test_whole_rows_with_a_factor_per_column(shape, dtype, name):
    recipe = CONFIGS[name].recipe.g
    x, factor = sample(*shape, dtype=dtype), torch.rand(shape[1]) + 0.01
    mine, theirs = new_state(), new_state()
    assert kernel.can_fold(x, recipe) and not kernel.can_fold(x, CONFIGS["block"].recipe.g)
    actual = kernel.quantize_folded(x, factor, mine, recipe)
    assert_same_bits([actual], spec.quantize_operand((x.float() * factor).to(dtype), theirs, recipe))
    assert_same_state(mine, theirs)
