"""AdamW's step in torch: against torchao's own, and where it differs, what that is for."""

import pytest
import torch

pytest.importorskip("torchao")

from optim_cases import CLASSES, RATES, compare_steps
from torchao.optim.adam import single_param_adam
from torchao.optim.subclass_4bit import OptimState4bit

from octavo.numerics import adamw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CLASSES)
def test_like_torchao(name, dtype):
    """Of 4 bits the levels are others, but torchao reads them."""

    def by_torchao(p, g, means, count):
        rates = torch.tensor(RATES["lr"]), *RATES["betas"], RATES["weight_decay"], RATES["eps"]
        single_param_adam(p, g, torch.tensor(float(count)), *means, None, *rates, True, False)

    compare_steps(name, (40, 384), by_torchao, dtype=dtype, states=name != "adamw4bit")


def test_noise_is_even_and_new_in_every_step():
    g = torch.zeros(512, 512)  # as for weights that nothing reaches
    noise = torch.stack([adamw.noise_of(g, count) for count in (1, 2, 3)])
    for bits in (noise & 0xFFFF, noise >> 16):
        share = bits.float() / 2**16
        assert abs(share.mean() - 0.5) < 2e-3 and abs(share.var() - 1 / 12) < 2e-3
        assert torch.corrcoef(share.flatten(1)).triu(1).abs().max() < 0.01
        neighbours = torch.stack([share[0, :, :-1].flatten(), share[0, :, 1:].flatten()])
        assert torch.corrcoef(neighbours)[0, 1].abs() < 0.01
        halves = torch.stack([(noise[0] & 0xFFFF).float().flatten(), (noise[0] >> 16).float().flatten()])
        assert torch.corrcoef(halves)[0, 1].abs() < 0.01


def test_weights_in_bf16_move_by_what_they_should():
    p = torch.ones(512, 512, dtype=torch.bfloat16)
    means = torch.zeros_like(p), torch.zeros_like(p)
    for count in range(1, 5):
        decay = RATES | {"weight_decay": 0.05}  # 0.0005 a step: BF16's neighbours of 1 are 0.004 away
        adamw.apply(adamw.Step(count, **decay, stochastic=True), p, torch.zeros_like(p), *means)
    assert set(p.unique().tolist()) <= {0.984375, 0.98828125, 0.9921875, 0.99609375, 1.0}
    assert abs(p.float().mean() - (1 - 5e-4) ** 4) < 1e-4


def new_state(shape, *, signed):
    return adamw.with_levels(OptimState4bit.zeros(shape, signed, 128))


def noise_of_step(values, count):
    return adamw.noise_of(torch.zeros_like(values), count) >> 16


def test_squares_of_all_sizes_are_right_on_average_and_can_fall():
    values = torch.logspace(-4, 0, 128).expand(512, 128).contiguous()
    state = new_state(values.shape, signed=False)
    adamw.write_levels(state, values, noise_of_step(values, 1))
    found = state.dequantize()
    assert (found / values).log2().abs().max() < 1.001
    torch.testing.assert_close(found.mean(0), values[0], rtol=0.08, atol=0)
    for count in range(2, 40):  # but for the largest, nothing comes any more
        values = found * 0.95
        values[:, -1] = 1.0
        adamw.write_levels(state, values, noise_of_step(values, count))
        found = state.dequantize()
    torch.testing.assert_close(found[:, 64].mean().item(), 10**-2 * 0.95**38, rtol=0.3, atol=0)


def test_means_are_right_on_average_and_can_fall():
    values = torch.linspace(-1, 1, 128).expand(4096, 128).contiguous()
    state = new_state(values.shape, signed=True)
    adamw.write_levels(state, values, noise_of_step(values, 1))
    found = state.dequantize()
    assert (found - values).abs().max() < 13 / 49 + 1e-6 and (found * values >= 0).all()
    torch.testing.assert_close(found.mean(0), values[0], rtol=0, atol=0.01)
    for count in range(2, 12):  # but for the largest, nothing comes any more
        values = found * 0.9
        values[:, -1] = 1.0
        adamw.write_levels(state, values, noise_of_step(values, count))
        found = state.dequantize()
    torch.testing.assert_close(found[:, 96].mean().item(), (2 * 96 / 127 - 1) * 0.9**10, rtol=0.1, atol=0)
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
        assert ((ours.dequantize() - theirs.dequantize()) / theirs.scale.view(64, 1)).abs().max() < 0.5 * 13 / 49 + 1e-6
    else:
        assert (ours.dequantize() / theirs.dequantize()).log2().abs().max() < 0.6
    plain = torch.rand(4)
    assert adamw.with_levels(plain) is plain
