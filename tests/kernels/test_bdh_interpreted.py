"""The kernels of a fused BDH layer in Triton's interpreter: the numbers of the specification, odd sizes included."""

import pytest
import torch

from octavo import ops_bdh
from octavo.kernels import bdh, bdh_backward, causal
from octavo.models.bdh import rope_angles
from octavo.numerics import FP8TrainingConfig, Quantized
from octavo.numerics.scaling import AMAX, NON_FINITE, RESCALED, SATURATED, SCALE, SEEN, UNDERFLOW, new_rows

DELAYED, CURRENT = FP8TrainingConfig().recipe, FP8TrainingConfig(scaling="current").recipe
SIZES = [(2, 3, 17, 34), (1, 2, 64, 256), (2, 1, 1, 2), (1, 1, 64, 34), (1, 1, 17, 256)]  # B, H, T, N


def rows(count):
    return [new_rows(device="cpu") for _ in range(count)]


def assert_same_bits(found, expected):
    """Data and scales alike; −0 is 0."""
    for a, b in zip(found, expected, strict=True):
        if isinstance(a, Quantized):
            assert_same_bits(a, b)
        else:
            assert a.shape == b.shape
            torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)


def assert_same_statistics(found, expected):
    for a, b in zip(found, expected, strict=True):
        exact = [SCALE, AMAX, SEEN, NON_FINITE]
        torch.testing.assert_close(a[exact], b[exact], rtol=0, atol=0)
        torch.testing.assert_close(
            a[[SATURATED, UNDERFLOW, RESCALED]], b[[SATURATED, UNDERFLOW, RESCALED]], rtol=1e-5, atol=1e-7
        )


def kept(shape, scale=0.01):
    """Values as forward keeps them: E4M3, a third of them zero, the others positive."""
    x = torch.randn(shape).add(0.4).relu() * 100
    return Quantized(x.to(torch.float8_e4m3fn), torch.tensor(scale))


@pytest.mark.matrix("dtype", "recipe")
@pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_relu_rope(size, dtype, recipe):
    B, H, T, N = size
    cos, sin = rope_angles(T, N, torch.device("cpu"))
    s_pre = torch.randn(B, T, H, N).to(dtype)
    mine, theirs = rows(2), rows(2)
    for use in range(2):  # the second finds a scale, too small for what comes
        s_pre = s_pre * (1 + use)
        found = bdh.relu_rope_quantize(s_pre, cos, sin, *mine, recipe.x, record=True)
        expected = ops_bdh.relu_rope_quantize(s_pre, cos, sin, *theirs, recipe.x, record=True)
        assert_same_bits(found, expected)
    theirs[1][UNDERFLOW] = mine[1][UNDERFLOW]  # not counted for what is only kept
    assert_same_statistics(mine, theirs)
    if recipe.x.delayed and T > 1:
        assert mine[0][RESCALED] == 1 and mine[0][SATURATED] == 0
    q, s = expected
    columns = bdh.rope_columns(s, cos, sin, q.scale, recipe.x, dtype)
    assert_same_bits(columns, ops_bdh.rope_columns(s, cos, sin, q.scale, recipe.x, dtype))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gate(size):
    B, H, T, N = size
    s_pre, t_pre = torch.randn(B, T, H, N).bfloat16(), torch.randn(H, B, T, N).bfloat16()
    mine, theirs = rows(2), rows(2)
    for use in range(2):
        found = bdh.gate_quantize(s_pre, t_pre * (1 + use), *mine, DELAYED.x, record=True)
        assert_same_bits(found, ops_bdh.gate_quantize(s_pre, t_pre * (1 + use), *theirs, DELAYED.x, record=True))
    theirs[1][UNDERFLOW] = mine[1][UNDERFLOW]
    assert_same_statistics(mine, theirs)


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gate_backward(size, recipe):
    B, H, T, N = size
    dz = torch.randn(B, T, H, N).bfloat16() * 1e-3
    s, t, z_scale = kept((B, T, H, N)), kept((B, T, H, N), 0.02), torch.tensor(0.03)
    (mine,), (theirs,) = rows(1), rows(1)
    for use in range(2):
        found = bdh_backward.gate_backward(dz * (1 + use), s, t, z_scale, mine, recipe.g, recipe.x)
        expected = ops_bdh.gate_backward(dz * (1 + use), s, t, z_scale, theirs, recipe.g, recipe.x)
        assert_same_bits(found, (expected[0].data, expected[0].scale, expected[1].data, expected[2].data))
    assert_same_statistics([mine], [theirs])


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_relu_rope_backward(size, recipe):
    B, H, T, N = size
    cos, sin = rope_angles(T, N, torch.device("cpu"))
    dq, dz = torch.randn(B, H, T, N).bfloat16() * 1e-3, torch.randn(B, T, H, N).bfloat16() * 1e-3
    s, t = kept((B, T, H, N)), kept((B, T, H, N), 0.02)
    (mine,), (theirs,) = rows(1), rows(1)
    for use in range(2):
        found = bdh_backward.relu_rope_backward(dq * (1 + use), dz, s.data, t, cos, sin, mine, recipe.g)
        expected = ops_bdh.relu_rope_backward(dq * (1 + use), dz, s, t, cos, sin, theirs, recipe.g)
        assert_same_bits(found, (expected[0].data, expected[0].scale, expected[1].data))
    assert_same_statistics([mine], [theirs])


@pytest.mark.parametrize("T", [1, 64, 70])  # tiles are 64×64
def test_causal(T):
    scores = torch.randn(2, 3, T, T).bfloat16()
    mine, theirs = rows(2), rows(2)
    for use in range(2):
        x = scores * (1 + use)
        rows_q, columns_q = ops_bdh.causal_quantize(x, theirs[0], DELAYED.x, record=True)
        found = causal.causal_quantize(x, mine[0], DELAYED.x, record=True)
        assert_same_bits(found, (rows_q.data, rows_q.scale, columns_q.data))
        assert_same_bits(
            causal.symmetric_quantize(x, mine[1], DELAYED.g), ops_bdh.symmetric_quantize(x, theirs[1], DELAYED.g)
        )
    assert_same_statistics(mine, theirs)


def test_what_is_not_finite_is_recorded():
    s_pre = torch.randn(1, 5, 2, 8)
    s_pre[0, 1, 0, 3], s_pre[0, 2, 1, 0] = float("nan"), float("inf")
    cos, sin = rope_angles(5, 8, torch.device("cpu"))
    mine, theirs = rows(2), rows(2)
    found = bdh.relu_rope_quantize(s_pre, cos, sin, *mine, DELAYED.x, record=True)
    expected = ops_bdh.relu_rope_quantize(s_pre, cos, sin, *theirs, DELAYED.x, record=True)
    # The interpreter's cast to E4M3 knows no NaN: only the others are compared here, NaN in tests/gpu.
    for a, b in zip(found, expected, strict=True):
        finite = b.data.float().isfinite()
        assert not finite.all()
        torch.testing.assert_close(a.data.float()[finite], b.data.float()[finite], rtol=0, atol=0)
    assert mine[0][NON_FINITE] == mine[1][NON_FINITE] == 1
    assert_same_statistics(mine, theirs)
