"""A step by the kernel against torchao's own, computed eagerly: the same codes, scales and weights."""

import torch
from torchao.optim import adam

from octavo.kernels import adamw

CLASSES = {"adamw4bit": "AdamW4bit", "adamw8bit": "AdamW8bit", "adamwfp8": "AdamWFp8", "adamw": "_AdamW"}
SHAPES = ((64, 128), (40, 384), (257, 256), (33, 7), (4099,))  # whole programs; parts of one; states that are plain
RATES = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def gradients(shape, device, steps=5):
    """Numbers of all sizes within a block, zeros among them."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-7, 0, shape[-1])
    for _ in range(steps):
        g = torch.randn(shape, generator=generator) * sizes
        yield torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, g).to(device)


def check_steps(name, shape, *, device="cpu", dtype=torch.float32):
    """After each step of both from the same states."""
    from torchao import optim

    torch.manual_seed(0)
    p = torch.randn(shape).to(device, dtype)
    q = p.clone()
    optimizer = getattr(optim, CLASSES[name], None) or getattr(adam, CLASSES[name])
    optimizer = optimizer([torch.nn.Parameter(p)])
    theirs, ours = ([optimizer._new_buffer(p, signed) for signed in (True, False)] for _ in range(2))
    changed = 0.0
    one_step = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    for count, g in enumerate(gradients(shape, device), 1):
        g, before = g.to(dtype), p.clone()
        adam.single_param_adam(
            p, g, torch.tensor(float(count)), *theirs, None, torch.tensor(RATES["lr"]), *RATES["betas"],
            RATES["weight_decay"], RATES["eps"], True, False,
        )  # fmt: skip
        assert adamw.can_step(q, *ours)
        adamw.step(q, g, *ours, count=count, **RATES, stochastic=False)
        # By what the step was; a mean that is small beside its block's largest may be off by a millionth of that.
        torch.testing.assert_close(q - before, p - before, rtol=1e-3, atol=1e-5 + one_step * p.abs().max().item())
        for mine, wanted in zip(ours, theirs, strict=True):
            changed = max(changed, compare_states(mine, wanted, max(one_step, 1e-5)))
        q.copy_(p)
        for mine, wanted in zip(ours, theirs, strict=True):
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
    assert (a - b).abs().max() <= 1
    return (a != b).float().mean().item()
