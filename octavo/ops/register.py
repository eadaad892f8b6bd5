"""`@operator`: one decorator that makes a custom operator of a function.

    @operator(mutates=("state",), fake=_quantize_shapes)
    def quantize(x: Tensor, state: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
        ...

    def _quantize_shapes(x: Tensor, recipe: str) -> tuple[Tensor, Tensor]:  # those of the arguments that it needs
        return x.new_empty(...), x.new_empty(...)

`quantize` is then `torch.ops.octavo.quantize.default`. Its schema is inferred from the annotations. Arguments may be
`Tensor`, `Tensor | None`, `list[Tensor]`, `str`, `bool`, `int`, `float`, `torch.dtype`, `list[bool]` and `list[int]`;
results `Tensor`, `tuple[Tensor, Tensor]` (of any fixed length) or `None`. (A list of results cannot be functionalised
where an argument is mutated.) No argument may have a default value.

Operators are opaque to `torch.compile` and to autograd: a layer's backward is written out in `octavo/nn`. They may
return neither an argument nor one tensor twice.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])
# Arguments that are real beside an operand on the meta device: the scaling state of its weight, and scales.
_BESIDE_OPERANDS = ("state", "scale", "row")

_LIBRARY = torch.library.Library("octavo", "DEF")


def operator(*, mutates: Sequence[str] = (), fake: Callable[..., Any]) -> Callable[[F], F]:
    """Make an operator of a function, named as it is, without a leading underscore.

    `mutates`: arguments that it writes to. `fake`: returns empty tensors shaped as the results, for `torch.compile` and
    the meta device; its parameters are named as those arguments that it needs.
    """
    wanted = tuple(inspect.signature(fake).parameters)

    def register(function: F) -> F:
        name = function.__name__.removeprefix("_")
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates))
        _LIBRARY.impl(name, _in_range(f"octavo.{name}", function), "CompositeExplicitAutograd")
        arguments = tuple(inspect.signature(function).parameters)

        def shapes(*args: Any) -> Any:
            given = dict(zip(arguments, args, strict=True))
            check_values(f"octavo::{name}", given)
            return fake(**{key: given[key] for key in wanted})

        torch.library.register_fake(f"octavo::{name}", shapes, lib=_LIBRARY)
        return cast(F, getattr(torch.ops.octavo, name).default)

    return register


def _in_range(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Run `function` in an NVTX range on a GPU, so that Nsight Systems shows it above the kernels it launches."""

    def inside(first: Tensor, *args: Any) -> Any:
        if not first.is_cuda:
            return function(first, *args)
        torch.cuda.nvtx.range_push(name)
        try:
            return function(first, *args)
        finally:
            torch.cuda.nvtx.range_pop()

    return inside


def check_values(what: str, operands: dict[str, Any]) -> None:
    """Refuse a tensor on the meta device beside real ones: only shapes would be computed, and any numbers returned."""
    groups = ((name, value if isinstance(value, list | tuple) else (value,)) for name, value in operands.items())
    devices = [(name, x.device.type) for name, values in groups for x in values if isinstance(x, Tensor)]
    empty = dict.fromkeys(name for name, device in devices if device == "meta")
    real = {
        name: device
        for name, device in devices
        if device != "meta" and not any(word in name for word in _BESIDE_OPERANDS)
    }
    if empty and real:
        raise RuntimeError(
            f"{what}: {', '.join(empty)} on the meta device, without values, and {', '.join(real)} on "
            f"{next(iter(real.values()))}. Weights that were offloaded come back when their own module is called; else "
            "give the model its weights (model.to_empty, then load_state_dict)"
        )


def empty(like: Tensor, count: int) -> list[Tensor]:
    """Return separate empty tensors: an operator returns tensors, and never one twice."""
    return [like.new_empty(0) for _ in range(count)]


def or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    """Return x, or an empty tensor in its place."""
    return like.new_empty(0) if x is None else x
