"""Sequence parallelism: the tokens of x are sharded, and gathered in FP8 for the products that take all of them.

Each of R ranks has m of the M tokens, and the rows of w that it is to multiply by:

    forward    x_mK → xq_mK → all-gather → xq_MK     y_MN = xq · wqᵀ
    backward   g_MN → gq    dx_MK = gq · wq          → reduce-scatter → dx_mK
               x_mK → xqT_Km → all-gather → xqT_KM   dw_NK = gqT · xqTᵀ

x is quantised before it is sent, a byte an element, and not after: with the same bits, because scales are those of
single rows. dw contracts over tokens, and takes x quantised along them:

    tensor         the same bytes as the rows: they are kept, and nothing is sent in backward
    block, mx      the rank saves its x_mK, and its columns are sent in backward: scales of 128 or 32 tokens, which are
                   its own where it has whole groups of them; elsewhere x is sent as it is, and quantised on arrival
    channel        one scale per column of all tokens: K numbers are agreed on in backward (all-reduce, MAX)

A scale for the whole tensor is agreed on before: two numbers of each rank, its amax and whether all was finite. So it
holds the tokens of every rank, and the scaling state of x is the same on all of them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from octavo.nn.collectives import all_gather, reduce_scatter
from octavo.nn.linear_function import States
from octavo.nn.shapes import with_leading
from octavo.numerics import OperandRecipe, Quantized
from octavo.numerics.amax import finite_amax, mask_non_finite
from octavo.numerics.operand import choose_scale
from octavo.numerics.quantize import granularity_of, quantize_by, scale_from_amax
from octavo.numerics.scaling import SCALE, record_use
from octavo.ops import linear as linear_ops
from octavo.ops import mlp as mlp_ops
from octavo.ops.adapters import NO_ADAPTERS
from octavo.ops.linear import Call, LinearSpec, missing_rows, padded
from octavo.ops.mlp import MLPCall, MLPSpec
from octavo.ops.packed import pack_rows, unpack_rows
from octavo.ops.quantize import pack_scale, quantize, unpack_scale
from octavo.ops.weight import Weight


class SequenceShard(NamedTuple):
    """How tokens are sharded: over which ranks, and along which dimension of x, whose shape on all of them is given."""

    group: ProcessGroup
    dim: int
    shape: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return self.group.size()

    @property
    def runs(self) -> tuple[int, int]:
        """Tokens as (runs, tokens of a run on one rank): those of a rank are one piece of each run."""
        before = 1
        for size in self.shape[: self.dim]:
            before *= size
        tokens = 1
        for size in self.shape[:-1]:
            tokens *= size
        return before, tokens // before // self.ranks

    def check(self) -> None:
        if self.shape[self.dim] % self.ranks:
            raise ValueError(
                f"{self.shape[self.dim]} tokens on {self.ranks} ranks: sequence parallelism gathers equal parts; pad "
                f"sequences to a multiple of {self.ranks}"
            )

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The rows `[m, W]` of all ranks, `[M, W]`, in the order of tokens."""
        count, length = self.runs
        whole = all_gather(rows, self.group)
        return whole if count == 1 else whole.view(self.ranks, count, length, -1).transpose(0, 1).flatten(0, 2)

    def gather_columns(self, columns: Tensor) -> Tensor:
        """The columns `[K, m / g]` of all ranks, `[K, M / g]`; g tokens to a column."""
        count, _ = self.runs
        whole = all_gather(columns, self.group).view(self.ranks, columns.shape[0], count, -1)
        return whole.permute(1, 2, 0, 3).reshape(columns.shape[0], -1)

    def scatter_rows(self, rows: Tensor) -> Tensor:
        """The sum over ranks of `[M, W]`, of which this rank gets its `[m, W]`."""
        count, length = self.runs
        pieces = rows.view(count, self.ranks, length, -1).transpose(0, 1).contiguous()
        return reduce_scatter(pieces.view(-1, rows.shape[1]), self.group)

    def agree(self, *numbers: Tensor) -> list[Tensor]:
        """The largest of each of these numbers on all ranks."""
        stacked = torch.stack([number.float() for number in numbers])
        distributed.all_reduce(stacked, op=distributed.ReduceOp.MAX, group=self.group)
        return list(stacked.unbind())


def why_not_gathered(recipe: OperandRecipe | None) -> str:
    """Why an input of this recipe cannot be gathered in FP8; empty if it can."""
    if recipe is None:
        return "its products are in high precision"
    if recipe.percentile is not None:
        return f"percentile={recipe.percentile}: it is a percentile of all tokens, which no rank has"
    return ""


def gathered_linear(x: Tensor, shard: SequenceShard, weight: Weight, module: Any, bias: Tensor | None) -> Tensor:
    """Compute `x[..., K]` of all ranks times the trained weights `[Nᵢ, K]` of this rank, as `module` would."""
    shard.check()
    spec = module.spec(x)
    _refuse(spec.x)
    rows = x.reshape(-1, x.shape[-1])
    y = _GatheredLinear.apply(rows, bias, shard, spec, module.states, weight.state, *weight.parts)
    return with_leading(y, shard.shape[:-1])


def gathered_mlp(
    x: Tensor,
    shard: SequenceShard,
    gate_up: Weight,
    down: Weight,
    mlp: MLPSpec,
    states: States,
    states_down: States,
) -> Tensor:
    """Compute `x[..., K]` of all ranks through a gated MLP of trained weights, of which this rank has a part."""
    shard.check()
    _refuse(mlp.linear.x)
    rows = x.reshape(-1, x.shape[-1])
    y = _GatheredMLP.apply(
        rows, shard, mlp, (states, states_down), (gate_up.state, down.state), *gate_up.parts, *down.parts
    )
    return with_leading(y, shard.shape[:-1])


def _refuse(recipe: OperandRecipe | None) -> None:
    reason = why_not_gathered(recipe)
    if reason:
        raise ValueError(f"x cannot be gathered in FP8: {reason}; gather it before (ColwiseParallel does)")


def _send_rows(x: Tensor, state: Tensor, spec: LinearSpec, shard: SequenceShard) -> Tensor:
    """Quantise and gather x. Returns all rows, packed."""
    assert spec.x is not None
    if spec.x.granularity == "tensor":
        quantized = _by_one_scale(x, state, spec.x, shard, record=spec.record)
    else:
        quantized = quantize(x, state, spec.x, record=spec.record, layout="rows")[0]
    return shard.gather_rows(pack_rows(quantized))


def _by_one_scale(x: Tensor, state: Tensor, recipe: OperandRecipe, shard: SequenceShard, *, record: bool) -> Quantized:
    """Quantise by a scale that all ranks agree on, and record its use; not what it saturates."""
    top, finite = finite_amax(x)
    amax, non_finite = shard.agree(top, ~finite)
    scale = choose_scale(state, amax, recipe, record=record)
    if record:
        record_use(state, amax, non_finite)
        state[SCALE] = torch.where(amax > 0, scale, state[SCALE])
    return quantize(x, state, recipe, record=False, layout="rows", scale=scale)[0]


def _columns(saved: Tensor, state: Tensor, spec: LinearSpec, shard: SequenceShard) -> tuple[Tensor, Tensor, str]:
    """x of all ranks as dw takes it, its scale, and how it is saved: as operators of backward expect it.

    `saved`: what `_to_save` gave.
    """
    recipe = spec.x
    assert recipe is not None
    if recipe.granularity == "tensor":
        rows = unpack_rows(padded(saved, spec), saved.shape[1] - 4, recipe)
        return rows.data, rows.scale, "rows"
    granularity = recipe.columns or recipe.granularity
    group = granularity_of(granularity, recipe.block).columns
    if granularity == "channel":
        columns = _by_column_scales(saved, recipe, shard)
        scale = columns.scale
    elif group is None or shard.runs[1] % group:
        return shard.gather_rows(saved), saved.new_empty(0, dtype=torch.float32), ""
    else:
        columns = quantize(saved, state, recipe, record=False, layout="columns")[0]
        scale = shard.gather_columns(pack_scale(columns.scale))
    data = shard.gather_columns(columns.data.view(torch.uint8))
    missing = missing_rows(data.shape[1], spec, data.device)
    if missing:
        data = torch.nn.functional.pad(data, (0, missing))
        scale = (
            scale if group is None else torch.nn.functional.pad(scale, (0, -(-data.shape[1] // group) - scale.shape[1]))
        )
    return data.view(columns.data.dtype), unpack_scale(scale), "columns"


def _by_column_scales(x: Tensor, recipe: OperandRecipe, shard: SequenceShard) -> Quantized:
    """The columns `[K, m]` of x by scales of all tokens, `[K, 1]`."""
    (amax,) = shard.agree(mask_non_finite(x).abs().amax(dim=0).float())
    scale = scale_from_amax(amax, recipe.format, recipe.margin)[:, None]
    return quantize_by(x.mT, scale, recipe.format, recipe.rounding)


def _to_save(x: Tensor, packed: Tensor, spec: LinearSpec, needed: bool) -> Tensor | None:
    """The part of x that backward needs: all rows in FP8, where columns have the same bytes, else this rank's own."""
    assert spec.x is not None
    if not needed:
        return None
    return packed if spec.x.granularity == "tensor" else x


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        shard: SequenceShard,
        spec: LinearSpec,
        states: States,
        state_w: Tensor | None,
        *parts: Tensor,
    ) -> Tensor:
        packed = _send_rows(x, states[0], spec, shard)
        call = Call.encode(spec, "", True, x.dtype, NO_ADAPTERS)
        y, _, _, _, w_scale = linear_ops.linear(
            packed, states[0], list(parts), [], state_w, bias, None, None, 0.0, [], call
        )
        ctx.save_for_backward(_to_save(x, packed, spec, any(ctx.needs_input_grad[6:])), w_scale, *parts)
        ctx.shard, ctx.spec, ctx.states, ctx.state_w, ctx.x_dtype = shard, spec, states, state_w, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved, w_scale, *parts = ctx.saved_tensors
        needs_x, needs_bias = ctx.needs_input_grad[:2]
        needs_w = ctx.needs_input_grad[6:]
        spec, (state_x, state_g) = ctx.spec, ctx.states
        x: Sequence[Tensor | None] = (None, None)
        how = ""
        if saved is not None:
            *x, how = _columns(saved, state_x, spec, ctx.shard)
        call = Call.encode(spec, how, True, ctx.x_dtype, NO_ADAPTERS)
        scales = [w_scale] if w_scale.numel() else []
        needs = [needs_x, any(needs_w), False, False]
        dx, dw, _, _ = linear_ops.linear_backward(
            g.contiguous(), state_g, [*x, None], list(parts), scales, ctx.state_w, [], call, needs
        )
        dws = dw.split([part.shape[0] for part in parts]) if any(needs_w) else [None] * len(parts)
        dbias = g.float().sum(dim=0).to(ctx.bias_dtype) if needs_bias else None
        own = ctx.shard.scatter_rows(dx) if needs_x else None
        return own, dbias, None, None, None, None, *(d if n else None for d, n in zip(dws, needs_w, strict=True))


class _GatheredMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shard: SequenceShard,
        mlp: MLPSpec,
        states: tuple[States, States],
        states_w: tuple[Tensor | None, Tensor | None],
        gate: Tensor,
        up: Tensor,
        down: Tensor,
    ) -> Tensor:
        spec = mlp.linear
        packed = _send_rows(x, states[0][0], spec, shard)
        call = MLPCall.encode(mlp, False, "", True, x, NO_ADAPTERS, NO_ADAPTERS)
        y, _, _, *saved, w_scale, w_down_scale = mlp_ops.gated_mlp(
            packed, states[0][0], states[1][0], [gate, up], [], states_w[0], [down], [], states_w[1],
            None, None, 0.0, [], call,
        )  # fmt: skip
        needed = ctx.needs_input_grad[5] or ctx.needs_input_grad[6]
        ctx.save_for_backward(_to_save(x, packed, spec, needed), *saved, w_scale, w_down_scale, gate, up, down)
        ctx.shard, ctx.mlp, ctx.states, ctx.states_w = shard, mlp, states, states_w
        ctx.like = x.new_empty(0)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x_saved, *saved, w_scale, w_down_scale, gate, up, down = ctx.saved_tensors
        needs_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        ((state_x, state_dgate_up), (_, state_g)), (state_w, state_w_down) = ctx.states, ctx.states_w
        spec = ctx.mlp.linear
        x, how = [g.new_empty(0), g.new_empty(0)], ""
        if x_saved is not None:
            *x, how = _columns(x_saved, state_x, spec, ctx.shard)
        call = MLPCall.encode(ctx.mlp, False, how, True, ctx.like, NO_ADAPTERS, NO_ADAPTERS)
        scales = [[scale] if scale.numel() else [] for scale in (w_scale, w_down_scale)]
        dx, dgate_up, ddown, *_ = mlp_ops.gated_mlp_backward(
            g.contiguous(), state_g, state_dgate_up, [*x, *saved], [gate, up], scales[0], state_w, [down], scales[1],
            state_w_down, [], call, [needs_x, needs[0] or needs[1], needs[2], False, False, False, False],
        )  # fmt: skip
        halves = dgate_up.split([gate.shape[0], up.shape[0]]) if needs[0] or needs[1] else (None, None)
        gradients = (*halves, ddown)
        own = ctx.shard.scatter_rows(dx) if needs_x else None
        return own, None, None, None, None, *(d if n else None for d, n in zip(gradients, needs, strict=True))
