"""Parameters whose bits FSDP2 must gather as they are: frozen FP8 weights and their scales, which are integers.

With `MixedPrecisionPolicy(param_dtype=…)`, FSDP2 of torch 2.11 casts what it gathers, integers too: the bits of a scale
would become some number. torch 2.13 leaves integers alone. FSDP2 gathers a tensor with `fsdp_pre_all_gather` and
`fsdp_post_all_gather` by these instead, so where it casts integers, shards get the two, which send and take bytes.

With one rank a shard is all there is. FSDP2 copies it in every gather; by the two functions it is taken as it is, which
saves the copy and its memory.

FSDP2 of torch 2.11 also has each shard require gradients for a moment, which integers cannot. There its Parameters are
made by `ShardParameter`.
"""

import inspect
import weakref
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def gather_as_is(parameter: DTensor) -> None:
    """Have FSDP2 gather this sharded parameter without a cast. Call it before FSDP2 looks: when it sets the shard."""
    shard = parameter._local_tensor  # the very object that FSDP2 looks at: `to_local` may return another
    there = shard.is_meta or shard.device.type == parameter.device_mesh.device_type  # else a copy is gathered
    wanted = casts_integers() or parameter.device_mesh.size() == 1
    if wanted and there and not parameter.requires_grad and not hasattr(shard, "fsdp_pre_all_gather"):
        hooks: Any = shard
        hooks.fsdp_pre_all_gather = with_signature(partial(_send, weakref.ref(shard)), 5)
        hooks.fsdp_post_all_gather = _take


def with_signature(hook: Any, count: int) -> Any:
    """Return a partial function that tells `inspect` at once how many arguments it takes.

    FSDP2 asks in every gather of every parameter. Of a partial function, Python takes some 20 µs to find out.
    """
    hook.__signature__ = _signature(count)
    return hook


@cache
def _signature(count: int) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Signature([inspect.Parameter(f"argument_{i}", kind) for i in range(count)])


class _IsParameter(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, nn.Parameter)


class ShardParameter(metaclass=_IsParameter):
    """`nn.Parameter` as FSDP2 of torch 2.11 needs it: integers do not require gradients."""

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        return nn.Parameter(data, requires_grad=requires_grad and data.is_floating_point())


@cache
def let_integers_be_sharded() -> None:
    """Have this torch's FSDP2 shard integers, if it cannot."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    source = inspect.getsource(_fsdp_param.FSDPParam._init_sharded_param)
    if "nn.Parameter(self.to_sharded_dtensor(sharded_param))" in source:
        module: Any = _fsdp_param
        module.nn = SimpleNamespace(**{**vars(nn), "Parameter": ShardParameter})


@cache
def casts_integers() -> bool:
    """Return whether this torch's FSDP2 casts integers under a policy for mixed precision; asks its rule."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    asked: Any = SimpleNamespace(sharded_param=torch.empty(0, dtype=torch.uint8))
    FSDPParam.init_dtype_attrs(asked, MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return asked.param_dtype is not None


def _send(
    reference: "weakref.ref[Tensor]", mesh: Any, outer_size: torch.Size, _stride: Any, _module: Any, _policy: Any
) -> tuple[tuple[Tensor], Tensor | None]:
    """Return the shard, padded to the rows that the first rank has: all ranks send as much.

    With one rank, return a tensor of one element, and beside it the shard itself.
    """
    shard = reference()
    assert shard is not None
    if mesh.size() == 1 and shard.is_contiguous() and shard.storage_offset() == 0:
        return (shard.new_empty(1),), shard
    rows = -(-outer_size[0] // mesh.size())
    if shard.shape[0] < rows:
        padded = shard.new_zeros((rows, *shard.shape[1:]))
        padded[: shard.shape[0]] = shard
        return (padded,), None
    return (shard,), None


def _take(gathered: tuple[Tensor, ...], whole: Tensor | None, _dtype: Any, *, out: Any = None) -> Any:
    """Return what was gathered, in whose memory later gathers are, or the shard that is all there is."""
    if out is None:
        return (gathered[0] if whole is None else whole, ())
    if whole is not None and out.data_ptr() != whole.data_ptr():
        out.data = whole.view(out.shape)  # the shard is another tensor now
    return None
