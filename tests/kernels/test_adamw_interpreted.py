"""AdamW's step in one pass, interpreted, against the one in torch."""

import pytest
import torch

pytest.importorskip("torchao")

from optim_cases import CLASSES, RATES, SHAPES, check_steps, new_means

from octavo.kernels import adamw
from octavo.numerics import adamw as spec
from octavo.numerics import split
from octavo.numerics.adamw import Step, with_levels


@pytest.mark.matrix
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_as_in_torch(name, shape):
    check_steps(name, shape)


@pytest.mark.parametrize("changed", [{"eps": 0.1}, {"betas": (0.5, 0.9)}, {"weight_decay": 5.0}, {"lr": 0.1}], ids=str)
def test_every_setting_counts(changed):
    check_steps("adamw8bit", (40, 384), rates=RATES | changed)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_weights_in_bf16(name, stochastic):
    check_steps(name, (40, 384), dtype=torch.bfloat16, stochastic=stochastic)


def test_every_code_is_read_and_found_again():
    """A step of nothing: states stay what they are, level by level."""
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit

    assert adamw.has_known_levels()
    still = {"lr": 0.0, "betas": (1 - 1e-9, 1 - 4e-9), "eps": 1.0, "weight_decay": 0.0}  # in FP32 1 and 1; no bound
    for kind, block in ((OptimState8bit, 256), (OptimState4bit, 128)):
        means = [with_levels(kind.zeros((32, 256), signed, block)) for signed in (True, False)]
        for state in means:
            codes = torch.arange(256, dtype=torch.uint8).repeat(32)[: state.codes.numel()].view_as(state.codes)
            if kind is OptimState4bit and state.signed:  # 14 and 15 are both 1
                codes = (codes >> 4).clamp(max=14) << 4 | (codes & 15).clamp(max=14)
            state.codes.copy_(codes)
            state.scale.fill_(1.0)
        wanted = [state.codes.clone() for state in means]
        p, g = torch.zeros(32, 256), torch.zeros(32, 256)
        adamw.apply(Step(10, **still, stochastic=False), p, g, *means)
        for state, codes in zip(means, wanted, strict=True):
            complete = (state.scale == 1).repeat_interleave(codes.numel() // len(state.scale)).view_as(codes)
            assert complete.float().mean() >= 0.5 and torch.equal(state.codes[complete], codes[complete])


def test_what_is_not_a_number_stays_so():
    p = torch.full((64, 256), 1.0, dtype=torch.bfloat16)
    p[0, 0], p[0, 1], p[0, 2] = float("nan"), float("inf"), 0.0
    means = torch.zeros_like(p), torch.zeros_like(p)
    adamw.apply(Step(1, **RATES, stochastic=True), p, torch.zeros_like(p), *means)
    assert p[0, 0].isnan() and p[0, 1].isinf() and p[0, 2] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e20])
@pytest.mark.parametrize("name", ["adamw4bit", "adamw8bit", "adamwfp8"])
def test_a_gradient_that_is_not_finite_spoils_its_weight_alone(name, bad):
    """Nor does one whose square is not."""
    for apply in (adamw.apply, spec.apply):
        p, means = torch.ones(32, 256), new_means(name, torch.ones(32, 256))
        for count in range(1, 4):
            g = torch.full((32, 256), 0.5)
            g[0, 0] = bad if count == 1 else 0.5
            apply(Step(count, **RATES, stochastic=False), p, g, *means)
        assert p[0, 0].isfinite() == (bad == 1e20)
        assert p.flatten()[1:].isfinite().all() and p.flatten()[1:].max() < 1


def test_states_that_do_not_fit_are_not_stepped():
    """As from a checkpoint with another vocabulary: the kernel would read and write beyond them."""
    small, large = torch.zeros(32, 128), torch.zeros(64, 128)
    for name in CLASSES:
        means, others = new_means(name, small), new_means(name, large)
        assert adamw.can_step(small, *means)
        assert not adamw.can_step(large, *means)
        assert not adamw.can_step(small, means[0], others[1])
    from torchao.optim.subclass_4bit import OptimState4bit

    odd = [OptimState4bit.zeros((32, 192), signed, 96) for signed in (True, False)]
    assert not adamw.can_step(torch.zeros(32, 192), *odd)


@pytest.mark.parametrize("shape", [(40, 384), (33, 5)], ids=str)
def test_a_master_in_halves_is_stepped_as_one_in_fp32(shape):
    master = torch.randn(shape)
    high, low = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(2))
    split.split(master, high, low)
    mine, theirs = ([torch.zeros(shape), torch.zeros(shape)] for _ in range(2))
    for count in range(1, 4):
        g = torch.randn(shape).bfloat16()
        step = Step(count, **RATES | {"lr": 1e-5}, stochastic=False)
        assert adamw.can_step(high, *mine)
        adamw.apply(step, high, g, *mine, low=low)
        spec.apply(step, master, g.float(), *theirs)
        torch.testing.assert_close(split.join(high, low), master, rtol=3e-7, atol=1e-9)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)  # a step of FP32 at 1, where sums cancel


@pytest.mark.parametrize("name", ["adamw4bit", "adamw"])
def test_a_shard_is_rounded_by_its_place_in_the_whole(name):
    """Halves of a parameter, each with the index of its first element, get the bits of the whole."""
    torch.manual_seed(0)
    p, g = torch.randn(64, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    means, halves = new_means(name, p), [part.clone() for part in p.chunk(2)]
    means_of_halves = [new_means(name, part) for part in halves]
    for count in (1, 2):
        step = Step(count, **RATES, stochastic=True)
        adamw.apply(step, p, g, *means)
        for i, (part, states) in enumerate(zip(halves, means_of_halves, strict=True)):
            adamw.apply(step, part, g.chunk(2)[i], *states, first=i * part.numel())
    assert torch.equal(torch.cat(halves), p)
    for whole, *parts in zip(means, *means_of_halves, strict=True):
        codes = [getattr(state, "codes", state) for state in (whole, *parts)]
        assert torch.equal(torch.cat(codes[1:]), codes[0])


@pytest.mark.parametrize("first", [2**31 - 7, 2**32 + 2**31 + 5])
def test_places_beyond_32_bits_are_those_of_the_specification(first):
    p = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    rounded = []
    for apply in (adamw.apply, spec.apply):
        mine, means = p.clone(), (torch.zeros_like(p), torch.zeros_like(p))
        apply(Step(3, **RATES, stochastic=True), mine, torch.zeros_like(p), *means, first=first)
        rounded.append(mine)
    assert torch.equal(*rounded)
