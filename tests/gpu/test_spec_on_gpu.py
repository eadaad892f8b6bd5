"""The specification gives the same bits on the GPU as on the CPU."""

import pytest
import torch

from octavo.numerics import FP8ScalingManager, compute_scale, quantize
from octavo.numerics.amax import percentile_amax
from octavo.numerics.operand import quantize_operand
from octavo.numerics.quantize import GRANULARITIES
from octavo.numerics.scaling import SLOTS

FORMATS = ("E4M3", "E5M2", "E4M3_FNUZ", "E5M2_FNUZ")


def awkward(dtype=torch.float32):
    x = torch.randn(3, 130, 270) * torch.exp(4 * torch.randn(3, 130, 270))
    x[0, :5] = 0
    x[0, 5, 7], x[1, 0, 0], x[2, 3, 3] = float("nan"), float("inf"), 1e-30
    return x.to(dtype)


def assert_same_bits(cpu, gpu):
    """But for the sign of a NaN, which means nothing."""
    gpu = gpu.cpu()
    nan = cpu.float().isnan()
    assert torch.equal(nan, gpu.float().isnan())
    assert torch.equal(cpu.view(torch.uint8)[~nan], gpu.view(torch.uint8)[~nan])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", FORMATS)
def test_quantize(format, granularity, dtype):
    x = awkward(dtype)
    for view in (lambda t: t, lambda t: t.mT):
        cpu = quantize(view(x), format=format, granularity=granularity)
        gpu = quantize(view(x.cuda()), format=format, granularity=granularity)
        assert_same_bits(cpu.data, gpu.data)
        assert torch.equal(cpu.scale.float(), gpu.scale.cpu().float())


@pytest.mark.parametrize("recipe", ["delayed", "current", "channel", "block", "mx"])
@pytest.mark.parametrize("layout", ["rows", "columns", "both"])
def test_operand(recipe, layout):
    from octavo import FP8TrainingConfig

    operand = FP8TrainingConfig.from_recipe(recipe).recipe.w
    x = awkward(torch.bfloat16)
    states = torch.zeros(SLOTS), torch.zeros(SLOTS, device="cuda")
    pairs = zip((x, x.cuda()), states, strict=True)
    actual = [quantize_operand(t, state, operand, layout=layout) for t, state in pairs]
    for cpu, gpu in zip(*actual, strict=True):
        assert_same_bits(cpu.data, gpu.data)
    torch.testing.assert_close(states[1].cpu(), states[0], rtol=1e-6, atol=0)


def test_percentile_of_a_large_tensor():
    x = torch.randn(1 << 25, device="cuda")
    assert percentile_amax(x, 99.9).item() == pytest.approx(3.2905, rel=2**-7)


def test_scaling_manager_has_its_state_on_the_device():
    manager = FP8ScalingManager(history_len=4, device="cuda")
    for amax in (1.0, 3.0, 2.0):
        manager.update_amax("a", torch.tensor(amax, device="cuda"))
    assert manager.states[0].is_cuda and manager.get_scale("a").item() == pytest.approx(448 / 6)
    other = FP8ScalingManager(history_len=4)
    other.load_state_dict(manager.state_dict())
    assert other.get_scale("a").item() == pytest.approx(448 / 6)


def test_stochastic_rounding_is_unbiased():
    x = torch.rand(1 << 20, device="cuda") + 0.5
    scale = compute_scale(x)
    mean = torch.stack([quantize(x, rounding="stochastic", scale=scale).dequantize() for _ in range(64)]).mean(0)
    # Per element the error is below 2^-3 of the value; the mean over 64 × 2^20 draws is below 2^-3 / √(2^26) · 5.
    assert ((mean - x) / x).mean().abs() < 5 * 2**-3 / (1 << 26) ** 0.5
