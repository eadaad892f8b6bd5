"""Tensor parallelism of fused pieces: q, k and v as one product, a gated MLP as one function, on local weights.

    parallelize_module(model, mesh, plan)      # torch's, before convert_to_fp8 or after it
    octavo.fp8_sequence_gather(model)          # where tokens are sharded, too: x is gathered in FP8

A linear alone multiplies what its rank holds (`nn/parallel.py`). A fused piece has the input of all its linears brought
into place once, and its output once; h of an MLP, its widest tensor, never leaves the rank:

    x → q, k, v by columns → heads of this rank → o by rows → sum over ranks
    x → gate, up by columns → h of this rank → down by rows → sum over ranks
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from octavo.nn import mlp_function
from octavo.nn.linear import FP8Linear
from octavo.nn.linear_function import linear
from octavo.nn.loss import linear_cross_entropy
from octavo.nn.parallel import local_weight
from octavo.nn.sequence import SequenceShard, gathered_linear, gathered_mlp, why_not_gathered
from octavo.nn.sharded import is_sharded
from octavo.nn.styles import (
    COLUMNS,
    ROWS,
    ShardedInput,
    Style,
    enter,
    leave,
    place,
    prepared_inputs,
    style_of,
)
from octavo.nn.vocabulary import Vocabulary
from octavo.ops.mlp import MLPSpec
from octavo.ops.weight import Weight


def is_parallel(*linears: Any) -> bool:
    """Whether one of these linears is parallel: FSDP2 shards weights, too, but not while its units are called."""
    known = [linear for linear in linears if isinstance(linear, nn.Linear)]  # others may wrap one
    return any(is_sharded(linear.weight) and style_of(linear) is not None for linear in known)


def outputs_of(linear: Any) -> int:
    """The outputs of a linear that this rank computes."""
    return linear.weight.to_local().shape[0] if is_parallel(linear) else linear.out_features


def linear_group(bases: Sequence[Any], x: Tensor) -> Tensor | None:
    """The outputs of this rank of linears with one input, side by side; None if they have to be called one by one."""
    style = _style_of_group(bases)
    if style is None:
        return None
    one = bases[0]
    weight = _weight_of(bases, Shard(0))
    biases = [base.bias.to_local(grad_placements=[Shard(0)]) for base in bases if base.bias is not None]
    if biases and len(biases) != len(bases):
        return None
    bias = torch.cat(biases) if biases else None
    shard = _sequence_of(bases, x, style)
    if shard is not None:
        return gathered_linear(_local(x, style), shard, weight, one, bias)
    x = enter(x, style)
    return linear(x, weight, one.spec(x), one.states, bias=bias)


def gated_mlp(bases: Sequence[Any], activation: str, x: Tensor) -> Tensor | None:
    """The output of a gated MLP; None if its linears have to be called one by one."""
    gate, up, down = bases
    style, style_down = _style_of_group((gate, up)), style_of(down)
    if style is None or style_down is None or type(down) is not FP8Linear or style_down.mesh != style.mesh:
        return None
    if style_down.by != ROWS or not _is_last(style_down.input, x.dim()):
        return None
    gate_up, weight_down = _weight_of((gate, up), Shard(0)), _weight_of((down,), Shard(1))
    shard = _sequence_of((gate, up), x, style)
    if shard is None:
        x = enter(x, style)
        spec = MLPSpec(gate.spec(x), activation, saves_fp8=gate.config.activations == "fp8")
        y = mlp_function.gated_mlp(x, gate_up, weight_down, spec, gate.states, down.states)
    else:
        local = _local(x, style)
        spec = MLPSpec(gate.spec(local), activation, saves_fp8=gate.config.activations == "fp8")
        y = gathered_mlp(local, shard, gate_up, weight_down, spec, gate.states, down.states)
    return leave(y, style_down)


def head_loss(lm_head: Any, hidden: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """`linear_cross_entropy` of a head, which may be parallel by columns: each rank then has a part of the vocabulary.

    Hidden states come as the head's style says: of all tokens, or of a part of them, where labels are of all.
    """
    weight = lm_head.weight
    style = style_of(lm_head)
    if style is None or not isinstance(weight, DTensor):
        return linear_cross_entropy(hidden, weight, labels, **options)
    if style.by != COLUMNS or weight.placements != (Shard(0),):
        raise ValueError(
            f"the head is parallel by {style.by}, its weight {weight.placements}: the loss in chunks takes a head that "
            "is parallel by columns (ColwiseParallel), or on each rank; restore(model) gives transformers' own loss"
        )
    ((rows, _), (start, _)) = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    vocabulary = Vocabulary(style.mesh.get_group(), start, rows, weight.shape[0])
    own = local_weight(weight, [Shard(0)])
    return linear_cross_entropy(enter(hidden, style), own, labels, vocabulary=vocabulary, **options)


def fp8_sequence_gather(model: nn.Module) -> int:
    """Gather inputs whose tokens are sharded in FP8 from now on: a byte an element. Returns for how many linears.

    For a model that `convert_to_fp8` and `parallelize_module` have seen, with linears parallel by columns that take
    tokens sharded by `SequenceParallel`, as `ColwiseParallel(input_layouts=Shard(1))` or by a `PrepareModuleInput`
    around them. What they compute has the same bits: x is quantised before it is sent and not after.
    """
    count = 0
    for name, module in model.named_modules():
        style = style_of(module) if type(module) is FP8Linear else None
        if style is not None and style.by == COLUMNS and isinstance(style.input, Shard):
            _take_sharded_input(name, module, style)
            count += 1
        for key, prepared, mesh in prepared_inputs(module):
            count += _leave_sharded(name, module, key, prepared, mesh)
    if not count:
        raise ValueError(
            f"{type(model).__name__} has no FP8 linear that gathers tokens: call convert_to_fp8 and parallelize_module "
            "first, with ColwiseParallel(input_layouts=Shard(1)), or PrepareModuleInput from Shard(1) to Replicate"
        )
    return count


def _take_sharded_input(name: str, module: Any, style: Style) -> None:
    _refuse(name, module)
    (key,) = module._forward_pre_hooks
    module._forward_pre_hooks[key] = ShardedInput(style)
    module.gathers_in_fp8 = True


def _leave_sharded(name: str, module: nn.Module, key: int, prepared: Any, mesh: Any) -> int:
    """Have a `PrepareModuleInput` leave tokens sharded, if the linears that take them are one product."""
    layouts = [*zip(prepared.input_layouts or (), prepared.desired_input_layouts or (), strict=True)]
    layouts += [(x, prepared.desired_input_kwarg_layouts[at]) for at, x in prepared.input_kwarg_layouts.items()]
    gathers = [x for x, y in layouts if isinstance(x, Shard) and y is not None and y.is_replicate()]
    linears = [child for child in module.children() if type(child) is FP8Linear]
    takers = [child for child in linears if getattr(style_of(child), "by", None) == COLUMNS]
    if not gathers or not takers:
        return 0
    if len({id(taker.state_x) for taker in takers}) > 1:
        raise ValueError(
            f"{name}: {len(takers)} linears take its tokens, each by itself, and each would gather them: only linears "
            "that are one product can gather in FP8 here; give each ColwiseParallel(input_layouts=Shard(1))"
        )
    for taker in takers:
        _refuse(name, taker)
        taker.gathers_in_fp8 = True
    left = copy.copy(prepared)
    left.desired_input_layouts, left.desired_input_kwarg_layouts = left.input_layouts, left.input_kwarg_layouts
    left.use_local_output = False
    hook = left._prepare_input_kwarg_fn if left.with_kwargs else left._prepare_input_fn
    module._forward_pre_hooks[key] = lambda _, *inputs: hook(*inputs, mesh)
    return len(takers)


def _refuse(name: str, module: Any) -> None:
    reason = why_not_gathered(module.recipe.x)
    if reason:
        raise ValueError(f"{name}: x cannot be gathered in FP8: {reason}")


def _style_of_group(bases: Sequence[Any]) -> Style | None:
    """The style that all of these linears have, parallel by columns with outputs that stay on their rank; else None."""
    if not all(type(base) is FP8Linear and base.state_x is bases[0].state_x for base in bases):
        return None
    styles = {style_of(base) for base in bases}
    style = styles.pop()
    if styles or style is None or style.by != COLUMNS or not style.local_output or not is_parallel(*bases):
        return None
    return style if isinstance(style.output, Shard) and style.output.dim == -1 else None


def _weight_of(bases: Sequence[Any], gradient: Shard) -> Weight:
    return Weight([local_weight(base.weight, [gradient]) for base in bases], state=bases[0].state_w)


def _sequence_of(bases: Sequence[Any], x: Tensor, style: Style) -> SequenceShard | None:
    """How the tokens of x are sharded, where it is to be gathered in FP8; else None."""
    if not all(base.gathers_in_fp8 for base in bases):
        return None
    whole = place(x, style.mesh, style.input)
    (placement,) = whole.placements
    if not isinstance(placement, Shard):
        return None
    return SequenceShard(style.mesh.get_group(), placement.dim % whole.dim(), tuple(whole.shape))


def _local(x: Tensor, style: Style) -> Tensor:
    return place(x, style.mesh, style.input).to_local()


def _is_last(placement: Any, dims: int) -> bool:
    return isinstance(placement, Shard) and placement.dim % dims == dims - 1
