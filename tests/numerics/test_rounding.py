"""Rounding to nearest and stochastically: on the grid, to a neighbour, without bias, saturating."""

import math

import numpy as np
import pytest
import torch
from numpy_fp8 import NAMES, codes, decode, grid, largest, same
from numpy_fp8 import round_nearest as numpy_round_nearest

from octavo.numerics import get_format, quantize, quantize_stochastic
from octavo.numerics.rounding import ROUNDINGS, round_nearest, round_stochastic, round_stochastic_bf16

by_format = pytest.mark.parametrize("name", NAMES)
DRAWS = 100_000


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def probes(name):
    """Values between grid points: below the smallest subnormal, subnormal, normal, in the last step before the max."""
    points = grid(name)[grid(name) >= 0]
    gaps = [0, 1, 2, 5, len(points) // 2, len(points) - 3, len(points) - 2]
    values = [points[i] + part * (points[i + 1] - points[i]) for i in gaps for part in (0.03125, 0.3125, 0.75)]
    return np.array(values + [-v for v in values], np.float32)


def worst_bias(round, name):
    """The largest |mean − v| over the probes, in standard deviations of that mean."""
    values = probes(name)
    points = grid(name)
    above = np.searchsorted(points, values, side="right")
    low, high = points[above - 1], points[above]
    part = (values - low) / (high - low)
    sigma = (high - low) * np.sqrt(part * (1 - part) / DRAWS)
    drawn = round(torch.from_numpy(values).expand(DRAWS, -1).clone(), get_format(name))
    return float((np.abs(drawn.double().mean(0).numpy() - values) / sigma).max())


@by_format
def test_stochastic_rounding_is_unbiased(name):
    # 42 means of DRAWS draws each: that one lies beyond 5 standard deviations has probability 42 · 6e-7 < 3e-5.
    assert worst_bias(lambda v, format: round_stochastic(v, format, generator()), name) < 5


def test_the_bias_test_catches_rounding_to_nearest_and_a_slightly_loaded_die():
    assert worst_bias(round_nearest, "E4M3") > 5

    def loaded(v, format):
        return round_stochastic(v + 0.02 * format.smallest_subnormal, format, generator())

    assert worst_bias(loaded, "E4M3") > 5


@by_format
def test_stochastic_rounding_picks_one_of_the_two_neighbours(name):
    spread = 2.0 ** torch.empty(200_000).uniform_(-20, math.log2(largest(name)), generator=generator(1))
    v = spread * torch.randn(200_000, generator=generator(2)).sign()
    actual = decode(round_stochastic(v.clone(), get_format(name), generator()))
    points, exact = grid(name), v.double().numpy()
    low = points[np.searchsorted(points, exact, side="right") - 1]
    high = points[np.searchsorted(points, exact, side="left")]
    assert ((actual == low) | (actual == high)).all()
    assert (actual == low).any() and (actual == high).any()


@by_format
def test_values_on_the_grid_never_move(name):
    points = torch.from_numpy(grid(name)).float()
    for seed in range(20):
        actual = round_stochastic(points.clone(), get_format(name), generator(seed))
        np.testing.assert_array_equal(decode(actual), grid(name))


@by_format
def test_the_ends_of_the_noise(name, monkeypatch):
    """With the least noise every value between two grid points goes up, with the most down; those on the grid stay."""
    points = grid(name)
    v = torch.from_numpy(np.concatenate([points, (points[1:] + points[:-1]) / 2])).float()
    for noise, between in ((0.0, points[1:]), (1 - 2.0**-24, points[:-1])):
        monkeypatch.setattr(torch, "rand", lambda shape, noise=noise, **_: torch.full(shape, noise))
        actual = decode(round_stochastic(v.clone(), get_format(name)))
        np.testing.assert_array_equal(actual, np.concatenate([points, between]))


@by_format
def test_both_roundings_saturate_and_turn_non_finite_into_nan(name):
    top = float(largest(name))
    v = torch.tensor([top * 1.01, -top * 1.01, top * 1e6, -3e38, 3e38, math.inf, -math.inf, math.nan, 1.0])
    expected = np.array([top, -top, top, -top, top, np.nan, np.nan, np.nan, 1.0])
    for round in (round_nearest, round_stochastic):
        np.testing.assert_array_equal(decode(round(v.clone(), get_format(name))), expected)
        # One non-finite value alone, wherever it lies, and finite values whose range overflows FP32.
        for bad in (math.inf, -math.inf, math.nan):
            assert np.isnan(decode(round(torch.tensor([bad]), get_format(name)))).all()
        np.testing.assert_array_equal(decode(round(torch.tensor([-3e38, 3e38]), get_format(name))), [-top, top])


@by_format
def test_the_last_step_before_the_maximum_reaches_it_and_never_passes(name):
    points = grid(name)
    v = torch.full((4096,), float((points[-1] + points[-2]) / 2))
    assert set(decode(round_stochastic(v, get_format(name), generator()))) == {points[-2], points[-1]}


def test_stochastic_rounding_is_reproducible_from_its_generator():
    x = torch.randn(64, 64, generator=generator(3))
    a, b, c = (quantize_stochastic(x, generator=generator(seed)) for seed in (7, 7, 8))
    assert np.array_equal(codes(a.data), codes(b.data))
    assert not np.array_equal(codes(a.data), codes(c.data))
    d = quantize(x, rounding="stochastic", generator=generator(7))
    assert np.array_equal(codes(a.data), codes(d.data)) and torch.equal(a.scale, d.scale)
    nearest = quantize(x)
    assert torch.equal(a.scale, nearest.scale)


def test_a_generator_advances_so_that_two_draws_differ():
    x, g = torch.randn(64, 64, generator=generator(3)), generator(7)
    assert not np.array_equal(
        codes(quantize_stochastic(x, generator=g).data), codes(quantize_stochastic(x, generator=g).data)
    )


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block", "mx"])
def test_stochastic_quantising_lands_next_to_the_scaled_value(granularity):
    x = torch.randn(5, 150, generator=generator(4))
    q = quantize_stochastic(x, granularity=granularity, generator=generator(5))
    low = quantize(x, granularity=granularity)
    assert torch.equal(q.scale.float(), low.scale.float())
    # A neighbour is at most one step away: 2^-3 relative for normals, one subnormal step otherwise.
    scale = float(q.scale.float().max())
    bound = np.maximum(np.abs(decode(x)) * 2.0**-3, 2.0**-9 * scale) * (1 + 2.0**-20)
    assert (np.abs(decode(q.dequantize()) - decode(x)) <= bound).all()


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_quantising_leaves_its_input_alone(rounding):
    x = torch.tensor([1.0, 1e6, -1e6, 0.1])
    before = x.clone()
    quantize(x, scale=1.0, rounding=rounding)
    assert torch.equal(x, before)


def test_rounding_takes_any_strides():
    v = torch.randn(33, 17, generator=generator(6)).mT
    assert same(
        round_nearest(v.clone(memory_format=torch.preserve_format), get_format("E4M3")),
        numpy_round_nearest(v.numpy(), "E4M3"),
    )
    again = round_stochastic(v.clone(memory_format=torch.preserve_format), get_format("E4M3"), generator())
    assert again.shape == v.shape


def test_an_unknown_rounding_is_refused():
    with pytest.raises(ValueError, match="rounding='up': choose one of nearest, stochastic"):
        quantize(torch.ones(3), rounding="up")


@pytest.mark.parametrize("value", [1 + 2**-9, -3.1415927, 1e-40, 2.0**-126 * 1.003, 3e38])
def test_stochastic_rounding_to_bf16(value):
    """One of the two neighbours, and the value on average: N draws of a fair die are off by step / (2 √N)."""
    n = 2**16
    v = torch.full((n,), value)
    actual = round_stochastic_bf16(v, torch.Generator().manual_seed(0)).double()
    bits = v[:1].view(torch.int32) & -(2**16)
    ends = torch.stack([bits, bits + 2**16]).view(torch.float32).double()
    assert set(actual.tolist()) <= set(ends.flatten().tolist())
    assert abs(actual.mean() - v[0].double()) < 5 * (ends[1] - ends[0]).abs() / 2 / n**0.5


def test_stochastic_rounding_to_bf16_leaves_alone_what_fits():
    v = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    v[:4] = torch.tensor([math.inf, -math.inf, 0.0, -0.0])
    assert torch.equal(round_stochastic_bf16(v), v.bfloat16())
    nan = torch.tensor([0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert round_stochastic_bf16(nan).isnan().all()
