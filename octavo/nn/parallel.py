"""Linears of tensor parallelism: DTensors come in, products run on what this rank holds, DTensors go out.

`torch.distributed.tensor.parallel` and transformers' `tp_plan` make the weight of a linear a DTensor, which optimisers
and checkpoints know, and hand the linear an input that is one. FP8 operators take plain tensors. So the linear
multiplies local shards, and says how the results of all ranks make up the whole, along each dimension of the mesh:

    x           w           y = x · wᵀ    dx          dw
    Replicate   Shard(0)    Shard(-1)     Partial     Shard(0)     parallel by columns (outputs)
    Shard(-1)   Shard(1)    Partial       Shard(-1)   Shard(1)     parallel by rows (inputs)
    Shard(d)    Shard(0)    Shard(-1)     Shard(d)    Shard(0)     by columns, from tokens that are sharded
    Shard(d)    Replicate   Shard(d)      Shard(d)    Partial      tokens that are sharded
    Replicate   Replicate   Replicate     Replicate   Replicate

In the third row x is gathered in FP8 (`sequence.py`), and dx is reduced and scattered. A bias is sharded as the outputs
are; where y is Partial, the first rank adds all of it.

Scales are those of the local operands. Per block and per 32 they are the scales of one process, if shards end where
blocks do, and so are the results, up to the order of sums. Per tensor, a shard has a scale of its own.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from octavo.nn import held
from octavo.nn.linear_function import linear
from octavo.nn.sequence import SequenceShard, gathered_linear
from octavo.ops.weight import Weight


class Layout(NamedTuple):
    """The placements of a product on one dimension of a mesh: of y, and of the gradients of x, w and the bias."""

    y: Placement
    dx: Placement
    dw: Placement
    dbias: Placement


def layout_of(x: Placement, w: Placement, dims: int) -> Layout | None:
    """The layout of `x · wᵀ`, where x has `dims` dimensions; None if these placements cannot be multiplied locally."""
    features = Shard(dims - 1)
    if w.is_replicate() and x.is_replicate():
        return Layout(x, x, w, w)
    if w.is_replicate() and x.is_shard() and _dim(x, dims) != features.dim:
        tokens = Shard(_dim(x, dims))
        return Layout(tokens, tokens, Partial(), Partial())
    if _is_plain_shard(w, 0) and x.is_replicate():
        return Layout(features, Partial(), Shard(0), Shard(0))
    if _is_plain_shard(w, 1) and x.is_shard() and _dim(x, dims) == features.dim:
        return Layout(Partial(), features, Shard(1), Replicate())
    return None


def linear_on_mesh(module: Any, x: Tensor) -> Tensor:
    """Compute an `FP8Linear` whose input or weight is a DTensor."""
    weight = module.weight
    if not isinstance(x, DTensor) or not isinstance(weight, DTensor) or x.device_mesh != weight.device_mesh:
        raise ValueError(_unlike(module, x))
    if held.current() is not None or module.fp8_only is not None:
        what = "a rollout holds" if module.fp8_only is None else "offload_master keeps"
        raise ValueError(f"{what} weights in FP8 alone, and those of this FP8Linear are sharded by tensor parallelism")
    if x.shape[-1] != module.in_features:
        raise ValueError(f"input has {x.shape[-1]} features; this FP8Linear takes {module.in_features}")
    shard = _sequence_of(x, weight)
    if shard is not None:
        return _from_sequence(module, x, weight, shard)
    layouts = [layout_of(*each, x.dim()) for each in zip(x.placements, weight.placements, strict=True)]
    if any(layout is None for layout in layouts):
        raise ValueError(
            f"input {x.placements} and weight {weight.placements} of an FP8Linear: a product runs on local shards "
            "where x is replicated and w sharded by rows or not at all, or both are sharded along in_features, or x "
            "along tokens and w not at all; redistribute the input before"
        )
    known: list[Layout] = [layout for layout in layouts if layout is not None]
    x_local = x.to_local(grad_placements=[layout.dx for layout in known])
    w_local = local_weight(weight, [layout.dw for layout in known])
    bias, added_later = _local_bias(module, weight, known)
    y = multiply(module, x_local, w_local, None if added_later else bias)
    if added_later:
        y = _AddOnce.apply(y, bias, _is_first(weight, known))
    return as_dtensor(y, weight.device_mesh, [layout.y for layout in known], (*x.shape[:-1], module.out_features))


def multiply(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of local tensors, by the recipe and with the scaling state of an `FP8Linear`."""
    if x.numel() == 0 or weight.numel() == 0:
        return torch.nn.functional.linear(x, weight, bias)
    return linear(x, Weight([weight], state=module.state_w), module.spec(x), module.states, bias=bias)


def local_weight(weight: DTensor, gradients: list[Placement]) -> Tensor:
    """The part of a weight or a bias that this rank holds; its gradient will be placed so.

    A gradient that is Partial is summed over the ranks in backward: optimisers take it as they take the Parameter.
    """
    if any(placement.is_partial() for placement in gradients):
        weight = weight.redistribute(placements=weight.placements)
    return weight.to_local(grad_placements=gradients)


def as_dtensor(y: Tensor, mesh: DeviceMesh, placements: list[Placement], shape: tuple[int, ...]) -> DTensor:
    """A local result as part of a whole of this shape; ranks may hold different amounts of it."""
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * size)
    return DTensor.from_local(y, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


def _from_sequence(module: Any, x: DTensor, weight: DTensor, shard: SequenceShard) -> DTensor:
    w_local = local_weight(weight, [Shard(0)])
    bias = None if module.bias is None else module.bias.to_local(grad_placements=[Shard(0)])
    y = gathered_linear(x.to_local(), shard, Weight([w_local], state=module.state_w), module, bias)
    return as_dtensor(y, weight.device_mesh, [Shard(-1)], (*x.shape[:-1], module.out_features))


def _sequence_of(x: DTensor, weight: DTensor) -> SequenceShard | None:
    """How the tokens of x are sharded, where the weight is parallel by columns; None if they are not."""
    if x.device_mesh.ndim != 1 or not _is_plain_shard(weight.placements[0], 0):
        return None
    place = x.placements[0]
    if not place.is_shard() or _dim(place, x.dim()) == x.dim() - 1:
        return None
    return SequenceShard(x.device_mesh.get_group(), _dim(place, x.dim()), tuple(x.shape))


def _local_bias(module: Any, weight: DTensor, layouts: list[Layout]) -> tuple[Tensor | None, bool]:
    """The bias that this rank adds, and whether only after the product: on one rank, as y is yet to be summed."""
    if module.bias is None:
        return None, False
    if not isinstance(module.bias, DTensor):
        raise ValueError(f"bias of an FP8Linear is a plain tensor beside a weight on {weight.device_mesh}: shard both")
    return local_weight(module.bias, [layout.dbias for layout in layouts]), any(x.y.is_partial() for x in layouts)


def _is_first(weight: DTensor, layouts: list[Layout]) -> bool:
    """Whether this rank is the first along those dimensions of the mesh over which y will be summed."""
    place = weight.device_mesh.get_coordinate()
    assert place is not None
    return all(at == 0 for at, layout in zip(place, layouts, strict=True) if layout.y.is_partial())


class _AddOnce(torch.autograd.Function):
    """y + bias on one rank, y on the others; the gradient of the bias on all of them."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, adds: bool) -> Tensor:
        ctx.dtype = bias.dtype
        return y + bias.to(y.dtype) if adds else y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        return g, g.float().flatten(0, -2).sum(0).to(ctx.dtype), None


def _dim(place: Placement, dims: int) -> int:
    assert isinstance(place, Shard)
    return place.dim % dims


def _is_plain_shard(place: Placement, dim: int) -> bool:
    """Whether a matrix is sharded along this dimension, and not in strides, as packed weights are."""
    return type(place) is Shard and place.dim % 2 == dim


def _unlike(module: Any, x: Tensor) -> str:
    if isinstance(x, DTensor) and isinstance(module.weight, DTensor):
        return f"input on {x.device_mesh}, weight on {module.weight.device_mesh}: an FP8Linear takes both on one mesh"
    if isinstance(x, DTensor):
        return (
            f"input of an FP8Linear is a DTensor {x.placements}, and its weight is not: name this linear in the plan "
            "of parallelize_module, or have the module before return a local tensor (use_local_output=True)"
        )
    return (
        f"weight of an FP8Linear is a DTensor {module.weight.placements}, and its input is not: call the module that "
        "was sharded (parallelize_module and fully_shard bring weight and input together in its hooks)"
    )
