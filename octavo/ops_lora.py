"""The operations of frozen FP8 linears with adapters: one operator, either way. (`ops_lora_mlp.py` has the MLP.)

    y = x · wᵀ + b,   yᵢ += sᵢ · (x · Aᵢᵀ) · Bᵢᵀ     for each adapter i, which has a part of the outputs

Shapes: M tokens, K inputs, N outputs, F hidden, R the rank of an adapter, ΣR of several. The adapters multiply in the
dtype of the activations. Their down-projections read x once; their up-projections add in the epilogue of their product,
and in the MLP's hidden layer, where outputs are widest, within the kernel of the activation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.kernels.ranges import ranged
from octavo.numerics import OperandRecipe, Quantized
from octavo.ops import Product, fake_quantize, multiply, pack_scale, quantize_directly, unpack_scale
from octavo.ops_frozen import dequantize, dgrad, first_rows, joined, lists
from octavo.ops_linear import empty, fake_padded, padded

_LIBRARY = torch.library.Library("octavo", "FRAGMENT")
_LIBRARY.define(
    "lora_linear(Tensor x, Tensor(a!) row_x, Tensor[] weights, Tensor[] scales, Tensor? bias, Tensor[] downs, "
    "Tensor[] ups, str adapters, str recipe_x, bool record, bool keep, ScalarType dtype, bool fast, bool emulate) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "lora_linear_backward(Tensor g, Tensor(a!) row_g, Tensor x, Tensor x_scale, Tensor t, Tensor[] weights, "
    "Tensor[] scales, Tensor[] downs, Tensor[] ups, str adapters, str recipe_g, bool[] needs, ScalarType dtype, "
    "bool fast, bool emulate) -> (Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True)
class Adapter:
    """Outputs `first` to `last` have an adapter, times `scaling`."""

    first: int
    last: int
    scaling: float


@cache
def _places(text: str) -> tuple[Adapter, ...]:
    fields = [part.split(":") for part in text.split(",")] if text else []
    return tuple(Adapter(int(first), int(last), float(scaling)) for first, last, scaling in fields)


@dataclass(frozen=True)
class Adapters:
    """Adapters of one product: where they are, and A `[R, K]` and B `[N, R]` of each."""

    places: tuple[Adapter, ...]
    downs: tuple[Tensor, ...]
    ups: tuple[Tensor, ...]

    @property
    def encoded(self) -> str:
        return ",".join(f"{place.first}:{place.last}:{place.scaling!r}" for place in self.places)

    @property
    def given(self) -> tuple[list[Tensor], list[Tensor], str]:
        """As operators take them."""
        return list(self.downs), list(self.ups), self.encoded

    @classmethod
    def decode(cls, downs: Sequence[Tensor], ups: Sequence[Tensor], text: str) -> "Adapters":
        return cls(_places(text), tuple(downs), tuple(ups))

    @property
    def ranks(self) -> list[int]:
        return [a.shape[0] for a in self.downs]

    def down(self, dtype: torch.dtype) -> Tensor:
        """All A, one below the other."""
        return (torch.cat(self.downs) if len(self.downs) > 1 else self.downs[0]).to(dtype)

    def parts(self, t: Tensor) -> Sequence[Tensor]:
        """Each adapter's columns of `x · [A₁; A₂; …]ᵀ`."""
        return t.split(self.ranks, dim=1) if self.downs else ()

    def split(self, da: Tensor, db: Tensor) -> list[Tensor | None]:
        """From the gradients of all A, one below the other, and of all B, one after the other, those of each adapter.

        All A, then all B; None for those of what was not needed.
        """
        none = [None] * len(self.downs)
        das = da.split(self.ranks) if da.numel() else none
        dbs = db.split([up.numel() for up in self.ups]) if db.numel() else none
        return [
            None if gradient is None else gradient.view(matrix.shape).to(matrix.dtype)
            for gradient, matrix in zip((*das, *dbs), (*self.downs, *self.ups), strict=True)
        ]


def lora_linear(
    x: Tensor, weights: Sequence[Quantized], bias: Tensor | None, row_x: Tensor, adapters: Adapters, how: Product,
    *, keep: bool,
) -> tuple[Tensor, Quantized, Tensor]:  # fmt: skip
    """y of `x[M, K]`; x as rows in FP8 if it is to be kept; `x · Aᵀ` of all adapters."""
    y, data, scale, t = torch.ops.octavo.lora_linear(
        x, row_x, *lists(weights), bias, *adapters.given, how.a.encode(), how.record, keep, how.out_dtype,
        how.fast_forward, how.emulate,
    )  # fmt: skip
    return y, Quantized(data, scale), t


def lora_linear_backward(
    g: Tensor, row_g: Tensor, x: Quantized, t: Tensor, weights: Sequence[Quantized], adapters: Adapters, how: Product,
    *, needs: Sequence[bool], dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx in `dtype`, and the gradients of all A and of all B: see `Adapters.split`. Empty where not needed.

    x: what was kept, or in high precision with an empty scale. `needs`: of x, of any A, of any B.
    """
    return torch.ops.octavo.lora_linear_backward(
        g, row_g, *x, t, *lists(weights), *adapters.given, how.g.encode(), list(needs), dtype, how.fast_backward,
        how.emulate,
    )  # fmt: skip


def narrowed(x: Tensor, adapters: Adapters, dtype: torch.dtype) -> Tensor:
    # t = x · Aᵀ
    return x.to(dtype) @ adapters.down(dtype).t() if adapters.downs else x.new_empty(0, dtype=dtype)


def add_to(y: Tensor, t: Tensor, adapters: Adapters) -> None:
    # y += s · t · Bᵀ
    for place, up, part in zip(adapters.places, adapters.ups, adapters.parts(t), strict=True):
        y[:, place.first : place.last].addmm_(part, up.to(y.dtype).t(), alpha=place.scaling)


@dataclass
class Gradients:
    """The gradients of all A, one below the other, and of all B, one after the other, added up over parts of a batch.

    In the dtype of the activations until `result`. `factor[N]`: gradients of outputs come multiplied by it.
    """

    adapters: Adapters
    needs_a: bool
    needs_b: bool
    like: Tensor
    factor: Tensor | None = None

    def __post_init__(self) -> None:
        adapters, like = self.adapters, self.like
        k = adapters.downs[0].shape[1] if adapters.downs else 0
        self.da = like.new_empty(sum(adapters.ranks), k) if self.needs_a else like.new_empty(0)
        self.db = like.new_empty(sum(up.numel() for up in adapters.ups) if self.needs_b else 0)
        self._ups = [
            up.to(like.dtype) if self.factor is None else self._unfolded(i) for i, up in enumerate(adapters.ups)
        ]
        self._beta_a = self._beta_b = 0  # 1 once there is something to add to

    def _unfolded(self, i: int) -> Tensor:
        """B over the factors of its outputs: what was multiplied by them is multiplied by this."""
        up = self.adapters.ups[i]
        return torch.div(up, self._factor_of(i), out=torch.empty_like(up, dtype=self.like.dtype))

    def _factor_of(self, i: int) -> Tensor:
        assert self.factor is not None
        place = self.adapters.places[i]
        return self.factor[place.first : place.last, None]

    def _of_b(self) -> list[Tensor]:
        ups = self.adapters.ups
        return [d.view(up.shape) for d, up in zip(self.db.split([up.numel() for up in ups]), ups, strict=True)]

    def widen(self, g: Tensor, t: Tensor) -> Tensor:
        """u, the gradient of t, of all adapters side by side; adds to those of B on the way."""
        adapters = self.adapters
        u = g.new_empty(g.shape[0], sum(adapters.ranks))
        ds = self._of_b() if self.needs_b else [self.db] * len(adapters.ups)
        parts = zip(adapters.places, self._ups, adapters.parts(u), adapters.parts(t), ds, strict=True)
        for place, up, mine, part, d in parts:
            g_part = g[:, place.first : place.last]
            # u = s · g · B
            torch.addmm(mine, g_part, up, beta=0, alpha=place.scaling, out=mine)
            if self.needs_b:
                # dB += s · gᵀ · t
                torch.addmm(d, g_part.t(), part, beta=self._beta_b, alpha=place.scaling, out=d)
        self._beta_b = 1
        return u

    def add_a(self, u: Tensor, x: Tensor) -> None:
        # dA += uᵀ · x
        torch.addmm(self.da, u.t(), x, beta=self._beta_a, out=self.da)
        self._beta_a = 1

    def result(self) -> tuple[Tensor, Tensor]:
        """In the dtype of the first A and B."""
        if self.needs_b and self.factor is not None:
            for i, d in enumerate(self._of_b()):
                d.div_(self._factor_of(i))
        a, b = self.adapters.downs, self.adapters.ups
        return self.da.to(a[0].dtype) if self.needs_a else self.da, self.db.to(b[0].dtype) if self.needs_b else self.db


def kept_input(x: Tensor, x_scale: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    """In high precision, whichever way it was kept, without rows of padding."""
    if x.element_size() > 1:
        return x.to(dtype)
    return dequantize(Quantized(x, unpack_scale(x_scale)), dtype)[:rows]


def _lora_linear(
    x: Tensor, row_x: Tensor, weights: list[Tensor], scales: list[Tensor], bias: Tensor | None, downs: list[Tensor],
    ups: list[Tensor], adapters: str, recipe_x: str, record: bool, keep: bool, dtype: torch.dtype, fast: bool,
    emulate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    low = Adapters.decode(downs, ups, adapters)
    x_q = quantize_directly(padded(x, emulate), row_x, OperandRecipe.decode(recipe_x), record, "rows")[0]
    # y = x · wᵀ
    y = multiply(x_q, Quantized(joined(weights), joined(scales)), bias, dtype, [], fast, emulate)
    y = first_rows(y, x.shape[0])
    t = narrowed(x, low, dtype)
    add_to(y, t, low)
    kept = (x_q.data, pack_scale(x_q.scale)) if keep else empty(x, 2)
    return y, *kept, t


def _lora_linear_backward(
    g: Tensor, row_g: Tensor, x: Tensor, x_scale: Tensor, t: Tensor, weights: list[Tensor], scales: list[Tensor],
    downs: list[Tensor], ups: list[Tensor], adapters: str, recipe_g: str, needs: list[bool], dtype: torch.dtype,
    fast: bool, emulate: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    low = Adapters.decode(downs, ups, adapters)
    needs_x, needs_a, needs_b = needs
    (dx,) = empty(g, 1)
    gradients = Gradients(low, needs_a, needs_b, g)
    u = gradients.widen(g, t)
    if needs_a:
        gradients.add_a(u, kept_input(x, x_scale, u.dtype, g.shape[0]))
    if needs_x:
        weight = Quantized(joined(weights), joined(scales))
        dx = dgrad(g, row_g, weight, OperandRecipe.decode(recipe_g), dtype, fast, emulate)
        if downs:
            # dx = g · w + u · A
            dx.addmm_(u.to(dtype), low.down(dtype))
    return dx, *gradients.result()


def fake_kept(x: Tensor, recipe: str, keep: bool, emulate: bool) -> tuple[Tensor, Tensor]:
    if not keep:
        return x.new_empty(0), x.new_empty(0)
    return fake_quantize(fake_padded(x, emulate), OperandRecipe.decode(recipe), transpose=False)


def fake_narrowed(x: Tensor, downs: list[Tensor], rows: int | torch.SymInt, dtype: torch.dtype) -> Tensor:
    return x.new_empty([rows, sum(a.shape[0] for a in downs)] if downs else [0], dtype=dtype)


def fake_gradients(
    like: Tensor, downs: list[Tensor], ups: list[Tensor], needs_a: bool, needs_b: bool
) -> tuple[Tensor, Tensor]:
    k = downs[0].shape[1] if downs else 0
    shape = [sum(a.shape[0] for a in downs), k] if needs_a else [0]
    size = [sum(b.numel() for b in ups)] if needs_b else [0]
    a_dtype, b_dtype = (downs[0].dtype if needs_a else like.dtype), (ups[0].dtype if needs_b else like.dtype)
    return like.new_empty(shape, dtype=a_dtype), like.new_empty(size, dtype=b_dtype)


def _lora_linear_fake(
    x: Tensor, row_x: Tensor, weights: list[Tensor], scales: list[Tensor], bias: Tensor | None, downs: list[Tensor],
    ups: list[Tensor], adapters: str, recipe_x: str, record: bool, keep: bool, dtype: torch.dtype, fast: bool,
    emulate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    y = x.new_empty([x.shape[0], sum(w.shape[0] for w in weights)], dtype=dtype)
    return y, *fake_kept(x, recipe_x, keep, emulate), fake_narrowed(x, downs, x.shape[0], dtype)


def _lora_linear_backward_fake(
    g: Tensor, row_g: Tensor, x: Tensor, x_scale: Tensor, t: Tensor, weights: list[Tensor], scales: list[Tensor],
    downs: list[Tensor], ups: list[Tensor], adapters: str, recipe_g: str, needs: list[bool], dtype: torch.dtype,
    fast: bool, emulate: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx = g.new_empty([g.shape[0], weights[0].shape[1]], dtype=dtype) if needs[0] else g.new_empty(0)
    return dx, *fake_gradients(g, downs, ups, *needs[1:])


for _name, _implementation, _fake in (
    ("lora_linear", _lora_linear, _lora_linear_fake),
    ("lora_linear_backward", _lora_linear_backward, _lora_linear_backward_fake),
):
    _LIBRARY.impl(_name, ranged(f"octavo.{_name}", _implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{_name}", _fake, lib=_LIBRARY)
