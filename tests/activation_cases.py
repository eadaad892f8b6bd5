"""What gated activations are compared with: one entry for each name in `numerics.activation.ACTIVATIONS`."""

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Reference(NamedTuple):
    """An activation by torch, in any precision.

    `amplifies`: the relative error of its result over that of its input, |x · f'(x) / f(x)| where f is large: 1 for a
    function that grows like x, 2 for one that grows like x².
    """

    function: Callable[[Tensor], Tensor]
    amplifies: float = 1.0


REFERENCES = {
    "silu": Reference(F.silu),
    "gelu_tanh": Reference(lambda x: F.gelu(x, approximate="tanh")),
}


def least_cosine(usual: float, activation: str) -> float:
    """The bound on a cosine, from that for an activation that amplifies nothing: 1 − cosine is an error squared."""
    return 1 - (1 - usual) * REFERENCES[activation].amplifies ** 2
