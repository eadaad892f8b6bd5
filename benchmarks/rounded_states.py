"""Effect of rounding an optimiser's states on the updates of weights, some of which get gradients rarely.

    pip install 'octavo[optim]'
    python benchmarks/rounded_states.py          # on a CPU, two minutes

No model: gradients are drawn. A third of the weights has one in every step, a third in three of ten, a third in three
of a hundred; their sizes are e^(spread · N(0, 1)), neighbours in a block being as unlike as strangers. The same
gradients go to AdamW with exact states. Printed, over 250 steps after the first 50, with the bound of
`octavo/numerics/adamw.py` and without it: the difference of a step's moves from the exact ones, over the size of these
(root mean squares); the largest move, in learning rates; and, where gradients have a mean as large as their noise and
reach all weights in every step, how far these come of what they should.
"""

import argparse
import math
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

from octavo.numerics.adamw import Step, apply, with_levels

OPTIMIZERS = {"adamw4bit": AdamW4bit, "adamw8bit": AdamW8bit, "adamwfp8": AdamWFp8}
SHAPE, STEPS, FIRST = (512, 256), 300, 50


class Unbounded(Step):
    bound = math.inf


def simulate(name: str, kind: type[Step], spread: float, beta: float, *, steady: bool = False) -> tuple[float, ...]:
    """Return the relative error of the updates, the largest, and their sum over that of the exact ones."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp(spread * torch.randn(SHAPE, generator=generator))
    shares = torch.tensor([1.0, 0.3, 0.03])[torch.randint(3, SHAPE, generator=generator)]
    optimizer = OPTIMIZERS[name]([torch.nn.Parameter(torch.zeros(SHAPE))])
    means = [with_levels(optimizer._new_buffer(torch.zeros(SHAPE), signed)) for signed in (True, False)]
    exact = [torch.zeros(SHAPE), torch.zeros(SHAPE)]
    error = size = largest = 0.0
    sums = [0.0, 0.0]
    for count in range(1, STEPS + 1):
        g = sizes * (torch.randn(SHAPE, generator=generator) + steady)
        if not steady:
            g = torch.where(torch.rand(SHAPE, generator=generator) < shares, g, 0.0)
        moves = []
        for states, how in ((means, kind), (exact, Step)):
            p = torch.zeros(SHAPE)
            apply(how(count, 1.0, (0.9, beta), 1e-8, 0.0, False), p, g, *states)
            moves.append(p)
        if count > FIRST:
            error += (moves[0] - moves[1]).square().sum().item()
            size += moves[1].square().sum().item()
            largest = max(largest, moves[0].abs().max().item())
            sums = [total + move.sum().item() for total, move in zip(sums, moves, strict=True)]
    return math.sqrt(error / size), largest, sums[0] / sums[1]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beta", type=float, default=0.95, help="of the mean of squares (default: 0.95)")
    options = parser.parse_args(arguments)
    table = Table("states", "spread", "error", "largest", "steady", "no bound: error", "largest", "steady")
    for name in OPTIMIZERS:
        for spread in (0.0, 1.0, 2.0):
            numbers = []
            for kind in (Step, Unbounded):
                numbers += simulate(name, kind, spread, options.beta)[:2]
                numbers += simulate(name, kind, spread, options.beta, steady=True)[2:]
            table.add_row(name, f"{spread:.0f}", *(f"{number:,.3g}" for number in numbers))
    Console().print(table)


if __name__ == "__main__":
    main()
