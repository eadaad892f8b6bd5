"""NVTX ranges: Nsight Systems then shows `octavo.quantize` and the like above the kernels they launch."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def ranged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` inside a range of that name, where its first argument is on a GPU."""

    @wraps(function)
    def inside(first: torch.Tensor, *args: Any) -> Any:
        if not first.is_cuda:
            return function(first, *args)
        torch.cuda.nvtx.range_push(name)
        try:
            return function(first, *args)
        finally:
            torch.cuda.nvtx.range_pop()

    return inside
