"""Sums of the gradients of several micro-batches in FP32, BF16 or FP8. Bytes are per parameter.

    fp32   4     exact but for the order of the sum
    bf16   2     a sum is rounded stochastically: nearest rounding would lose addends below a 256th of it
    fp8    1.03  E4M3 with a scale for every 128 elements of a row, rounded stochastically

Stochastic rounding is unbiased: each addition but the last adds an error of up to a 128th (BF16) or an 8th (FP8) of an
element, of either sign. E4M3 with a scale per block covers a range of 2^18 within the block, so E5M2's wider range is
not worth twice the error. Vectors (norms, biases) stay in FP32.

A parameter's gradient is added when it is complete, within backward, and then freed: all gradients exist at once only
in the last micro-batch, in the dtype of the parameters. The random numbers of the rounding are seeded by micro-batch
and parameter, so a resumed run repeats them.

FSDP2 hands out the gradient of a shard when it is averaged over ranks. Each rank sums its own shards, and gets sums
that are distributed as the parameters are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.sharded import local, placed_like
from octavo.numerics.quantize import BLOCK, Quantized, quantize
from octavo.numerics.rounding import round_stochastic_bf16

GRADIENTS = ("fp32", "bf16", "fp8")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_CHUNK = 2**24  # elements converted to FP32 at a time
_Sum = list[Tensor]  # values, and in FP8 their scales


class GradientSums:
    """Sums of gradients. Run each backward within `adding`; after the last, the parameters' `.grad` hold the sums."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        self.kind = kind
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._number = {name: i for i, name in enumerate(self._names.values())}
        self._sums: dict[str, _Sum] = {}
        self._micro_step = 0
        self._active = self._is_last = False
        if not isinstance(model, nn.parallel.DistributedDataParallel):  # which averages gradients after such hooks
            for parameter in self._names:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._take)

    @contextmanager
    def adding(self, micro_step: int, *, is_last: bool) -> Iterator[None]:
        self._micro_step, self._is_last, self._active = micro_step, is_last, True
        try:
            yield
            for parameter in self._names:
                self._take(parameter)
        finally:
            self._active = False

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        """Add the gradient to the sum; in the last micro-batch, put the sum in its place."""
        name = self._names[parameter]
        if not self._active:
            return
        if self._is_last:
            if name in self._sums:
                last = None if parameter.grad is None else local(parameter.grad)
                total, mine = _total(self._sums.pop(name), last, parameter.dtype), local(parameter.detach())
                # In the parameter's memory layout, which some optimisers assume.
                total = total if total.stride() == mine.stride() else torch.empty_like(mine).copy_(total)
                parameter.grad = placed_like(total, parameter)
        elif parameter.grad is not None:
            self._sums[name] = self._added(self._sums.get(name), local(parameter.grad), name)
            parameter.grad = None

    def _added(self, total: _Sum | None, grad: Tensor, name: str) -> _Sum:
        if self.kind == "fp32" or grad.dim() < 2:
            return [grad.float() if total is None else total[0].add_(grad)]
        into = total or _new_sum(grad, self.kind)
        seed = self._micro_step * len(self._names) + self._number[name]
        generator = torch.Generator(grad.device).manual_seed(seed)
        for rows in _chunks(grad):
            value = _rows(grad)[rows].float()
            _write(into, rows, value if total is None else value + _read(total, rows), generator)
        return into

    def clear(self) -> None:
        self._sums.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return a tensor for each parameter with a sum; in FP8 two, values and scales. Of shards, this rank's."""
        copies = {name: [tensor.clone() for tensor in tensors] for name, tensors in self._sums.items()}
        return {name: tensors[0] if len(tensors) == 1 else tensors for name, tensors in copies.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        devices = {name: parameter.device for parameter, name in self._names.items()}
        loaded = {name: [value] if isinstance(value, Tensor) else list(value) for name, value in state.items()}
        for name, tensors in loaded.items():
            if tensors[0].dim() >= 2 and tensors[0].dtype != DTYPES[self.kind]:
                saved = next(kind for kind, dtype in DTYPES.items() if dtype == tensors[0].dtype)
                raise ValueError(
                    f"gradients={self.kind!r}: the saved state is in the middle of an accumulation with "
                    f"gradients={saved!r}; go on with that"
                )
            self._sums[name] = [tensor.to(devices[name], copy=True) for tensor in tensors]
        for name in self._sums.keys() - loaded.keys():
            del self._sums[name]


def default_for(model: nn.Module) -> str:
    """Return the dtypes of gradients without accumulation: those of the parameters."""
    names = {dtype: kind for kind, dtype in DTYPES.items()}
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    return " and ".join(sorted(names.get(dtype, str(dtype)) for dtype in dtypes))


def _new_sum(like: Tensor, kind: str) -> _Sum:
    values = torch.empty(like.shape, dtype=DTYPES[kind], device=like.device)
    if kind != "fp8":
        return [values]
    rows, columns = _rows(values).shape
    return [values, torch.empty(rows, -(-columns // BLOCK), dtype=torch.float32, device=like.device)]


def _total(partial: _Sum, grad: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sum with the last gradient, rounded only once, to `dtype`."""
    values = partial[0]
    if values.dtype == torch.float32:
        return (values if grad is None else values.add_(grad)).to(dtype)
    total = torch.empty(values.shape, dtype=dtype, device=values.device)
    for rows in _chunks(total):
        value = _read(partial, rows)
        _rows(total)[rows] = value if grad is None else value + _rows(grad)[rows].float()
    return total


def _read(total: _Sum, rows: slice) -> Tensor:
    values = _rows(total[0])[rows]
    return values.float() if len(total) == 1 else Quantized(values, total[1][rows]).dequantize()


def _write(into: _Sum, rows: slice, value: Tensor, generator: torch.Generator) -> None:
    if len(into) == 1:
        _rows(into[0])[rows] = round_stochastic_bf16(value, generator)
    else:
        quantized = quantize(value, granularity="block", rounding="stochastic", generator=generator)
        _rows(into[0].view(torch.uint8))[rows] = quantized.data.view(torch.uint8)
        into[1][rows] = quantized.scale


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _chunks(x: Tensor) -> Iterator[slice]:
    height = max(_CHUNK // max(x.shape[-1], 1), 1)
    for start in range(0, _rows(x).shape[0], height):
        yield slice(start, start + height)
