"""AdamW's step in one pass against the same in torch: codes, scales and weights, step by step from the same states."""

import torch

from octavo.kernels import adamw as kernel
from octavo.numerics import adamw as spec

CLASSES = {"adamw4bit": "AdamW4bit", "adamw8bit": "AdamW8bit", "adamwfp8": "AdamWFp8", "adamw": "_AdamW"}
SHAPES = ((64, 128), (40, 384), (65, 256), (33, 7), (4099,))  # whole programs; parts of one; states that are plain
RATES = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def gradients(shape, device, steps=4, decades=7):
    """Numbers of all sizes within a block, zeros among them."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-decades, 0, shape[-1])
    for _ in range(steps):
        g = torch.randn(shape, generator=generator) * sizes
        yield torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, g).to(device)


def new_means(name, p):
    from torchao import optim
    from torchao.optim import adam

    optimizer = (getattr(optim, CLASSES[name], None) or getattr(adam, CLASSES[name]))([torch.nn.Parameter(p)])
    return tuple(spec.with_levels(optimizer._new_buffer(p, signed)) for signed in (True, False))


def check_steps(name, shape, *, device="cpu", dtype=torch.float32, stochastic=False, rates=RATES):
    def by_kernel(q, g, means, count):
        assert kernel.can_step(q, *means)
        kernel.apply(spec.Step(count, **rates, stochastic=stochastic), q, g, *means)

    compare_steps(name, shape, by_kernel, device=device, dtype=dtype, stochastic=stochastic, rates=rates)


def compare_steps(
    name, shape, other, *, device="cpu", dtype=torch.float32, stochastic=False, states=True, rates=RATES, decades=7
):
    torch.manual_seed(0)
    p = torch.randn(shape).to(device, dtype)
    q = p.clone()
    wanted_means, means = new_means(name, p), new_means(name, p)
    one_step = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    changed = 0.0
    for count, g in enumerate(gradients(shape, device, decades=decades), 1):
        g, before = g.to(dtype), p.clone()
        spec.apply(spec.Step(count, **rates, stochastic=stochastic), p, g, *wanted_means)
        other(q, g, means, count)
        # A millionth of p, a thousandth of the step, or one step of the dtype.
        allowed = 1e-5 + max(one_step, 1e-6) * p.abs().float() + 1e-3 * (p - before).abs().float()
        assert ((q - p).abs().float() <= allowed).all()
        if stochastic:
            assert (q != p).float().mean() < 1e-3
        for mine, wanted in zip(means, wanted_means, strict=True) if states else ():
            changed = max(changed, compare_states(mine, wanted, max(one_step, 1e-5)))
        q.copy_(p)
        for mine, wanted in zip(means, wanted_means, strict=True):
            mine.copy_(wanted)
    assert changed < 3e-3, changed  # numbers of BF16 lie right between two levels more often than chance has it


def compare_states(mine, wanted, one_step):
    """The share of codes that differ: by one, where a number lies between two levels."""
    if type(mine) is torch.Tensor:
        torch.testing.assert_close(mine, wanted, rtol=one_step, atol=1e-7)
        return 0.0
    torch.testing.assert_close(mine.scale, wanted.scale, rtol=1e-5, atol=0)
    a, b = (state.codes.view(torch.uint8).int() for state in (mine, wanted))
    if type(mine).__name__ == "OptimState4bit":
        a, b = (torch.stack([codes >> 4, codes & 15]) for codes in (a, b))
    elif type(mine).__name__ == "OptimStateFp8":
        a, b = (torch.where(codes < 128, codes, 128 - codes) for codes in (a, b))  # in order, 0 and −0 the same
    assert (a - b).abs().max() <= 1
    return (a != b).float().mean().item()
