"""Every kernel on the GPU against the specification: bit for bit where it quantises, nearly so where it fuses.

Memory is poisoned before each call, so that what a kernel forgets to write shows. Triton compiles anew for sizes that
are 1 or a multiple of 16, a second each: most shapes here are neither, so that they share what was compiled.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    CONFIGS,
    assert_nan_alike,
    assert_nearly_same,
    assert_on_neighbours,
    assert_same_bits,
    assert_same_state,
    codes,
    gated_backward_spec,
    gated_spec,
    new_state,
    operands,
    sample,
    scale_bits,
    unusual,
    with_nan,
)

from octavo import FP8TrainingConfig
from octavo.numerics import E4M3, E5M2, OperandRecipe, Quantized
from octavo.numerics import cross_entropy as loss_spec
from octavo.numerics import operand as spec
from octavo.numerics.activation import ACTIVATIONS, dequantize_gate_up, gated, gated_backward, save_gate_up
from octavo.numerics.quantize import expand_scale
from octavo.numerics.scaling import RESCALED, SATURATED, SCALE, UNDERFLOW, USED

if torch.cuda.is_available():  # elsewhere these tests are skipped, and Triton need not be there
    from octavo.kernels import cross_entropy as loss_kernel
    from octavo.kernels import gated as gated_kernel
    from octavo.kernels import quantize as kernel
    from octavo.kernels import trust
    from octavo.kernels.gated import blocks as gated_scaled_kernel

OPERANDS = operands()
DELAYED, CURRENT = CONFIGS["delayed"].recipe, CONFIGS["current"].recipe
GROUPED = ["delayed x", "current x", "channel x", "block x", "block w", "block, channel wgrad x", "mx x"]
TRANSPOSES = ["delayed x", "block w"]  # columns hold the very values of the rows
BF16 = torch.bfloat16


def poison():
    """Fill the blocks that the caching allocator hands out next with 0xFF: NaN in FP8, FP32 and BF16."""
    blocks = [torch.empty(2**n, dtype=torch.uint8, device="cuda") for n in range(9, 27) for _ in range(3)]
    torch._foreach_copy_(blocks, [torch.full_like(block, 0xFF) for block in blocks])


def bytes_of(data):
    return data.view(torch.uint8)


def compare(x, recipe, layout, *, record=True, state=None, sampled=False):
    """Kernel and specification from the same row. `sampled`: underflow is counted on some tiles of a large tensor."""
    mine, theirs = (new_state(device="cuda") if state is None else state.clone() for _ in range(2))
    poison()
    actual = kernel.quantize_operand(x, mine, recipe, record=record, layout=layout)
    assert_same_bits(actual, spec.quantize_operand(x, theirs, recipe, record=record, layout=layout))
    if sampled:
        assert abs(mine[UNDERFLOW] - theirs[UNDERFLOW]) < 0.2 * theirs[UNDERFLOW] + 1e-3
        mine[UNDERFLOW] = theirs[UNDERFLOW]
    assert_same_state(mine, theirs)
    return actual


@pytest.mark.parametrize("name", OPERANDS)
def test_quantize(name):
    for shape in ((3, 257, 300), (2, 3, 17, 35), (2, 130, 5), (7, 3, 140)):
        compare(sample(*shape, dtype=BF16, device="cuda"), OPERANDS[name], "both", sampled=True)


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("name", ["delayed x", "channel x", "block x"])
def test_quantize_one_layout(name, layout):
    compare(sample(3, 257, 300, dtype=BF16, device="cuda"), OPERANDS[name], layout, sampled=True)


@pytest.mark.parametrize("name", ["delayed x", "block w"])
def test_quantize_single_rows_and_columns(name):
    for shape in ((1, 1), (1, 140), (129, 1)):
        compare(sample(*shape, dtype=BF16, device="cuda"), OPERANDS[name], "both")


@pytest.mark.parametrize("name", [*GROUPED[:5], "mx x", "mx floor x", "delayed g", "little margin x"])
def test_quantize_unusual_values(name):
    for dtype in (torch.float32, BF16) if name in ("delayed x", "channel x", "mx x") else (BF16,):
        for x in unusual(2, 70, 150, dtype=dtype, device="cuda").values():
            compare(x, OPERANDS[name], "both")


@pytest.mark.parametrize("name", ["delayed x", "channel x", "block x", "block w", "mx x"])
def test_quantize_large(name):
    for shape in ((1024, 768), (8192, 4096)):
        actual = compare(sample(*shape, dtype=BF16, device="cuda"), OPERANDS[name], "both", sampled=True)
        if name in TRANSPOSES:
            assert torch.equal(bytes_of(actual[1].data), bytes_of(actual[0].data).mT)


@pytest.mark.parametrize("name", TRANSPOSES)
def test_the_transposed_store_is_not_flaky(name):
    """Once in a while a transposed store went wrong in a prototype: twenty times, each in fresh memory."""
    x = sample(2048, 1536, dtype=BF16, device="cuda")
    for _ in range(20):
        poison()
        rows, columns = kernel.quantize_operand(x, new_state(device="cuda"), OPERANDS[name], layout="both")
        assert torch.equal(bytes_of(columns.data), bytes_of(rows.data).mT)


@pytest.mark.parametrize("layout", ["both", "columns"])
@pytest.mark.parametrize("name", ["delayed x", "channel x", "block w"])
def test_group(name, layout):
    xs = [sample(rows, 512, dtype=BF16, device="cuda") * factor for rows, factor in ((512, 1), (256, 9), (128, 0.1))]
    mine, theirs = new_state(device="cuda"), new_state(device="cuda")
    poison()
    actual = kernel.quantize_group(xs, mine, OPERANDS[name], layout=layout)
    assert_same_bits(actual, spec.quantize_operand(torch.cat(xs), theirs, OPERANDS[name], layout=layout))
    assert_same_state(mine, theirs)


def test_uses_of_a_delayed_scale():
    x = sample(2, 150, 260, dtype=BF16, device="cuda")
    recipe = OPERANDS["delayed x"]
    first = x.float().abs().max().item() / 448
    for scale in (0.0, first, first / 9, first * 0.97, first * 100, first * 1e5):
        for record in (False, True):
            compare(x, recipe, "both", record=record, state=new_state(scale, "cuda"))
    mine, theirs = new_state(device="cuda"), new_state(device="cuda")
    for factor in (0.0, 1.0, 3.0, 0.1):
        kernel.quantize_operand(x * factor, mine, recipe)
        spec.quantize_operand(x * factor, theirs, recipe)
        assert_same_state(mine, theirs)
    assert mine[RESCALED] == 1 and mine[SCALE] > 2.9 * first


def test_strided_inputs():
    wide = sample(3, 400, 700, dtype=BF16, device="cuda")
    for name in ("delayed x", "block w"):
        for x in (wide[:, :, 3:500], wide[..., ::2], wide.mT, wide[:, 1:200], wide[0].expand(3, 400, 700)):
            compare(x, OPERANDS[name], "both", sampled=True)


@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_stochastic_rounding(format, granularity):
    recipe = OperandRecipe(format, granularity, rounding="stochastic")
    x = sample(512, 700, device="cuda")
    poison()
    rows, columns = kernel.quantize_operand(x, new_state(device="cuda"), recipe, layout="both")
    assert_on_neighbours(rows, x)
    assert_on_neighbours(columns, x.mT)
    if granularity == "tensor":
        assert torch.equal(bytes_of(columns.data), bytes_of(rows.data).mT)
    known, one = replace(recipe, granularity="tensor"), torch.ones((), device="cuda")
    for value in (1.03, -0.3, 0.01, 2.0**-8 / 3):
        constant = torch.full((1024, 512), value, device="cuda")
        q = kernel.quantize_group([constant], new_state(device="cuda"), known, scale=one)[0].data.float()
        step = q.max() - q.min()
        assert q.unique().numel() == 2
        assert (q.double().mean() - constant[0, 0].double()).abs() < 5 * step / 2 / q.numel() ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(4, 1, 64, 128), (512, 512), (130, 77)], ids=str)
def test_both_layouts_where_something_saturates(shape, dtype):
    """Programs that met something to be counted walk over their tiles again: another transposed store."""
    for operand, margin in itertools.product((CONFIGS["delayed"].recipe.x, CONFIGS["delayed"].recipe.g), (1.0, 0.25)):
        x, recipe = torch.randn(shape, device="cuda").to(dtype), replace(operand, margin=margin)
        for factor in (0.7, 1.0, 1.5):
            scale = float(x.abs().max()) / recipe.format.max * margin * factor
            state = new_state(scale, "cuda")
            compare(x, recipe, "both", state=state)
            kernel.quantize_operand(x, state, recipe, layout="both")
            assert (state[SATURATED] > 0) == (margin < 1) and (state[RESCALED] > 0) == (factor < 1)
        compare(x, recipe, "both")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("name", "dtype"), [("delayed", BF16), ("E5M2", BF16), ("delayed", torch.float32), ("current", torch.float32)]
)
def test_gated(name, activation, dtype):
    """In BF16 with known scales: an amax off by a step of BF16 would move the scale, and so every value."""
    recipe = CONFIGS[name].recipe
    if dtype == BF16:
        recipe = replace(recipe, x=replace(recipe.x, delayed=True), g=replace(recipe.g, delayed=True))
    for m, f in ((1024, 768), (257, 300), (37, 5)) if dtype == BF16 else ((257, 300),):
        gate_up = sample(m, 2 * f, device="cuda").clamp(-30, 30).to(dtype)
        dh = sample(m, f, device="cuda").clamp(-30, 30).to(dtype)
        known = 0.0 if dtype == torch.float32 else 2.0
        mine, theirs = new_state(known, "cuda"), new_state(known, "cuda")
        poison()
        actual = gated_kernel.gated_quantize(gate_up, mine, recipe.x, activation, record=True)
        assert_nearly_same(actual, gated_spec(gate_up, theirs, recipe.x, activation, record=True))
        assert_rows_alike(mine, theirs)

        mine, theirs = new_state(known / 50, "cuda"), new_state(known / 50, "cuda")
        how = (recipe.g, recipe.x, activation)
        poison()
        actual = gated_kernel.gated_quantize_backward(dh, gate_up, actual.scale, mine, *how)
        expected = gated_backward_spec(dh, gate_up, actual[2].scale, theirs, *how)
        for one, other in zip(actual, expected, strict=True):
            assert_nearly_same(one, other)
        assert torch.equal(bytes_of(actual[1].data), bytes_of(actual[0].data).mT)
        assert_rows_alike(mine, theirs)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["delayed", "E5M2"])
def test_gated_with_gate_and_up_kept_in_fp8(name, activation):
    recipe = CONFIGS[name].recipe
    for m, f in ((1024, 768), (8192, 1024), (257, 256)):
        gate_up, dh = (sample(m, n, device="cuda").clamp(-30, 30).to(BF16) for n in (2 * f, f))
        saved = Quantized(
            torch.empty(m, 2 * f, dtype=torch.float8_e4m3fn, device="cuda"),
            torch.empty(m, 2 * f // 128, dtype=torch.uint8, device="cuda"),
        )
        mine, theirs = new_state(2.0, "cuda"), new_state(2.0, "cuda")
        poison()
        actual = gated_kernel.gated_quantize(gate_up, mine, recipe.x, activation, record=True, into=saved)
        assert_nearly_same(actual, gated_spec(gate_up, theirs, recipe.x, activation, record=True))
        expected = save_gate_up(gate_up)
        assert torch.equal(saved.scale, expected.scale)
        assert torch.equal(bytes_of(saved.data), bytes_of(expected.data))
        gate_up_hp = dequantize_gate_up(saved).to(BF16)  # which is exact
        mine, theirs = new_state(0.04, "cuda"), new_state(0.04, "cuda")
        how = (recipe.g, recipe.x, activation)
        poison()
        backward = gated_kernel.gated_quantize_backward(
            dh, saved.data, actual.scale, mine, *how, saved_scale=saved.scale
        )
        for one, other in zip(backward, gated_backward_spec(dh, gate_up_hp, actual.scale, theirs, *how), strict=True):
            assert_nearly_same(one, other)
        assert torch.equal(bytes_of(backward[1].data), bytes_of(backward[0].data).mT)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("name", ["block", "block, channel wgrad", "mx"])
def test_gated_with_scales_for_blocks(name, dtype):
    """Against plain kernels and quantising after: with the same `exp`, only an FMA may differ, in few elements."""
    wgrad = "channel" if "wgrad" in name else None
    recipe = FP8TrainingConfig.from_recipe(name.split(",")[0], wgrad=wgrad).recipe
    for m, f in ((1024, 768), (257, 384), (37, 128)):
        gate_up = sample(m, 2 * f, device="cuda").clamp(-30, 30).to(dtype)
        dh = sample(m, f, device="cuda").clamp(-30, 30).to(dtype)
        gradient, h = gated_kernel.gated_backward(dh, gate_up, "silu")
        mine, theirs = new_state(device="cuda"), new_state(device="cuda")
        poison()
        actual = gated_scaled_kernel.gated_quantize(gate_up, mine, recipe.x, "silu", record=True)
        expected = kernel.quantize_operand(gated_kernel.gated(gate_up, "silu"), theirs, recipe.x)
        assert_mostly_same([actual], expected)
        assert_rows_alike(mine, theirs)
        mine, theirs = new_state(device="cuda"), new_state(device="cuda")
        poison()
        actual = gated_scaled_kernel.gated_quantize_backward(dh, gate_up, mine, recipe.g, recipe.x, "silu")
        expected = kernel.quantize_operand(gradient, theirs, recipe.g, layout="both")
        expected += kernel.quantize_operand(h, new_state(device="cuda"), recipe.x, record=False, layout="columns")
        assert_mostly_same(actual, expected)
        assert_rows_alike(mine, theirs)


def assert_mostly_same(actual, expected):
    """Blocks whose amax came out a step of BF16 apart have other scales; nearly all are the same to the bit.

    A step of E4M3 is up to 12.5 % of a value.
    """
    for one, other in zip(actual, expected, strict=True):
        assert one.data.shape == other.data.shape and one.scale.shape == other.scale.shape
        assert (scale_bits(one.scale) == scale_bits(other.scale)).float().mean() > 0.99
        assert (codes(one.data) == codes(other.data)).float().mean() > 0.98
        wanted = dequantized(other)
        torch.testing.assert_close(dequantized(one), wanted, rtol=0.15, atol=1e-3 * float(wanted.abs().max()))


def dequantized(q):
    scale = q.scale.view(torch.float8_e8m0fnu).float() if q.scale.dtype == torch.uint8 else q.scale
    return q.data.float() * expand_scale(scale, q.data.shape)


def assert_rows_alike(mine, theirs):
    """All but the shares within a step of BF16; the shares of underflow and saturation within 1 %."""
    mine, theirs = mine.clone(), theirs.clone()
    mine[USED] = theirs[USED] = 0.0
    torch.testing.assert_close(mine, theirs, rtol=2.0**-7, atol=1e-2)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_without_quantising(activation):
    for dtype in (torch.float32, BF16):
        gate_up, dh = (sample(257, n, device="cuda").clamp(-30, 30).to(dtype) for n in (600, 300))
        step = max(torch.finfo(dtype).eps, 1e-4)
        poison()
        gradient, h = gated_kernel.gated_backward(dh, gate_up, activation)
        for actual in (h, gated_kernel.gated(gate_up, activation)):
            torch.testing.assert_close(actual, gated(gate_up, activation), rtol=step, atol=1e-5)
        torch.testing.assert_close(gradient, gated_backward(dh, gate_up, activation), rtol=step, atol=1e-3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_keeps_nan_without_quantising(activation):
    gate_up, dh = with_nan(257, 300, device="cuda")
    gradient, h = gated_kernel.gated_backward(dh, gate_up, activation)
    for actual in (h, gated_kernel.gated(gate_up, activation)):
        assert_nan_alike(actual, gated(gate_up, activation))
    assert_nan_alike(gradient, gated_backward(dh, gate_up, activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["delayed", "current", "E5M2", "block", "block, channel wgrad", "mx"])
def test_gated_keeps_nan(name, activation):
    recipe = CONFIGS[name].recipe
    gate_up, dh = with_nan(257, 384, device="cuda")
    module = gated_kernel if recipe.x.granularity == "tensor" else gated_scaled_kernel
    rows = module.gated_quantize(gate_up, new_state(device="cuda"), recipe.x, activation, record=True)
    h = gated(gate_up, activation)
    assert_nan_alike(rows.data, h)
    scale = [rows.scale] if module is gated_kernel else []
    how = (*scale, new_state(device="cuda"), recipe.g, recipe.x, activation)
    d_rows, d_columns, h_columns = module.gated_quantize_backward(dh, gate_up, *how)
    gradient = gated_backward(dh, gate_up, activation)
    assert_nan_alike(d_rows.data, gradient)
    assert_nan_alike(d_columns.data, gradient.mT)
    assert_nan_alike(h_columns.data, h.mT)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1024, 768), BF16),
        ((257, 300), BF16),
        ((257, 300), torch.float16),
        ((257, 300), torch.float32),
        ((3, 128256), BF16),
    ],
)
def test_cross_entropy(shape, dtype):
    logits = (3 * torch.randn(shape, device="cuda")).to(dtype)
    labels = torch.randint(0, shape[1], shape[:1], device="cuda")
    labels[1::3] = loss_spec.IGNORED
    factor = torch.tensor(0.37, device="cuda")
    poison()
    loss, lse = loss_kernel.cross_entropy(logits, labels)
    for one, other in zip((loss, lse), loss_spec.cross_entropy(logits, labels), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for format in (E4M3, E5M2):
        poison()
        columns = torch.empty(shape[1], shape[0], dtype=format.dtype, device="cuda")
        rows = loss_kernel.cross_entropy_quantize(logits, labels, lse, factor, format, columns)
        alone = loss_kernel.cross_entropy_quantize(logits, labels, lse, factor, format, None)
        assert torch.equal(bytes_of(alone.data), bytes_of(rows.data))
        actual = rows, rows._replace(data=columns)
        expected = loss_spec.cross_entropy_quantize(logits, labels, lse, factor, format)
        for one, other in zip(actual, expected, strict=True):
            assert_nearly_same(one, other)
        assert torch.equal(bytes_of(actual[1].data), bytes_of(actual[0].data).mT)
        wider = torch.full((shape[1], shape[0] + 64), 7.0, device="cuda").to(format.dtype)
        part = wider[:, 16 : 16 + shape[0]]
        rows = loss_kernel.cross_entropy_quantize(logits, labels, lse, factor, format, part)
        assert torch.equal(bytes_of(part), bytes_of(rows.data).mT)
        assert (wider[:, :16].float() == 7).all() and (wider[:, 16 + shape[0] :].float() == 7).all()
    expected = loss_spec.cross_entropy_backward(logits, labels, lse, factor)
    loss_kernel.cross_entropy_backward_(logits, labels, lse, factor)
    torch.testing.assert_close(logits, expected, rtol=max(torch.finfo(dtype).eps, 1e-4), atol=1e-6)


def test_cross_entropy_of_no_labels():
    logits, labels = torch.randn(70, 300, device="cuda"), torch.full((70,), loss_spec.IGNORED, device="cuda")
    loss, lse = loss_kernel.cross_entropy(logits, labels)
    loss_kernel.cross_entropy_backward_(logits, labels, lse, torch.tensor(float("inf"), device="cuda"))
    assert not loss.any() and not logits.any()


def test_scaling_in_place():
    for shape in ((1,), (3, 4097), (4096, 4096)):
        x = torch.randn(shape, device="cuda", dtype=BF16)
        before = x.clone()
        loss_kernel.scale_(x, torch.tensor(1.0, device="cuda"))
        assert torch.equal(x, before)
        loss_kernel.scale_(x, torch.tensor(0.37, device="cuda"))
        assert torch.equal(x, (before.float() * torch.tensor(0.37)).to(BF16))


@pytest.mark.parametrize("shape", [(128, 64), (130, 66), (4096, 14336), (4, 300), (1024, 4096)])
def test_transposed_bytes(shape):
    from octavo.kernels.quantize import transpose as transpose_kernel

    data = torch.randint(256, shape, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    for _ in range(3):  # the transposed store is checked on every run, and more than once
        actual = transpose_kernel.transpose(data)
        assert torch.equal(actual.view(torch.uint8), data.view(torch.uint8).t())


def test_what_an_untested_triton_would_be_asked():
    assert trust._wrong_kernels(torch.device("cuda")) == []
