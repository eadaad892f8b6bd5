"""AdamW's step in one pass, interpreted, against torchao's own."""

import pytest
import torch

pytest.importorskip("torchao")

from octavo.kernels import adamw
from octavo.optim import OPTIMIZERS
from octavo.optim.one_pass import in_one_pass
from tests.optim_cases import CLASSES, RATES, SHAPES, check_steps


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_like_torchao(name, shape):
    check_steps(name, shape)


@pytest.mark.parametrize("name", CLASSES)
def test_weights_in_bf16(name):
    check_steps(name, (40, 384), dtype=torch.bfloat16)


def test_every_8_bit_code_is_read_and_found_again():
    """A step of nothing: the state stays what it is, level by level."""
    from torchao.optim.subclass_8bit import OptimState8bit

    assert adamw.has_known_levels()
    mean, square = (OptimState8bit.zeros((16, 256), signed, 256) for signed in (True, False))
    for state in (mean, square):
        state.codes.copy_(torch.arange(256, dtype=torch.uint8).expand(16, 256))
        state.scale.fill_(1.0)
    p, g = torch.zeros(16, 256), torch.zeros(16, 256)
    still = {"lr": 0.0, "betas": (1 - 1e-9, 1 - 1e-9), "eps": 1.0, "weight_decay": 0.0}  # in FP32 1 and 1
    adamw.step(p, g, mean, square, count=10, **still, stochastic=False)
    for state in (mean, square):
        assert torch.equal(state.codes, torch.arange(256, dtype=torch.uint8).expand(16, 256))


def test_stochastic_rounding():
    """Up or down by chance, on average right; what is not a number stays so."""
    p = torch.full((64, 256), 1.0, dtype=torch.bfloat16)
    p[0, 0], p[0, 1], p[0, 2] = float("nan"), float("inf"), 0.0
    mean, square = torch.zeros_like(p), torch.zeros_like(p)
    torch.manual_seed(0)
    adamw.step(p, torch.zeros_like(p), mean, square, count=1, **RATES | {"weight_decay": 0.05}, stochastic=True)
    assert p[0, 0].isnan() and p[0, 1].isinf() and p[0, 2] == 0
    rest = p[1:].float()
    assert set(rest.unique().tolist()) == {0.99609375, 1.0}  # BF16's neighbours of 0.9995
    assert abs(rest.mean() - (1 - 1e-2 * 0.05)) < 5e-5
    assert not torch.equal(rest[0], rest[1])


@pytest.mark.parametrize("name", OPTIMIZERS[1:])
def test_a_whole_step_with_what_has_no_kernel(name, monkeypatch):
    """Two groups, one parameter without a gradient, one that is not contiguous and left to torchao."""
    from torchao import optim

    def parameters():
        torch.manual_seed(0)
        weights = [torch.randn(64, 128), torch.randn(64, 128), torch.randn(128, 64).T, torch.randn(7)]
        weights = [torch.nn.Parameter(w) for w in weights]
        for i in (0, 2, 3):
            weights[i].grad = torch.randn(weights[i].shape)
        return weights

    expected = parameters()
    groups = [{"params": expected[:2]}, {"params": expected[2:], "lr": 1e-3, "weight_decay": 0.0}]
    reference = getattr(optim, CLASSES[name])(groups, lr=1e-2)
    with torch.compiler.set_stance("force_eager"):
        reference.step()
    found = parameters()
    groups = [{"params": found[:2]}, {"params": found[2:], "lr": 1e-3, "weight_decay": 0.0}]
    optimizer = in_one_pass(getattr(optim, CLASSES[name]))(groups, lr=1e-2)
    stepped = []
    step = adamw.step

    def noted(p, *args, **more):
        stepped.append(p)
        step(p, *args, **more)

    monkeypatch.setattr(adamw, "step", noted)
    with torch.compiler.set_stance("force_eager"):
        assert optimizer.step(lambda: 3.0) == 3.0
    assert [id(p) for p in stepped] == [id(found[0]), id(found[3])]
    for p, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(p, wanted, rtol=1e-5, atol=1e-6)
    assert len(optimizer.state) == 3 and len(optimizer.param_groups) == 2
