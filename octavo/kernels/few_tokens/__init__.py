"""Products of few tokens by a frozen FP8 weight, whose bytes are read once: the kernels of `numerics.few_tokens`.

A product of some 64 tokens takes as long as its weight takes to be read, if enough of it is asked for at a time. So
there are as many programs as the GPU holds, and where a weight has too few rows for that, each program has a part of
its columns (`parts_of`). They add the parts up, always in the same order, with what comes beside the product: adapters,
bias, residual, or the activation of a gated MLP.

    linear       lay out x; products
    gated MLP    lay out x; products of gate and up, to h, laid out; products of down

Launches overlap: one begins while the last programs of the one before are at work, and asks for its first weights
before it waits. `kernels.py` has the kernels.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.few_tokens import halves, sides, words
from octavo.kernels.few_tokens.sides import DOWN, GATED, MOST_ADAPTERS, PRODUCT, Side, matrices_of, norm_key, places_of
from octavo.kernels.launch import LaunchCache, Launches
from octavo.kernels.launch import kind as kind_of
from octavo.kernels.tuning import may_overlap
from octavo.numerics.few_tokens import MOST_TOKENS, Low
from octavo.numerics.norm import Norm
from octavo.numerics.quantize import BLOCK, Quantized

LARGEST_RANK = 128
WIDEST = 32_768  # columns of x, a row of which is in one program
DTYPES = (torch.bfloat16, torch.float16)
ALIGNMENT = 16  # bytes that a thread reads at a time
_LAUNCHES = LaunchCache()


def can_multiply(x: Tensor, weight: Quantized, adapters: Sequence[Low], norm: Norm | None = None) -> bool:
    """Whether the kernels take this product: 16 bits, rows of whole 16 bytes, scales as frozen weights have them."""
    data, scale = weight
    rows, k = data.shape
    shapes = ((), (rows, 1), (-(-rows // BLOCK), -(-k // BLOCK)))
    return (
        x.dtype in DTYPES
        and 0 < x.shape[0] <= MOST_TOKENS
        and data.dtype in words.FORMATS
        and k % ALIGNMENT == 0
        and k <= WIDEST
        and data.is_contiguous()
        and data.data_ptr() % ALIGNMENT == 0
        and scale.dtype == torch.float32
        and scale.is_contiguous()
        and tuple(scale.shape) in shapes
        and len(adapters) <= MOST_ADAPTERS
        and all(0 < low.down.shape[0] <= LARGEST_RANK for low in adapters)
        and len({matrix.dtype for low in adapters for matrix in (low.down, low.up)}) <= 1
        and (norm is None or norm.weight.dtype == x.dtype)
    )


def can_gate(x: Tensor, gate_up: Quantized, down: Quantized, *adapters: Sequence[Low], norm: Norm | None) -> bool:
    """Whether they take a gated MLP: both of its products, with the adapters of each. Blocks are of gate, or of up."""
    features = down.data.shape[1]
    h = x.new_empty([x.shape[0], 0])
    return (
        gate_up.data.shape[0] == 2 * features
        and (features % BLOCK == 0 or gate_up.scale.shape in ((), (2 * features, 1)))
        and can_multiply(x, gate_up, adapters[0], norm)
        and can_multiply(h, down, adapters[1])
    )


def linear(
    x: Tensor,
    weight: Quantized,
    adapters: Sequence[Low] = (),
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """The kernels of `numerics.few_tokens.linear`."""
    launches, given = linear_launches(x, weight, adapters, bias, residual, norm)
    return launches.run(*given)[0]


def linear_launches(
    x: Tensor,
    weight: Quantized,
    adapters: Sequence[Low],
    bias: Tensor | None,
    residual: Tensor | None,
    norm: Norm | None,
) -> tuple[Launches, list[Tensor]]:
    """The launches of `linear`, and the tensors that they take."""
    way: Any = halves if halves.takes(x, weight) else words
    matrices = matrices_of(adapters)
    beside = sides.some(bias, residual, sides.weight_of(norm))
    given = [x.contiguous(), way.given(weight.data), weight.scale, *matrices, *beside]
    key = (
        "linear",
        places_of(adapters),
        bias is None,
        residual is None,
        norm_key(norm),
        weight.data.dtype,
        kind_of(*given),
    )
    launches = _LAUNCHES.get(key)
    if launches is None:
        launches = _new_launches(x, len(given))
        side = Side(weight, 1, 2, adapters, 3)
        rest = iter(range(3 + len(matrices), len(given)))
        bias_at, residual_at, norm_at = (None if each is None else next(rest) for each in (bias, residual, norm))
        laid_out, counters = way.add_lay_out(
            launches, x, norm, norm_at, way.counters_of(x, side, PRODUCT), side, PRODUCT
        )
        y, *_ = way.add_products(
            launches, x, laid_out, (counters, 0), side, PRODUCT, bias_at=bias_at, residual_at=residual_at
        )
        launches.results = (y,)
        _LAUNCHES.add(key, launches)
    return launches, given


def gated_mlp(
    x: Tensor,
    gate_up: Quantized,
    down: Quantized,
    activation: str,
    adapters: Sequence[Low] = (),
    adapters_down: Sequence[Low] = (),
    *,
    residual: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """The kernels of `numerics.few_tokens.gated_mlp`."""
    launches, given = mlp_launches(x, gate_up, down, activation, adapters, adapters_down, residual, norm)
    return launches.run(*given)[0]


def mlp_launches(
    x: Tensor,
    gate_up: Quantized,
    down: Quantized,
    activation: str,
    adapters: Sequence[Low],
    adapters_down: Sequence[Low],
    residual: Tensor | None,
    norm: Norm | None,
) -> tuple[Launches, list[Tensor]]:
    """The launches of `gated_mlp`, and the tensors that they take."""
    way: Any = halves if halves.takes(x, gate_up, down) else words
    matrices, of_down = matrices_of(adapters), matrices_of(adapters_down)
    weights = [way.given(gate_up.data), gate_up.scale, way.given(down.data), down.scale]
    given = [x.contiguous(), *weights, *matrices, *of_down, *sides.some(residual, sides.weight_of(norm))]
    how = (activation, places_of(adapters), places_of(adapters_down), residual is None, norm_key(norm))
    key = ("mlp", *how, gate_up.data.dtype, down.data.dtype, kind_of(*given))
    launches = _LAUNCHES.get(key)
    if launches is None:
        launches = _new_launches(x, len(given))
        first = Side(gate_up, 1, 2, adapters, 5)
        second = Side(down, 3, 4, adapters_down, 5 + len(matrices))
        rest = iter(range(5 + len(matrices) + len(of_down), len(given)))
        residual_at, norm_at = (None if each is None else next(rest) for each in (residual, norm))
        before = way.counters_of(x, first, GATED)
        every = before + way.counters_of(x, second, DOWN)
        laid_out, counters = way.add_lay_out(launches, x, norm, norm_at, every, first, GATED)
        h = way.add_products(launches, x, laid_out, (counters, 0), first, GATED, activation=activation)
        y, *_ = way.add_products(launches, x, h, (counters, before), second, DOWN, residual_at=residual_at)
        launches.results = (y,)
        _LAUNCHES.add(key, launches)
    return launches, given


def _new_launches(x: Tensor, given: int) -> Launches:
    early = sides.tuning_of(x).begins_early
    return Launches(given=given, overlaps=may_overlap(x.device), follows=early)
