"""Gradients of several micro-batches, summed: in FP32, in BF16 or in FP8. Bytes are for each parameter.

    fp32   4     exact but for the order of the sum
    bf16   2     a sum is rounded stochastically: to the nearest, what is below a 256th of it would be lost
    fp8    1.03  E4M3 with a scale for every 128 elements of a row, rounded stochastically

Stochastic rounding puts a sum above or below where it is, by chance, so that it is right on average: each addition but
the last costs an error of up to a 128th (BF16) or an 8th (FP8) of an element, of either sign. E4M3 with a scale for a
block has a range of 2^18 in it, so the wider one of E5M2 is not worth twice the error. Vectors (norms, biases) stay in
FP32.

A parameter's gradient is added when it is complete, within backward, and let go of: all gradients are there at once
only in the last micro-batch, in the dtype of the parameters. The rounding's random numbers come from the number of the
micro-batch and of the parameter, so a run that resumes repeats them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.numerics.quantize import BLOCK, Quantized, quantize
from octavo.numerics.rounding import round_stochastic_bf16

GRADIENTS = ("fp32", "bf16", "fp8")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_CHUNK = 2**24  # elements that are in FP32 at a time
_Sum = list[Tensor]  # values, and in FP8 their scales


class GradientSums:
    """Run each backward within `adding`: after the last micro-batch's, sums are in the parameters' `.grad`."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        self.kind = kind
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._number = {name: i for i, name in enumerate(self._names.values())}
        self._sums: dict[str, _Sum] = {}
        self._micro_step = 0
        self._active = self._last = False
        if not isinstance(model, nn.parallel.DistributedDataParallel):  # which averages gradients after such hooks
            for parameter in self._names:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._take)

    @contextmanager
    def adding(self, micro_step: int, *, last: bool) -> Iterator[None]:
        self._micro_step, self._last, self._active = micro_step, last, True
        try:
            yield
            for parameter in self._names:
                self._take(parameter)
        finally:
            self._active = False

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        """Add the gradient to the sum; the last time, put the sum in its place."""
        name = self._names[parameter]
        if not self._active:
            return
        if self._last:
            if name in self._sums:
                total = _total(self._sums.pop(name), parameter.grad, parameter.dtype)
                # Laid out as the parameter is: some optimisers take that for granted.
                same = total.stride() == parameter.stride()
                parameter.grad = total if same else torch.empty_like(parameter).copy_(total)
        elif parameter.grad is not None:
            self._sums[name] = self._added(self._sums.get(name), parameter.grad, name)
            parameter.grad = None

    def _added(self, found: _Sum | None, grad: Tensor, name: str) -> _Sum:
        if self.kind == "fp32" or grad.dim() < 2:
            return [grad.float() if found is None else found[0].add_(grad)]
        into = found or _new_sum(grad, self.kind)
        seed = self._micro_step * len(self._names) + self._number[name]
        generator = torch.Generator(grad.device).manual_seed(seed)
        for rows in _chunks(grad):
            value = _rows(grad)[rows].float()
            _write(into, rows, value if found is None else value + _read(found, rows), generator)
        return into

    def clear(self) -> None:
        self._sums.clear()

    def state_dict(self) -> dict[str, Any]:
        """A tensor for each name that has a sum; in FP8 two, values and scales."""
        copies = {name: [part.clone() for part in found] for name, found in self._sums.items()}
        return {name: found[0] if len(found) == 1 else found for name, found in copies.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        devices = {name: parameter.device for parameter, name in self._names.items()}
        loaded = {name: [value] if isinstance(value, Tensor) else list(value) for name, value in state.items()}
        for name, found in loaded.items():
            if found[0].dim() >= 2 and found[0].dtype != DTYPES[self.kind]:
                saved = next(kind for kind, dtype in DTYPES.items() if dtype == found[0].dtype)
                raise ValueError(
                    f"gradients={self.kind!r}: the saved state is in the middle of an accumulation with "
                    f"gradients={saved!r}; go on with that"
                )
            self._sums[name] = [part.to(devices[name], copy=True) for part in found]
        for name in self._sums.keys() - loaded.keys():
            del self._sums[name]


def default_for(model: nn.Module) -> str:
    """What gradients are without accumulation: what the parameters are."""
    names = {dtype: kind for kind, dtype in DTYPES.items()}
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    return " and ".join(sorted(names.get(dtype, str(dtype)) for dtype in dtypes))


def _new_sum(like: Tensor, kind: str) -> _Sum:
    values = torch.empty(like.shape, dtype=DTYPES[kind], device=like.device)
    if kind != "fp8":
        return [values]
    rows, columns = _rows(values).shape
    return [values, torch.empty(rows, -(-columns // BLOCK), dtype=torch.float32, device=like.device)]


def _total(found: _Sum, grad: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The last addition is not rounded but to `dtype`."""
    values = found[0]
    if values.dtype == torch.float32:
        return (values if grad is None else values.add_(grad)).to(dtype)
    total = torch.empty(values.shape, dtype=dtype, device=values.device)
    for rows in _chunks(total):
        value = _read(found, rows)
        _rows(total)[rows] = value if grad is None else value + _rows(grad)[rows].float()
    return total


def _read(found: _Sum, rows: slice) -> Tensor:
    values = _rows(found[0])[rows]
    return values.float() if len(found) == 1 else Quantized(values, found[1][rows]).dequantize()


def _write(into: _Sum, rows: slice, value: Tensor, generator: torch.Generator) -> None:
    if len(into) == 1:
        _rows(into[0])[rows] = round_stochastic_bf16(value, generator)
    else:
        found = quantize(value, granularity="block", rounding="stochastic", generator=generator)
        _rows(into[0].view(torch.uint8))[rows] = found.data.view(torch.uint8)
        into[1][rows] = found.scale


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _chunks(x: Tensor) -> Iterator[slice]:
    height = max(_CHUNK // max(x.shape[-1], 1), 1)
    for start in range(0, _rows(x).shape[0], height):
        yield slice(start, start + height)
