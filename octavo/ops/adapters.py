"""LoRA adapters beside a product, for the implementations of the linear and of the gated MLP.

    forward    t = x · [A₁; A₂; …]ᵀ        yᵢ += sᵢ · tᵢ · Bᵢᵀ
    backward   uᵢ = sᵢ · gᵢ · Bᵢ           dBᵢ = sᵢ · gᵢᵀ · tᵢ          dA = uᵀ · x

Shapes: M tokens, K inputs, N outputs, R the rank of an adapter, ΣR of several.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octavo.numerics import Quantized
from octavo.ops.quantize import as_dtype, dequantize, is_high_precision, unpack_scale
from octavo.support import has_fp8_tensor_cores, is_deterministic


@dataclass(frozen=True)
class Adapter:
    """Position of an adapter: outputs `first` to `last`, times `scaling`."""

    first: int
    last: int
    scaling: float


@cache
def _positions(text: str) -> tuple[Adapter, ...]:
    fields = [item.split(":") for item in text.split(",")] if text else []
    return tuple(Adapter(int(first), int(last), float(scaling)) for first, last, scaling in fields)


@cache
def _spans(positions: tuple[Adapter, ...]) -> tuple[tuple[int, int, float], ...]:
    return tuple((position.first, position.last - position.first, position.scaling) for position in positions)


@dataclass(frozen=True)
class Adapters:
    """Adapters of one product: where they are, and A `[R, K]` and B `[N, R]` of each."""

    positions: tuple[Adapter, ...]
    downs: tuple[Tensor, ...]
    ups: tuple[Tensor, ...]

    def encode(self) -> str:
        """The positions as one string: custom operators take no dataclasses."""
        return ",".join(f"{position.first}:{position.last}:{position.scaling!r}" for position in self.positions)

    @classmethod
    def decode(cls, text: str, matrices: Sequence[Tensor]) -> "Adapters":
        """Return the adapters of what `encode` wrote, from all A, then all B. Further matrices are not theirs."""
        if not text:
            return NO_ADAPTERS
        positions = _positions(text)
        count = len(positions)
        return cls(positions, tuple(matrices[:count]), tuple(matrices[count : 2 * count]))

    @property
    def matrices(self) -> list[Tensor]:
        """All A, then all B."""
        return [*self.downs, *self.ups]

    @property
    def ranks(self) -> list[int]:
        return [a.shape[0] for a in self.downs]

    @property
    def spans(self) -> tuple[tuple[int, int, float], ...]:
        """The positions as kernels take them: the first output, how many, the factor."""
        return _spans(self.positions)

    def down(self, dtype: torch.dtype) -> Tensor:
        """Return all A, one below the other."""
        return as_dtype(torch.cat(self.downs) if len(self.downs) > 1 else self.downs[0], dtype)

    def columns(self, t: Tensor) -> Sequence[Tensor]:
        """Return each adapter's columns of `x · [A₁; A₂; …]ᵀ`."""
        return t.split(self.ranks, dim=1) if self.downs else ()

    def split(self, da: Tensor, db: Tensor) -> list[Tensor | None]:
        """Split the gradients of all A, one below the other, and of all B, one after the other, by adapter.

        All A come first, then all B; None for those that were not needed.
        """
        none = [None] * len(self.downs)
        das = da.split(self.ranks) if da.numel() else none
        dbs = db.split([up.numel() for up in self.ups]) if db.numel() else none
        return [
            None if gradient is None else as_dtype(gradient.view(matrix.shape), matrix.dtype)
            for gradient, matrix in zip((*das, *dbs), (*self.downs, *self.ups), strict=True)
        ]


NO_ADAPTERS = Adapters((), (), ())


def project_down(x: Tensor, adapters: Adapters, dtype: torch.dtype) -> Tensor:
    """Compute `x[M, K] · Aᵀ` for all adapters side by side; empty if there are none."""
    # t = x · Aᵀ
    return as_dtype(x, dtype) @ adapters.down(dtype).t() if adapters.downs else x.new_empty(0, dtype=dtype)


def new_projected(x: Tensor, adapters: Adapters, rows: int | torch.SymInt, dtype: torch.dtype) -> Tensor:
    """Return a buffer for the result of `project_down`."""
    return x.new_empty([rows, sum(adapters.ranks)] if adapters.downs else [0], dtype=dtype)


def add_to(y: Tensor, t: Tensor, adapters: Adapters, residual: Tensor | None = None) -> None:
    """Add the adapters' outputs to y, and `residual`, if there is one."""
    # y += s · t · Bᵀ
    if has_fp8_tensor_cores(y.device):
        from octavo.kernels.adapters import outputs as kernel

        if kernel.can_add(y, adapters.ups, adapters.spans, residual, transposed=True):
            kernel.add_outputs(y, t, adapters.ups, adapters.spans, residual, transposed=True)
            return
    for position, up, t_columns in zip(adapters.positions, adapters.ups, adapters.columns(t), strict=True):
        y[:, position.first : position.last].addmm_(t_columns, up.to(y.dtype).t(), alpha=position.scaling)
    if residual is not None:
        y.add_(residual)


def add_to_input(dx: Tensor, u: Tensor, a: Tensor) -> None:
    """Add to dx the part of the gradient that comes through the adapters: `u[M, ΣR]` times all A."""
    # dx += u · A
    if has_fp8_tensor_cores(dx.device):
        from octavo.kernels.adapters import outputs as kernel

        span = ((0, dx.shape[1], 1.0),)
        if kernel.can_add(dx, [a], span, None, transposed=False):
            kernel.add_outputs(dx, u, [a], span, None, transposed=False)
            return
    dx.addmm_(as_dtype(u, dx.dtype), a)


class AdapterGradients:
    """Gradients of all A, one below the other, and of all B, one after the other, added up over chunks of a batch.

    `g[M, N]`: the gradient of the outputs, of all tokens. `factor[N]`: it comes multiplied by this.
    Where there are kernels they add up in FP32, in any order; else, and where the user wants deterministic algorithms,
    it is done in the dtype of g.
    """

    def __init__(
        self, adapters: Adapters, g: Tensor, *, needs_a: bool, needs_b: bool, factor: Tensor | None = None
    ) -> None:
        self.adapters, self.factor, self.needs_a, self.needs_b = adapters, factor, needs_a, needs_b
        self._like = g
        self._da: Tensor | None = None
        self._db: Tensor | None = None
        self._u: Tensor | None = None  # a buffer for it, where a kernel computes it
        self._rows = 0  # of u so far
        if self._in_one_pass(g):
            buffer = torch.zeros(g.shape[0] * self.ranks + self._numel_b, dtype=torch.float32, device=g.device)
            u, self._db = buffer.split([g.shape[0] * self.ranks, self._numel_b])
            self._u = u.view(-1, self.ranks)

    @property
    def ranks(self) -> int:
        return sum(self.adapters.ranks)

    @property
    def _numel_b(self) -> int:
        return sum(up.numel() for up in self.adapters.ups) if self.needs_b else 0

    def _in_one_pass(self, g: Tensor) -> bool:
        if is_deterministic() or not has_fp8_tensor_cores(g.device):
            return False
        from octavo.kernels.adapters import gradients as kernel

        return kernel.can_multiply(g, self.adapters.ups)

    def grad_projected(self, g: Tensor, t: Tensor) -> Tensor:
        """Return u, the gradient of t, for the next tokens, all adapters side by side; add to the gradients of B.

        In FP32 where a kernel adds it up, else in the dtype of g.
        """
        if self._u is None:
            return self._project_by_products(g, t)
        from octavo.kernels.adapters import gradients as kernel

        u = self._u[self._rows : self._rows + g.shape[0]]
        self._rows += g.shape[0]
        d = self._db if self.needs_b else None
        kernel.add_gradients(g, t, self.adapters.ups, self.adapters.spans, self.factor, u, d)
        return u

    def _project_by_products(self, g: Tensor, t: Tensor) -> Tensor:
        adapters = self.adapters
        u = g.new_empty(g.shape[0], self.ranks)
        beta = 0 if self._db is None else 1
        self._db = g.new_empty(self._numel_b) if self._db is None else self._db
        columns = adapters.columns(u), adapters.columns(t)
        for position, up, mine, t_columns, d in zip(
            adapters.positions, adapters.ups, *columns, self._each_db(), strict=True
        ):
            g_columns, b = g[:, position.first : position.last], up
            if self.factor is not None:
                b = torch.div(up, self.factor[position.first : position.last, None])
            # u = s · g · B
            torch.addmm(mine, g_columns, b.to(g.dtype), beta=0, alpha=position.scaling, out=mine)
            if self.needs_b:
                # dB += s · gᵀ · t
                torch.addmm(d, g_columns.t(), t_columns, beta=beta, alpha=position.scaling, out=d)
        return u

    def _each_db(self) -> list[Tensor]:
        assert self._db is not None
        ups = self.adapters.ups
        if not self.needs_b:
            return [self._like] * len(ups)
        return [d.view(up.shape) for d, up in zip(self._db.split([up.numel() for up in ups]), ups, strict=True)]

    def add_a(self, u: Tensor, x: Quantized) -> None:
        """Add to the gradients of A. x: in FP8, or in high precision with an empty scale; may have rows of padding."""
        # dA += uᵀ · x
        rows, dtype = u.shape[0], self._like.dtype
        if is_high_precision(x):
            x_hp = as_dtype(x.data, dtype)
            u = u[: len(x_hp)]  # x was saved before rows of padding were added; theirs in u are zeros
        else:
            scale = unpack_scale(x.scale)
            saved = x if x.data.shape[0] == rows else Quantized(x.data[:rows], scale[:rows] if scale.dim() else scale)
            if self._add_from_fp8(u, saved):
                return
            x_hp = dequantize(saved, dtype)
        u = as_dtype(u, dtype)
        self._da = u.t() @ x_hp if self._da is None else self._da.addmm_(u.t(), x_hp)

    def _add_from_fp8(self, u: Tensor, x: Quantized) -> bool:
        """Use the kernel that reads FP8, if there is one; return whether it was used."""
        if is_deterministic() or not has_fp8_tensor_cores(u.device):
            return False
        from octavo.kernels.adapters import gradients as kernel

        if not kernel.can_multiply_saved(x, u, self._like.dtype):
            return False
        if self._da is None:
            self._da = torch.zeros(u.shape[1], x.data.shape[1], dtype=torch.float32, device=u.device)
        kernel.add_down(u, x, self._da, self._like.dtype)
        return True

    def result(self) -> tuple[Tensor, Tensor]:
        """Return both gradients, in the dtype of the first A and B; empty where not needed."""
        if self.needs_b and self.factor is not None and self._u is None:
            for position, d in zip(self.adapters.positions, self._each_db(), strict=True):
                d.div_(self.factor[position.first : position.last, None])
        a, b = self.adapters.downs, self.adapters.ups
        da = as_dtype(self._da, a[0].dtype) if self.needs_a and self._da is not None else self._like.new_empty(0)
        db = as_dtype(self._db, b[0].dtype) if self.needs_b and self._db is not None else self._like.new_empty(0)
        return da, db


def fake_gradients(like: Tensor, adapters: Adapters, needs_a: bool, needs_b: bool) -> list[Tensor]:
    a, b = adapters.downs, adapters.ups
    da = a[0].new_empty([sum(adapters.ranks), a[0].shape[1]]) if needs_a else like.new_empty(0)
    return [da, b[0].new_empty([sum(up.numel() for up in b)]) if needs_b else like.new_empty(0)]
