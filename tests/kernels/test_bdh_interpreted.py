"""The kernels of a fused BDH layer in Triton's interpreter: the numbers of the specification, odd sizes included."""

import pytest
import torch

from octavo.models.bdh import ops, rope_angles
from octavo.models.bdh.kernels import backward, forward, scores
from octavo.numerics import FP8TrainingConfig, Quantized
from octavo.numerics.scaling import AMAX, NON_FINITE, RESCALED, SATURATED, SCALE, SEEN, UNDERFLOW, new_states

DELAYED, CURRENT = FP8TrainingConfig().recipe, FP8TrainingConfig(scaling="current").recipe
SIZES = [(2, 3, 17, 34), (1, 2, 64, 256), (2, 1, 1, 2), (1, 1, 64, 34), (1, 1, 17, 256)]  # B, H, T, N


def states(count):
    return [new_states(device="cpu") for _ in range(count)]


def pairs(parts):
    """Data and scale, alternating, as operands."""
    return [Quantized(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]


def assert_same_bits(actual, expected):
    """Data and scales alike; −0 is 0."""
    for a, b in zip(actual, expected, strict=True):
        if isinstance(a, Quantized):
            assert_same_bits(a, b)
        else:
            assert a.shape == b.shape
            torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)


def assert_same_statistics(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        exact = [SCALE, AMAX, SEEN, NON_FINITE]
        torch.testing.assert_close(a[exact], b[exact], rtol=0, atol=0)
        torch.testing.assert_close(
            a[[SATURATED, UNDERFLOW, RESCALED]], b[[SATURATED, UNDERFLOW, RESCALED]], rtol=1e-5, atol=1e-7
        )


def saved(shape, scale=0.01):
    """Return values as forward saves them: E4M3, a third of them zero, the others positive."""
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
    mine, theirs = states(2), states(2)
    for use in range(2):  # the second finds a scale, too small for what comes
        s_pre = s_pre * (1 + use)
        actual = forward.relu_rope(s_pre, cos, sin, *mine, recipe.x)
        expected = pairs(ops.bdh_relu_rope(s_pre, cos, sin, *theirs, recipe.x.encode()))
        assert_same_bits(actual, expected)
    theirs[1][UNDERFLOW] = mine[1][UNDERFLOW]  # not counted for tensors that are only saved
    assert_same_statistics(mine, theirs)
    if recipe.x.delayed and T > 1:
        assert mine[0][RESCALED] == 1 and mine[0][SATURATED] == 0
    q, s = expected
    columns = forward.rope_columns(s, cos, sin, q.scale, recipe.x, dtype)
    assert_same_bits([columns], [ops.bdh_rope_columns(*s, cos, sin, q.scale, recipe.x.encode(), dtype)])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gate(size):
    B, H, T, N = size
    s_pre, t_pre = torch.randn(B, T, H, N).bfloat16(), torch.randn(H, B, T, N).bfloat16()
    mine, theirs = states(2), states(2)
    for use in range(2):
        actual = forward.gate(s_pre, t_pre * (1 + use), *mine, DELAYED.x)
        assert_same_bits(actual, pairs(ops.bdh_gate(s_pre, t_pre * (1 + use), *theirs, DELAYED.x.encode())))
    theirs[1][UNDERFLOW] = mine[1][UNDERFLOW]
    assert_same_statistics(mine, theirs)


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gate_backward(size, recipe):
    B, H, T, N = size
    dz = torch.randn(B, T, H, N).bfloat16() * 1e-3
    s, t, z_scale = saved((B, T, H, N)), saved((B, T, H, N), 0.02), torch.tensor(0.03)
    (mine,), (theirs,) = states(1), states(1)
    for use in range(2):
        actual = backward.gate_backward(dz * (1 + use), s, t, z_scale, mine, recipe.g, recipe.x)
        recipes = recipe.g.encode(), recipe.x.encode()
        assert_same_bits(actual, ops.bdh_gate_backward(dz * (1 + use), [*s, *t], z_scale, theirs, *recipes))
    assert_same_statistics([mine], [theirs])


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_relu_rope_backward(size, recipe):
    B, H, T, N = size
    cos, sin = rope_angles(T, N, torch.device("cpu"))
    dq, dz = torch.randn(B, H, T, N).bfloat16() * 1e-3, torch.randn(B, T, H, N).bfloat16() * 1e-3
    s, t = saved((B, T, H, N)), saved((B, T, H, N), 0.02)
    (mine,), (theirs,) = states(1), states(1)
    for use in range(2):
        actual = backward.relu_rope_backward(dq * (1 + use), dz, s.data, t, cos, sin, mine, recipe.g)
        given = dq * (1 + use), dz, [*s, *t], cos, sin
        assert_same_bits(actual, ops.bdh_relu_rope_backward(*given, theirs, recipe.g.encode()))
    assert_same_statistics([mine], [theirs])


@pytest.mark.parametrize("T", [1, 64, 70])  # tiles are 64×64
def test_causal(T):
    square = torch.randn(2, 3, T, T).bfloat16()
    mine, theirs = states(2), states(2)
    for use in range(2):
        x = square * (1 + use)
        for i, (symmetric, recipe) in enumerate(((False, DELAYED.x), (True, DELAYED.g))):
            actual = scores.mask(x, mine[i], recipe, symmetric=symmetric)
            assert_same_bits(actual, ops.bdh_mask(x, theirs[i], recipe.encode(), symmetric))
    assert_same_statistics(mine, theirs)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_what_is_not_finite_is_recorded(value):
    s_pre = torch.randn(1, 5, 2, 8)
    s_pre[0, 1, 0, 3] = value
    cos, sin = rope_angles(5, 8, torch.device("cpu"))
    mine, theirs = states(2), states(2)
    actual = forward.relu_rope(s_pre, cos, sin, *mine, DELAYED.x)
    expected = pairs(ops.bdh_relu_rope(s_pre, cos, sin, *theirs, DELAYED.x.encode()))
    # The interpreter's cast to E4M3 knows no NaN: only the others are compared here, NaN in tests/gpu.
    for a, b in zip(actual, expected, strict=True):
        finite = b.data.float().isfinite()
        assert not finite.all()
        torch.testing.assert_close(a.data.float()[finite], b.data.float()[finite], rtol=0, atol=0)
    assert mine[0][NON_FINITE] == mine[1][NON_FINITE] == 1
    assert_same_statistics(mine, theirs)
