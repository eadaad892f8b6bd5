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
    """Of 4 bits the means of squares are others, but torchao reads them."""

    def by_torchao(p, g, means, count):
        rates = torch.tensor(RATES["lr"]), *RATES["betas"], RATES["weight_decay"], RATES["eps"]
        single_param_adam(p, g, torch.tensor(float(count)), *means, None, *rates, True, False)

    compare_steps(name, (40, 384), by_torchao, dtype=dtype, squares=name != "adamw4bit")


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


def new_squares(shape):
    return adamw.with_powers(OptimState4bit.zeros(shape, False, 128))


def test_squares_of_all_sizes_are_right_on_average_and_can_fall():
    values = torch.logspace(-4, 0, 128).expand(512, 128).contiguous()
    state = new_squares(values.shape)
    adamw.write_powers(state, values, adamw.noise_of(torch.zeros_like(values), 1) >> 16)
    found = state.dequantize()
    assert (found / values).log2().abs().max() < 1.001
    torch.testing.assert_close(found.mean(0), values[0], rtol=0.08, atol=0)
    for count in range(2, 40):  # but for the largest, nothing comes any more
        values = found * 0.95
        values[:, -1] = 1.0
        adamw.write_powers(state, values, adamw.noise_of(torch.zeros_like(values), count) >> 16)
        found = state.dequantize()
    torch.testing.assert_close(found[:, 64].mean().item(), 10**-2 * 0.95**38, rtol=0.3, atol=0)


def test_a_checkpoint_of_torchao_is_taken():
    """Its squares are sixteenths of the largest, and are what they are to a factor of the root of two."""
    theirs = OptimState4bit.zeros((64, 128), False, 128)
    theirs.copy_(torch.rand(64, 128) + 0.1)
    ours = adamw.with_powers(theirs)
    assert ours is not theirs and adamw.with_powers(ours) is ours
    assert (ours.dequantize() / theirs.dequantize()).log2().abs().max() < 0.6
    plain = torch.rand(4)
    assert adamw.with_powers(plain) is plain
