"""Products of few tokens by a frozen FP8 weight, whose bytes are read once: the kernels of `numerics.few_tokens`.

A product of some 64 tokens takes as long as its weight takes to be read, if enough of it is asked for at a time. So
there are as many programs as the GPU holds, and where a weight has too few rows for that, each program has a part of
its columns (`parts_of`). They add the parts up, always in the same order, with what comes beside the product: adapters,
bias, residual, or the activation of a gated MLP.

    linear       lay out x; products
    gated MLP    lay out x; products of gate and up, to h, laid out; products of down

One token has kernels of its own (`one_token.py`).

Launches overlap: one begins while the last programs of the one before are at work, and asks for its first weights
before it waits. `kernels.py` has the kernels.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from octavo.kernels.few_token_tiles import FewTokenTiles, ProductTile
from octavo.kernels.few_tokens import one_token
from octavo.kernels.few_tokens.kernels import PARTS_OF_TILE, lay_out_kernel, products_kernel
from octavo.kernels.few_tokens.sides import DOWN, FORMATS, GATED, MOST_ADAPTERS, PRODUCT, Side
from octavo.kernels.gated.activations import ACTIVATIONS
from octavo.kernels.launch import LaunchCache, Launches
from octavo.kernels.launch import kind as kind_of
from octavo.kernels.tiles import multiprocessors
from octavo.kernels.tuning import may_overlap, tuning_for
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
        and data.dtype in FORMATS
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
    matrices = _matrices(adapters)
    given = [x.contiguous(), _words(weight.data), weight.scale, *matrices, *_some(bias, residual, _weight_of(norm))]
    key = (
        "linear",
        _places(adapters),
        bias is None,
        residual is None,
        _norm_key(norm),
        weight.data.dtype,
        kind_of(*given),
    )
    launches = _LAUNCHES.get(key)
    if launches is None:
        launches = _new_launches(x, len(given))
        side = Side(weight, 1, 2, adapters, 3)
        rest = iter(range(3 + len(matrices), len(given)))
        bias_at, residual_at, norm_at = (None if each is None else next(rest) for each in (bias, residual, norm))
        if x.shape[0] == 1:
            projected = one_token.add_projection(launches, x, 0, side, norm, norm_at)
            y = one_token.add_rows(launches, x, projected, side, PRODUCT, bias_at=bias_at, residual_at=residual_at)
        else:
            laid_out, counters = _add_lay_out(launches, x, norm, norm_at, _counters_of(x, side, PRODUCT))
            y, _ = _add_products(
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
    matrices, of_down = _matrices(adapters), _matrices(adapters_down)
    weights = [_words(gate_up.data), gate_up.scale, _words(down.data), down.scale]
    given = [x.contiguous(), *weights, *matrices, *of_down, *_some(residual, _weight_of(norm))]
    how = (activation, _places(adapters), _places(adapters_down), residual is None, _norm_key(norm))
    key = ("mlp", *how, gate_up.data.dtype, down.data.dtype, kind_of(*given))
    launches = _LAUNCHES.get(key)
    if launches is None:
        launches = _new_launches(x, len(given))
        first = Side(gate_up, 1, 2, adapters, 5)
        second = Side(down, 3, 4, adapters_down, 5 + len(matrices))
        rest = iter(range(5 + len(matrices) + len(of_down), len(given)))
        residual_at, norm_at = (None if each is None else next(rest) for each in (residual, norm))
        if x.shape[0] == 1:
            projected = one_token.add_projection(launches, x, 0, first, norm, norm_at)
            one = one_token.add_rows(launches, x, projected, first, GATED, activation=activation)
            projected = one_token.add_projection(launches, x, one, second)
            y = one_token.add_rows(launches, x, projected, second, DOWN, residual_at=residual_at)
        else:
            before = _counters_of(x, first, GATED)
            every = before + _counters_of(x, second, DOWN)
            laid_out, counters = _add_lay_out(launches, x, norm, norm_at, every)
            h = _add_products(launches, x, laid_out, (counters, 0), first, GATED, activation=activation)
            y, _ = _add_products(launches, x, h, (counters, before), second, DOWN, residual_at=residual_at)
        launches.results = (y,)
        _LAUNCHES.add(key, launches)
    return launches, given


def tile_of_tokens(tokens: int) -> int:
    return max(16, triton.next_power_of_2(tokens))


def parts_of(tiles: int, steps: int, tokens: int, slots: int, tuning: FewTokenTiles) -> int:
    """How many programs share the columns of each tile of outputs, for the least time: rounds of programs, and sums."""

    def cost(parts: int) -> float:
        rounds = -(-tiles * parts // slots)
        return rounds * (-(-steps // parts) + tuning.start) + (parts > 1) * parts * tuning.part * tokens / 64

    return min(range(1, min(steps, tuning.most_parts) + 1), key=cost)


def _new_launches(x: Tensor, given: int) -> Launches:
    early = tuning_for(x.device).few_tokens.begins_early and x.shape[0] > 1  # `rows.py` says why not with one
    return Launches(given=given, overlaps=may_overlap(x.device), follows=early)


def _tile_of(x: Tensor, kind: str) -> ProductTile:
    """The tile of a kind of product, a field of `FewTokenTiles`."""
    return getattr(tuning_for(x.device).few_tokens, kind)[tile_of_tokens(x.shape[0])]


def _tiles_of(x: Tensor, side: Side, kind: str) -> int:
    """How many tiles of outputs there are. Of gate and up, two for 128 features, which may be fewer."""
    n = side.weight.data.shape[0]
    return -(-n // 2 // BLOCK) * 2 if kind == GATED else -(-n // _tile_of(x, kind).n)


def _tiles_of_tokens(x: Tensor, kind: str) -> int:
    rows = tile_of_tokens(x.shape[0])
    return max(1, rows // (_tile_of(x, kind).tokens or rows))


def _counters_of(x: Tensor, side: Side, kind: str) -> int:
    return PARTS_OF_TILE + _tiles_of(x, side, kind) * _tiles_of_tokens(x, kind)


def _add_lay_out(
    launches: Launches, x: Tensor, norm: Norm | None, norm_at: int | None, counters: int
) -> tuple[tuple[int, int], int]:
    """Add the launch before the products, and return the numbers of x', its factors, and the counters."""
    m, k = x.shape
    rows, across = tile_of_tokens(m), -(-k // BLOCK) * BLOCK
    out, factors = launches.make((rows, across), torch.float16), launches.make((rows,), torch.float32)
    zeros, width = launches.make((counters,), torch.int32), max(BLOCK, triton.next_power_of_2(across))
    elements, warps = tuning_for(x.device).few_tokens.lay_out
    eps, shifted = (0.0, False) if norm is None else (float(norm.eps), norm.shifted)
    constants = {
        "NORM": norm is not None, "SHIFTED": shifted, "K": k, "WIDTH": width,
        "COUNTERS": triton.next_power_of_2(counters), "num_warps": max(warps, min(16, width // elements)),
    }  # fmt: skip
    tensors = (0, 0 if norm_at is None else norm_at, out, factors, zeros)
    launches.launch(lay_out_kernel, (rows,), tensors, (m, across, eps, counters), constants)
    return (out, factors), zeros


def _add_products(
    launches: Launches, x: Tensor, laid_out: tuple[int, int], counters: tuple[int, int], side: Side, kind: str, *,
    activation: str | None = None, bias_at: int | None = None, residual_at: int | None = None,
) -> tuple[int, int]:  # fmt: skip
    """Add the launch of a product, and return the numbers of y; or, with an activation, of h and its factors.

    `counters`: their number, and the first of them that is this launch's.
    """
    gated, (n, k) = kind == GATED, side.weight.data.shape
    m, rows, steps, tuning = x.shape[0], tile_of_tokens(x.shape[0]), -(-k // BLOCK), tuning_for(x.device).few_tokens
    tile, tiles, tiles_of_tokens = _tile_of(x, kind), _tiles_of(x, side, kind), _tiles_of_tokens(x, kind)
    units, tokens = tiles * tiles_of_tokens, rows // tiles_of_tokens
    parts = parts_of(units, steps, min(m, tokens), tile.programs * multiprocessors(x.device), tuning)
    parts = -(-steps // -(-steps // parts))  # none without a step
    t_parts = -(-steps // -(-steps // tile.adapter_parts)) if side.adapters else 1
    ranks = side.ranks or [1]
    t_sums = launches.make((len(ranks), t_parts, max(16, triton.next_power_of_2(max(ranks))), rows), torch.float32)
    t = launches.make((rows, sum(ranks)), x.dtype)
    size = (units, parts, 2 if gated else 1, tile.n, tokens) if parts > 1 else (1,)
    sums = launches.make(size, torch.float32)
    if gated:
        y, factors = launches.make((rows, tiles * tile.n), torch.float16), launches.make((tiles, rows), torch.float32)
    else:
        y = launches.make((m, n), x.dtype)
        factors = sums
    whole = (n // 2) % BLOCK == 0 if gated else n % tile.n == 0
    constants = {
        "FORMAT": FORMATS[side.weight.data.dtype], "MODE": side.mode.value, "STEPPED": kind == DOWN,
        "ACTIVATION": None if activation is None else ACTIVATIONS[activation],
        "BIAS": bias_at is not None, "RESIDUAL": residual_at is not None, "SPLIT": parts > 1,
        "EVEN": whole and k % BLOCK == 0, "ROWS": rows, "TILE_M": tokens, "TILE_N": tile.n,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    if tile.registers is not None:
        constants["maxnreg"] = tile.registers
    beside = (y if bias_at is None else bias_at, y if residual_at is None else residual_at)
    tensors = (*laid_out, side.w, side.scale, *side.downs(), *side.ups(), t_sums, t, sums, counters[0], *beside, y)
    numbers = (m, n, k, steps, side.stride, counters[1], parts, t_parts, tile.prefetch, *side.spans)
    grid = (len(side.adapters) * t_parts + units * parts,)
    launches.launch(products_kernel, grid, (*tensors, factors), numbers, constants | side.rank_constants)
    return y, factors


def _words(data: Tensor) -> Tensor:
    return data.view(torch.int16)


def _matrices(adapters: Sequence[Low]) -> list[Tensor]:
    """All A, then all B."""
    return [each.contiguous() for each in (*(low.down for low in adapters), *(low.up for low in adapters))]


def _places(adapters: Sequence[Low]) -> tuple[tuple[int, int, float], ...]:
    return tuple((low.first, low.last, low.scaling) for low in adapters)


def _weight_of(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight.contiguous()


def _norm_key(norm: Norm | None) -> tuple[float, bool] | None:
    return None if norm is None else (norm.eps, norm.shifted)


def _some(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors if tensor is not None]
