"""AdamW's step in torch: against torchao's own, and where it differs, what that is for."""

import math

import pytest
import torch

pytest.importorskip("torchao")

from optim_cases import CLASSES, RATES, compare_steps, new_means
from torchao.optim.adam import single_param_adam
from torchao.optim.subclass_4bit import OptimState4bit

from octavo.numerics import adamw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CLASSES)
def test_like_torchao(name, dtype):
    """Where no bound is given. Of 4 bits the levels are others, but torchao reads them."""
    rates = RATES | {"betas": (0.9, 0.8)}

    def by_torchao(p, g, means, count):
        order = torch.tensor(rates["lr"]), *rates["betas"], rates["weight_decay"], rates["eps"]
        single_param_adam(p, g, torch.tensor(float(count)), *means, None, *order, True, False)

    states = name != "adamw4bit"
    compare_steps(name, (40, 384), by_torchao, dtype=dtype, states=states, rates=rates, decades=2)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.9), (0.5, 0.9)])
def test_no_gradients_exceed_the_bound(betas):
    """And some reach it: those that fall as the mean of squares forgets, the faster for the mean."""
    steps = 30
    worst = (betas[0] / betas[1]) ** torch.arange(steps - 1, -1, -1, dtype=torch.float64)
    streams = torch.cat([worst[None], torch.randn(500, steps, dtype=torch.float64)])
    mean, square = torch.zeros(2, 501, dtype=torch.float64)
    for count in range(1, steps + 1):
        g = streams[:, count - 1]
        mean, square = mean.lerp(g, 1 - betas[0]), square.lerp(g * g, 1 - betas[1])
        bound = adamw.Step(count, 1.0, betas, 1e-8, 0.0, False).bound
        assert (mean.abs() <= square.sqrt() * bound * (1 + 1e-9)).all()
    if betas[0]:
        torch.testing.assert_close((mean / square.sqrt())[0].item(), bound, rtol=1e-6, atol=0)
    assert adamw.Step(5, 1.0, (0.9, 0.8), 1e-8, 0.0, False).bound == math.inf


@pytest.mark.parametrize("name", ["adamw4bit", "adamw8bit", "adamwfp8"])
def test_rounded_states_move_no_weight_by_more_than_gradients_could(name):
    """Weights that most gradients pass over: their squares round to 0 before their means do."""
    torch.manual_seed(0)
    p = torch.zeros(64, 256)
    means = new_means(name, p)
    exact, exact_means = p.clone(), (torch.zeros_like(p), torch.zeros_like(p))
    rare = torch.rand(64, 256) < 0.7
    step_of = {"lr": 1.0, "betas": (0.9, 0.95), "eps": 1e-12, "weight_decay": 0.0, "stochastic": False}
    for count in range(1, 120):
        g = torch.randn(p.shape)
        g = torch.where(rare & (torch.rand(p.shape) > 0.03), 0.0, g)
        before = p.clone()
        adamw.apply(adamw.Step(count, **step_of), p, g, *means)
        adamw.apply(adamw.Step(count, **step_of), exact, g, *exact_means)
        corrections = (1 - 0.95**count) ** 0.5 / (1 - 0.9**count)
        assert (p - before).abs().max() <= adamw.Step(count, **step_of).bound * corrections * 1.001
    error = (p - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < (1.0 if name == "adamw4bit" else 0.1)


def test_noise_is_even_over_places_and_over_steps():
    g = torch.zeros(256, 256)
    noise = torch.stack([torch.stack(adamw.noise_of(g, count)) for count in range(1, 90)]).flatten(2)
    assert noise.min() >= 0 and noise.max() < 2**16
    kinds = list((noise / 2**16).unbind(1))
    for share in kinds:
        assert abs(share[0].mean() - 0.5) < 5e-3 and abs(share[0].var() - 1 / 12) < 2e-3
        assert torch.corrcoef(torch.stack([share[0, :-1], share[0, 1:]]))[0, 1].abs() < 0.02
        for part in (0.1, 0.5, 0.7):  # at every place: chance alone would have five times that
            assert ((share < part).float().mean(0) - part).abs().max() < 0.045
    for earlier in (kinds[1][:-1], kinds[1][1:]):  # of the mean, in the step before and in the same
        pairs = torch.stack([earlier.flatten(), kinds[2][1:].flatten()])
        assert torch.corrcoef(pairs)[0, 1].abs() < 0.01


def test_weights_in_bf16_move_by_what_they_should():
    p = torch.ones(512, 512, dtype=torch.bfloat16)
    means = torch.zeros_like(p), torch.zeros_like(p)
    for count in range(1, 5):
        decay = RATES | {"weight_decay": 0.05}  # 0.0005 a step: BF16's neighbours of 1 are 0.004 away
        adamw.apply(adamw.Step(count, **decay, stochastic=True), p, torch.zeros_like(p), *means)
    assert set(p.unique().tolist()) <= {0.984375, 0.98828125, 0.9921875, 0.99609375, 1.0}
    assert abs(p.float().mean() - (1 - 5e-4) ** 4) < 1e-4


def test_bf16_weights_with_4_bit_states_move_as_far_as_fp32_ones():
    """What a mean was rounded to moves the weight in the next step, which must not be rounded by the same number."""
    for lr in (1e-3, 1e-4):
        moved = {}
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(0)
            p = torch.ones(128, 128, dtype=dtype)
            means = new_means("adamw4bit", p)
            for count in range(1, 151):
                g = 0.05 * (1 + 0.3 * torch.randn(p.shape, generator=generator))
                g[:, 0] = 1.0
                step = adamw.Step(count, lr, (0.9, 0.95), 1e-8, 0.0, stochastic=True)
                adamw.apply(step, p, g.to(dtype), *means)
            moved[dtype] = (1 - p[:, 1:].float().mean().item()) / lr / 150
        assert abs(moved[torch.bfloat16] / moved[torch.float32] - 1) < 0.02


def new_state(shape, *, signed):
    return adamw.with_levels(OptimState4bit.zeros(shape, signed, 128))


def noise_of_step(values, count):
    return adamw.noise_of(values, count)[0]


def test_squares_of_all_sizes_are_right_on_average_and_can_fall():
    values = torch.logspace(-4, 0, 128).expand(512, 128).contiguous()
    state = new_state(values.shape, signed=False)
    adamw.write_levels(state, values, noise_of_step(values, 1))
    actual = state.dequantize()
    assert (actual / values).log2().abs().max() < 1.001
    torch.testing.assert_close(actual.mean(0), values[0], rtol=0.08, atol=0)
    for count in range(2, 40):  # but for the largest, nothing comes any more
        values = actual * 0.95
        values[:, -1] = 1.0
        adamw.write_levels(state, values, noise_of_step(values, count))
        actual = state.dequantize()
    # Halved as often as on average over chance; but without chance, no few that lag behind make up the average.
    assert 0.4 < actual[:, 64].mean() / (10**-2 * 0.95**38) < 1.2


def test_means_are_right_on_average_and_can_fall():
    values = torch.linspace(-1, 1, 128).expand(4096, 128).contiguous()
    state = new_state(values.shape, signed=True)
    adamw.write_levels(state, values, noise_of_step(values, 1))
    actual = state.dequantize()
    assert (actual - values).abs().max() < 127 / 343 + 1e-6 and (actual * values >= 0).all()
    torch.testing.assert_close(actual.mean(0), values[0], rtol=0, atol=0.01)
    for count in range(2, 12):  # but for the largest, nothing comes any more
        values = actual * 0.9
        values[:, -1] = 1.0
        adamw.write_levels(state, values, noise_of_step(values, count))
        actual = state.dequantize()
    assert 0.6 < actual[:, 96].mean() / ((2 * 96 / 127 - 1) * 0.9**10) < 1.2
    adamw.write_levels(state, torch.zeros_like(values), noise_of_step(values, 1))
    assert not state.dequantize().any()


@pytest.mark.parametrize("signed", [True, False])
def test_a_checkpoint_of_torchao_is_taken(signed):
    """To the nearest: half of what is between two levels, at most."""
    theirs = OptimState4bit.zeros((64, 128), signed, 128)
    theirs.copy_(torch.rand(64, 128) + 0.1 if not signed else torch.randn(64, 128))
    ours = adamw.with_levels(theirs)
    assert ours is not theirs and adamw.with_levels(ours) is ours
    if signed:
        assert (
            (ours.dequantize() - theirs.dequantize()) / theirs.scale.view(64, 1)
        ).abs().max() < 0.5 * 127 / 343 + 1e-6
    else:
        assert (ours.dequantize() / theirs.dequantize()).log2().abs().max() < 0.6
    plain = torch.rand(4)
    assert adamw.with_levels(plain) is plain
