"""Products of few tokens by a frozen FP8 weight, whose bytes are read once: the kernels of `numerics.few_tokens`.

A product of some 64 tokens takes as long as its weight takes to be read, if enough of it is asked for at a time. So
there are as many programs as the GPU holds, and where a weight has too few rows for that, each program has a part of
its columns (`parts_of`), and a last launch adds the parts up, always in the same order. That launch also adds what
comes beside the product: adapters, bias, residual; or applies the activation of a gated MLP.

    linear       lay out x, products, finish
    gated MLP    lay out x, products of gate and up, finish to h, laid out; products of down, finish

Launches overlap: one begins while the last programs of the one before are at work. `kernels.py` has the kernels.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.few_tokens.kernels import BLOCKS, CHANNEL, TENSOR, finish_kernel, lay_out_kernel, products_kernel
from octavo.kernels.gated.activations import ACTIVATIONS
from octavo.kernels.launch import LaunchCache, Launches, kind
from octavo.kernels.tiles import multiprocessors
from octavo.kernels.tuning import FewTokenTiles, may_overlap, tuning_for
from octavo.numerics.few_tokens import MOST_TOKENS, Low
from octavo.numerics.norm import Norm
from octavo.numerics.quantize import BLOCK, Quantized

MOST_ADAPTERS = 3
LARGEST_RANK = 128
WIDEST_NORM = 16_384  # columns
DTYPES = (torch.bfloat16, torch.float16)
ALIGNMENT = 16  # bytes that a thread reads at a time
_FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
_LAUNCHES = LaunchCache()


class _Side(NamedTuple):
    """One product: the numbers of its tensors among those of the launches, and what is known of them."""

    weight: Quantized
    w: int
    scale: int
    adapters: Sequence[Low]
    matrices: int  # the first of all A, then all B

    @property
    def ranks(self) -> list[int]:
        return [low.down.shape[0] for low in self.adapters]

    def downs(self) -> list[int]:
        return self._three(self.matrices)

    def ups(self) -> list[int]:
        return self._three(self.matrices + len(self.adapters))

    def _three(self, first: int) -> list[int]:
        """Three numbers: those of the adapters there are, and again the first."""
        count = len(self.adapters)
        return [first + (i if i < count else 0) if count else self.w for i in range(MOST_ADAPTERS)]

    @property
    def rank_constants(self) -> dict[str, int]:
        ranks = self.ranks + [0] * (MOST_ADAPTERS - len(self.adapters))
        return {f"RANK{i}": rank for i, rank in enumerate(ranks)}

    @property
    def spans(self) -> tuple[float, ...]:
        every = [(low.first, low.last - low.first, low.scaling) for low in self.adapters]
        firsts, sizes, scalings = zip(*every, *[(0, 0, 1.0)] * (MOST_ADAPTERS - len(every)), strict=True)
        return (*firsts, *sizes, *map(float, scalings))


def can_multiply(x: Tensor, weight: Quantized, adapters: Sequence[Low], norm: Norm | None = None) -> bool:
    """Whether the kernels take this product: 16 bits, rows of whole 16 bytes, scales as frozen weights have them."""
    data, scale = weight
    rows, k = data.shape
    shapes = ((), (rows, 1), (-(-rows // BLOCK), -(-k // BLOCK)))
    return (
        x.dtype in DTYPES
        and 0 < x.shape[0] <= MOST_TOKENS
        and data.dtype in _FORMATS
        and k % ALIGNMENT == 0
        and data.is_contiguous()
        and data.data_ptr() % ALIGNMENT == 0
        and scale.dtype == torch.float32
        and scale.is_contiguous()
        and tuple(scale.shape) in shapes
        and len(adapters) <= MOST_ADAPTERS
        and all(0 < low.down.shape[0] <= LARGEST_RANK for low in adapters)
        and len({matrix.dtype for low in adapters for matrix in (low.down, low.up)}) <= 1
        and (norm is None or (norm.weight.dtype == x.dtype and k <= WIDEST_NORM))
    )


def can_gate(x: Tensor, gate_up: Quantized, down: Quantized, *adapters: Sequence[Low], norm: Norm | None) -> bool:
    """Whether they take a gated MLP: both of its products, with the adapters of each."""
    features = down.data.shape[1]
    h = x.new_empty([x.shape[0], 0])
    return (
        gate_up.data.shape[0] == 2 * features
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
        kind(*given),
    )
    launches = _LAUNCHES.get(key)
    if launches is None:
        launches = Launches(given=len(given), overlaps=may_overlap(x.device))
        side = _Side(weight, 1, 2, adapters, 3)
        rest = iter(range(3 + len(matrices), len(given)))
        bias_at, residual_at, norm_at = (None if each is None else next(rest) for each in (bias, residual, norm))
        x_at = _add_lay_out(launches, x, norm, norm_at)
        launches.results = (_add_linear(launches, x, x_at, side, bias_at, residual_at),)
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
    matrices, of_down = _matrices(adapters), _matrices(adapters_down)
    weights = [_words(gate_up.data), gate_up.scale, _words(down.data), down.scale]
    given = [x.contiguous(), *weights, *matrices, *of_down, *_some(residual, _weight_of(norm))]
    how = (activation, _places(adapters), _places(adapters_down), residual is None, _norm_key(norm))
    key = ("mlp", *how, gate_up.data.dtype, down.data.dtype, kind(*given))
    launches = _LAUNCHES.get(key)
    if launches is None:
        launches = Launches(given=len(given), overlaps=may_overlap(x.device))
        first = _Side(gate_up, 1, 2, adapters, 5)
        second = _Side(down, 3, 4, adapters_down, 5 + len(matrices))
        rest = iter(range(5 + len(matrices) + len(of_down), len(given)))
        residual_at, norm_at = (None if each is None else next(rest) for each in (residual, norm))
        x_at = _add_lay_out(launches, x, norm, norm_at)
        h_at = _add_gated(launches, x, x_at, first, activation)
        launches.results = (_add_linear(launches, x, h_at, second, None, residual_at),)
        _LAUNCHES.add(key, launches)
    return launches.run(*given)[0]


def tile_of_tokens(tokens: int) -> int:
    return max(16, triton.next_power_of_2(tokens))


def parts_of(tiles: int, steps: int, tokens: int, slots: int, tuning: FewTokenTiles) -> int:
    """How many programs share the columns of each tile of outputs, for the least time: rounds of programs, and sums."""

    def cost(parts: int) -> float:
        rounds = -(-tiles * parts // slots)
        return rounds * (-(-steps // parts) + tuning.start) + (parts > 1) * parts * tuning.part * tokens / 64

    return min(range(1, min(steps, tuning.most_parts) + 1), key=cost)


def _add_lay_out(launches: Launches, x: Tensor, norm: Norm | None, norm_at: int | None) -> int:
    (m, k), tuning = x.shape, tuning_for(x.device).few_tokens
    rows, across = tile_of_tokens(m), -(-k // BLOCK) * BLOCK
    out = launches.make((rows, across), x.dtype)
    width = tuning.lay_out.elements if norm is None else max(BLOCK, triton.next_power_of_2(across))
    warps = tuning.lay_out.warps * max(1, min(4, width // (4 * tuning.lay_out.elements)))
    eps, shifted = (0.0, False) if norm is None else (float(norm.eps), norm.shifted)
    constants = {"NORM": norm is not None, "SHIFTED": shifted, "K": k, "WIDTH": width, "num_warps": warps}
    tensors = (0, 0 if norm_at is None else norm_at, out)
    launches.launch(lay_out_kernel, (rows, -(-across // width)), tensors, (m, across, eps), constants)
    return out


def _add_products(launches: Launches, x: Tensor, x_at: int, side: _Side) -> tuple[int, int, dict[str, Any]]:
    """Add the launch of a product, and return the numbers of its parts and of t, and what the next one must know."""
    m, (n, k) = x.shape[0], side.weight.data.shape
    tuning, rows = tuning_for(x.device).few_tokens, tile_of_tokens(m)
    tile, steps, scale = tuning.products[rows], -(-k // BLOCK), side.weight.scale
    tiles = -(-n // tile.n)
    parts = parts_of(tiles, steps, m, tile.programs * multiprocessors(x.device), tuning)
    parts = -(-steps // -(-steps // parts))  # none without a step
    t_parts = min(steps, tuning.adapter_parts[rows]) if side.adapters else 1
    out = launches.make((parts, m, n), torch.float32 if parts > 1 else x.dtype)
    t = launches.make((t_parts, m, max(1, sum(side.ranks))), torch.float32)
    mode = TENSOR if scale.dim() == 0 else CHANNEL if scale.shape == (n, 1) else BLOCKS
    constants = {
        "FORMAT": _FORMATS[side.weight.data.dtype], "MODE": mode.value, "EVEN": n % tile.n == 0 and k % BLOCK == 0,
        "TILE_M": rows, "TILE_N": tile.n, "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    grid = (len(side.adapters) * t_parts + tiles * parts,)
    stride = scale.shape[1] if mode is BLOCKS else 0
    tensors = (x_at, side.w, side.scale, *side.downs(), out, t)
    launches.launch(
        products_kernel, grid, tensors, (m, n, k, steps, stride, parts, t_parts), constants | side.rank_constants
    )
    return out, t, {"PARTS": parts, "T_PARTS": t_parts, **side.rank_constants}


def _add_linear(
    launches: Launches, x: Tensor, x_at: int, side: _Side, bias_at: int | None, residual_at: int | None
) -> int:
    parts, t, shared = _add_products(launches, x, x_at, side)
    y = launches.make((x.shape[0], side.weight.data.shape[0]), x.dtype)
    constants = {"ACTIVATION": None, "BIAS": bias_at is not None, "RESIDUAL": residual_at is not None, **shared}
    beside = (y if bias_at is None else bias_at, y if residual_at is None else residual_at)
    _add_finish(launches, x, side, (parts, t), beside, y, x.shape[0], side.weight.data.shape[0], constants)
    return y


def _add_gated(launches: Launches, x: Tensor, x_at: int, side: _Side, activation: str) -> int:
    parts, t, shared = _add_products(launches, x, x_at, side)
    rows, across = tile_of_tokens(x.shape[0]), -(-side.weight.data.shape[0] // 2 // BLOCK) * BLOCK
    h = launches.make((rows, across), x.dtype)
    constants = {"ACTIVATION": ACTIVATIONS[activation], "BIAS": False, "RESIDUAL": False, **shared}
    _add_finish(launches, x, side, (parts, t), (h, h), h, rows, across, constants)
    return h


def _add_finish(
    launches: Launches, x: Tensor, side: _Side, products: tuple[int, int], beside: tuple[int, int], out: int,
    rows: int, columns: int, constants: dict[str, Any],
) -> None:  # fmt: skip
    tile = tuning_for(x.device).few_tokens.finish
    constants |= {"TILE_M": tile.rows, "TILE_N": tile.columns, "num_warps": tile.warps}
    grid = (-(-columns // tile.columns), -(-rows // tile.rows))
    numbers = (x.shape[0], side.weight.data.shape[0], *side.spans)
    launches.launch(finish_kernel, grid, (*products, *side.ups(), *beside, out), numbers, constants)


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
