"""FSDP2 that gathers the weights of FP8 linears in FP8: one byte an element instead of two or four.

FSDP2 asks the local tensor of a shard for two functions: `fsdp_pre_all_gather` returns what this rank sends, and
`fsdp_post_all_gather` makes a weight of what has arrived. `fp8_all_gather(model)`, called after `fully_shard`, sets
them as attributes on the plain local tensors that FSDP2 holds already. So Parameters stay plain DTensors for
optimisers, gradients and checkpoints; only what travels, and what linears see between gather and reshard, is in FP8.

    before forward     this rank's rows → FP8 (`shards.py`) → all-gather → `GatheredWeight` → products
    before backward    the same again. Per channel and mx in the other direction: dx contracts over N
    after step         one all-reduce of the maxima that span ranks (`amax.py`)

Values and scales are those that whole weights would be quantised to, so results have the same bits as without. Under
`MixedPrecisionPolicy(param_dtype=…)` those are weights in `param_dtype`: a shard is cast before it is measured and
quantised, as FSDP2 casts it before it is gathered.
Weights that a unit keeps from forward to backward (`reshard_after_forward=False`) are gathered once: per channel and mx
in both directions, two bytes an element. So they are for backward where activations are computed again.

What this reads of FSDP2 beyond its documented interface is in `_NAMES`; `tests/dist/test_gather.py` pins it. With one
rank FSDP2 copies the first tensor that is sent and forgets the others. There all go by the metadata, without a copy.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.dist.amax import AmaxExchange, exchange_of, require_ranks
from octavo.dist.collectives import all_gather
from octavo.dist.shards import Product, ProductScales, Shard
from octavo.nn.bits import with_signature
from octavo.nn.gathered import GatheredWeight
from octavo.nn.groups import linears_by_product
from octavo.nn.linear import FP8Linear
from octavo.numerics import Quantized
from octavo.ops.weight import Weight

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
# Names that are read, by class in torch.distributed.fsdp._fully_shard.
_NAMES = {
    "FSDPParam": ("_init_extensions", "_sharded_local_tensor", "init_unsharded_param", "all_gather_inputs"),
    "FSDPParamGroup": ("_reshard_after_forward", "_use_post_forward_mesh", "reshard"),
    "a sharded parameter": (
        *("all_gather_outputs", "_unsharded_inner_tensors", "padded_sharded_param_size", "fsdp_placement"),
        *("_module_info", "sharded_param", "offload_to_cpu", "is_dtensor"),
    ),
    "a unit": ("fsdp_params", "_training_state", "mesh_info", "mp_policy"),
}


class GatheredMember:
    """One sharded weight: the two functions that FSDP2 calls, and what the last gather brought."""

    def __init__(self, gathers: "FP8Gather", linear: FP8Linear, parameter: Any, unit: Any, start: int) -> None:
        self.gathers, self.linear, self.parameter, self.unit = gathers, linear, parameter, unit
        self.chunk = parameter.padded_sharded_param_size[0]
        rank, self.world = unit.mesh_info.shard_mesh_rank, unit.mesh_info.shard_mesh_size
        self.shard = Shard(linear.out_features, self.chunk, rank * self.chunk, start)
        self.shape = torch.Size([linear.out_features, linear.in_features])
        self.dtype, self.device = linear.weight.dtype, self.local().device
        self.product: Product
        self.members: Sequence[GatheredMember]
        self._version = (-1, -1)  # of the shard, when maxima were measured
        self._sent: tuple[Any, ...] = ()  # shapes and dtypes that FSDP2 has buffers for
        self._held: dict[str, Quantized] = {}  # by layout
        self._pre = with_signature(partial(self.pre), 1)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a sharded parameter itself cannot be pickled or copied while fp8_all_gather is in use: save "
            "model.state_dict(), or torch.distributed.checkpoint, or call remove() first"
        )

    def local(self) -> Tensor:
        """Return this rank's rows, and take note of which values they are."""
        self._version = self._newest_version()
        return self._values()

    def _values(self) -> Tensor:
        """This rank's rows as plain FSDP2 gathers them: a cast copy where the policy says so."""
        shard: Tensor = self.parameter._sharded_local_tensor.detach()
        return shard.to(self.unit.mp_policy.param_dtype or shard.dtype)

    def _newest_version(self) -> tuple[int, int]:
        """Count writes: to the DTensor, which do not show in its local tensor, and to that one."""
        return self.parameter.sharded_param._version, self.parameter._sharded_local_tensor._version

    def pre(self, _mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """Return what this rank sends: values of one layout or two, each with its scales unless all ranks know them."""
        if self.product.shared:
            if self._newest_version() != self._version:
                self.gathers.refresh()
            # Evaluation leaves no trace, as where weights are whole: they may be others for its time, such as averages.
            self.gathers.use(records=self.linear.training)
        layouts = self._wanted()
        tensors = self._quantized(*layouts)
        if self.world == 1:
            self.parameter._unsharded_inner_tensors = []
            return (tensors[0].new_empty(1),), (layouts, tensors)
        sent = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if sent != self._sent:
            self.parameter.all_gather_outputs = []  # made anew; these have no memory between reshard and gather
            self._sent = sent
        return tuple(tensors), (layouts, [])

    def post(self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        """Hold what has arrived; the first time, return the weight that linears will see."""
        layouts, own = metadata
        arrived = iter(own or outputs)
        self._held = {layout: self._whole(layout, arrived) for layout in layouts}
        if out is not None:
            self.parameter._unsharded_inner_tensors = own  # whose memory FSDP2 frees with the rest of the unit
            return None
        self.dtype, self.device = dtype, outputs[0].device
        return GatheredWeight(self), own

    def together(self, weights: Sequence[GatheredWeight], use: str) -> Weight:
        """Return these weights as one right operand; this one is the first."""
        members: Sequence[Any] = [weight.source for weight in weights]
        layout = self.product.layouts[0 if use == "forward" else -1]
        parts = [member._layout(layout) for member in members]
        data, scales = [part.data for part in parts], [part.scale for part in parts]
        if layout in self.product.shared:
            scales = [self.product.scales[layout] if len(members) > 1 else self.product.scale_of(layout, self.shard)]
            if len(members) > 1 and list(members) != list(self.members):
                raise RuntimeError("weights gathered in FP8 as one product are multiplied in another order")
        return Weight(data, scales, parameters=weights)

    def dequantized(self) -> Tensor:
        layout, held = next(iter(self._held.items()))
        return self.product.dequantize(layout, self.shard, held, self.dtype)

    def _wanted(self) -> tuple[str, ...]:
        """The layouts to gather now, the one that is needed at once first."""
        if len(self.product.layouts) == 1:
            return self.product.layouts
        if self.unit._training_state.name == "PRE_BACKWARD":
            return ("columns", "rows") if self.gathers.computes_again else ("columns",)
        return ("rows",) if self.unit._reshard_after_forward else ("rows", "columns")

    def _layout(self, layout: str) -> Quantized:
        if layout not in self._held:
            # Activations are computed again within backward. From the next gather on, both layouts come together.
            self.gathers.computes_again = True
            self._held[layout] = self._whole(layout, iter([self._gathered(t) for t in self._quantized(layout)]))
        return self._held[layout]

    def _quantized(self, *layouts: str) -> list[Tensor]:
        """The shard's values as bytes, padded as FSDP2 pads it, and its scales where they are not shared."""
        tensors, values = [], self._values()
        for layout in layouts:
            data, scale = self.product.quantize(layout, self.shard, values)
            tensors.append(_padded(data.view(torch.uint8), self.chunk))
            if layout not in self.product.shared:
                packed = scale.view(torch.uint8) if scale.element_size() == 1 else scale
                tensors.append(_padded(packed, self.product.groups[layout].counts(self.chunk, 1)[0]))
        return tensors

    def _whole(self, layout: str, arrived: Iterator[Tensor]) -> Quantized:
        """The whole weight, from tensors in which ranks' rows follow one another."""
        product, rows = self.product, self.shape[0]
        data = next(arrived)[:rows].view(product.recipe.format.dtype)
        if layout in product.shared:
            return Quantized(data, product.scales[layout])
        scale = next(arrived)[: product.groups[layout].counts(rows, 1)[0]]
        return Quantized(data, scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale)

    def _gathered(self, mine: Tensor) -> Tensor:
        if self.world == 1:
            return mine
        everyone = mine.new_empty(self.world * mine.shape[0], *mine.shape[1:])
        all_gather(everyone, mine.contiguous(), self.unit.mesh_info.shard_process_group)
        return everyone

    def attach(self) -> None:
        """Set the functions, unless they are there."""
        local = self.parameter._sharded_local_tensor
        if getattr(local, _PRE, None) is not self._pre:
            setattr(local, _PRE, self._pre)
            setattr(local, _POST, self.post)
            self._forget()

    def detach(self) -> None:
        local = self.parameter._sharded_local_tensor
        for name in (_PRE, _POST):
            if hasattr(local, name):
                delattr(local, name)
        self._forget()

    def _forget(self) -> None:
        """Have FSDP2 make its buffers and the unsharded Parameter anew."""
        self._held, self._sent = {}, ()
        self.parameter.all_gather_outputs = []
        self.parameter.__dict__.pop("_unsharded_param", None)
        self.parameter._init_extensions()


def _padded(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x
    padded = x.new_zeros(rows, *x.shape[1:])
    padded[: x.shape[0]] = x
    return padded


class FP8Gather:
    """The result of `fp8_all_gather`: it prints as what is gathered in FP8 and what is not; `remove()` undoes it."""

    def __init__(self, model: nn.Module, group: Any) -> None:
        self.computes_again = False  # activations, within backward
        self.members: list[GatheredMember] = []
        self.left_out: dict[str, int] = {}  # why, and how many weights
        self._sources: list[tuple[AmaxExchange, ProductScales]] = []
        by_manager: dict[int, list[tuple[Product, Sequence[GatheredMember]]]] = {}
        for members in self._products(model):
            linear = members[0].linear
            product = Product(
                linear.recipe.w, linear.state_w, linear.in_features, [m.shard for m in members], members[0].world
            )
            for member in members:
                member.product, member.members = product, members
            self.members += members
            by_manager.setdefault(id(linear.scaling), []).append((product, members))
        if not self.members:
            reasons = "; ".join(self.left_out) or "call octavo.convert_to_fp8(model), then fully_shard, first"
            raise ValueError(f"{type(model).__name__} has no sharded weight that could be gathered in FP8: {reasons}")
        for products in by_manager.values():
            manager = products[0][1][0].linear.scaling
            by_recipe: dict[Any, list[tuple[Product, Sequence[GatheredMember]]]] = {}
            for each in products:
                if each[0].shared:
                    by_recipe.setdefault(each[0].given, []).append(each)
            for same in by_recipe.values():
                source, exchange = ProductScales(same), exchange_of(manager, group)
                exchange.sources.append(source)
                self._sources.append((exchange, source))
        self._reshard(model)
        for member in self.members:
            member.attach()
            member.linear.arrives_in_fp8 = True
        self._model_hook = model.register_forward_pre_hook(self._before_forward, prepend=True)
        self._model = model

    def refresh(self) -> None:
        """Measure all weights again: they have changed since the last step, or there was none. Collective.

        Writes to a parameter itself, as by `load_state_dict`, are noticed. Those through `parameter.data` or by
        `torch._foreach_…` leave no trace on a DTensor: call this after them, or larger values saturate.
        """
        for member in self.members:
            member.local()
        for exchange in dict.fromkeys(exchange for exchange, _ in self._sources):
            exchange.refresh()

    def use(self, *, records: bool) -> None:
        """Have scales ready to quantise with."""
        for _, source in self._sources:
            source.use(records=records)

    def remove(self) -> None:
        """Have FSDP2 gather everything as it would."""
        self._reshard(self._model)
        for member in self.members:
            member.detach()
            member.linear.arrives_in_fp8 = False
        for exchange, source in self._sources:
            exchange.sources.remove(source)
            exchange.release()
        self._model_hook.remove()

    def __str__(self) -> str:
        lines = [f"{len(self.members)} weights are gathered in FP8"]
        return "\n".join(lines + [f"{count} are not: {reason}" for reason, count in self.left_out.items()])

    def _before_forward(self, *_: Any) -> None:
        """Set the functions again where local tensors are new, as after `model.to()` or loading by assignment."""
        for member in self.members:
            member.attach()

    def _reshard(self, model: nn.Module) -> None:
        for _, units in _units(model):
            for unit in units:
                unit.reshard()

    def _products(self, model: nn.Module) -> Iterator[list[GatheredMember]]:
        """The sharded weights, together those that are one product."""
        where = {}
        for _, units in _units(model):
            for unit in units:
                for parameter in unit.fsdp_params:
                    info = parameter._module_info
                    where[id(info.module), info.param_name] = unit, parameter
        for linears in linears_by_product(model):
            found = [where.get((id(linear), "weight")) for linear in linears]
            if not any(found):
                continue
            mine = [(linear, *pair) for linear, pair in zip(linears, found, strict=True) if pair is not None]
            reasons = [_why_not(linear, parameter, unit) for linear, unit, parameter in mine]
            if len(mine) < len(linears) or len({unit.mesh_info.shard_mesh_size for _, unit, _ in mine}) > 1:
                reasons.append("weights of one product are sharded differently")
            reason = next(filter(None, reasons), "")
            if reason:
                self.left_out[reason] = self.left_out.get(reason, 0) + len(mine)
                continue
            members, start = [], 0
            for linear, unit, parameter in mine:
                members.append(GatheredMember(self, linear, parameter, unit, start))
                start += linear.out_features
            yield members


def _units(model: nn.Module) -> Iterator[tuple[nn.Module, list[Any]]]:
    """Modules that FSDP2 shards, and their groups of parameters: several since torch 2.12, one before."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            units = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            yield module, [unit for unit in units if unit is not None]


def _why_not(linear: FP8Linear, parameter: Any, unit: Any) -> str:
    """Why a weight is gathered as it is; empty if it can be gathered in FP8."""
    if linear.fp8_only is not None:
        return "it is in FP8 only, with its master in host memory"
    if linear.recipe.w.percentile is not None:
        return "percentile: ranks cannot find one of a weight that they share by its maximum"
    if parameter._module_info.shared_modules:
        return "another module reads the same parameter (tied weights)"
    if parameter.fsdp_placement.dim != 0:
        return "it is sharded along its inputs (shard_placement_fn)"
    if parameter.is_dtensor:
        return "it is split by tensor parallelism, too"
    if parameter.offload_to_cpu:
        return "its shards are in host memory (CPUOffloadPolicy)"
    if unit._use_post_forward_mesh:
        return "reshard_after_forward is a number: FSDP2 takes only True or False with such weights"
    return ""


def fp8_all_gather(model: nn.Module, group: Any = None) -> FP8Gather:
    """Have FSDP2 gather the weights of FP8 linears in FP8; results have the same bits as without.

    `model`: converted by `convert_to_fp8` and then sharded by `fully_shard`, with values. `group`: the process group of
    all ranks that hold it; not given: all there are. Call it on every rank, before the first step or between two.
    """
    require_ranks("fp8_all_gather")
    _require_names(model)
    if any(isinstance(module, FP8Linear) and module.arrives_in_fp8 for module in model.modules()):
        raise ValueError(
            f"FSDP2 gathers weights of {type(model).__name__} in FP8 already: call remove() on what the first call of "
            "octavo.fp8_all_gather returned, or leave out the second"
        )
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    if compiled:
        raise ValueError(
            f"fp8_all_gather: {compiled[0] or type(model).__name__} is compiled, and torch.compile does not know "
            "weights that arrive in FP8; leave out compile, or fp8_all_gather"
        )
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ValueError(f"fp8_all_gather: {name} is on the meta device; give the model its values first")
    return FP8Gather(model, group)


def _require_names(model: nn.Module) -> None:
    """Raise if this torch lacks what `GatheredMember` reads of FSDP2."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} is not sharded: call torch.distributed.fsdp.fully_shard on its layers and on it, "
            "after convert_to_fp8 and before fp8_all_gather"
        )
    present: dict[str, Any] = {
        "FSDPParam": getattr(_fsdp_param, "FSDPParam", None),
        "FSDPParamGroup": getattr(_fsdp_param_group, "FSDPParamGroup", None),
    }
    for _, units in _units(model):
        if units and units[0].fsdp_params:
            present |= {"a unit": units[0], "a sharded parameter": units[0].fsdp_params[0]}
    missing = [f"{kind}.{name}" for kind, each in present.items() for name in _NAMES[kind] if not hasattr(each, name)]
    if missing:
        raise RuntimeError(
            f"fp8_all_gather does not know the FSDP2 of torch {torch.__version__}, which has no {', '.join(missing)}: "
            "use torch 2.11 to 2.13, or train without it"
        )
