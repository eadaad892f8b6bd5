"""Shapes of results: rows `[M, N]` of a product as `[..., N]`, which code outside may change in place."""

from collections.abc import Sequence

import torch
from torch import Tensor


def with_leading(rows: Tensor, leading: Sequence[int]) -> Tensor:
    """Return rows `[M, N]` as `[..., N]`. No copy, and nothing else may refer to `rows`.

    Not as a view: torch refuses to change a view of what an autograd function has returned (`y += x`, an activation
    with `inplace=True`), and FSDP2 warns of modules that return one. `nn.Linear` does the same. Rows that have their
    shape already go through it, too: a GEMM may have returned a part of a padded tensor, which is a view.
    """
    return torch.ops.aten._unsafe_view.default(rows, [*leading, rows.shape[-1]])
