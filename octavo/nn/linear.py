"""`nn.Linear` in FP8: y = x · wᵀ + b, dx = g · w, dw = gᵀ · x, each one FP8 product.

The weight stays the high-precision Parameter it was (`weight_master` is another name for it), so optimisers,
checkpoints and state-dict keys do not notice. Where it is FP8-only (`nn/fp8_only.py`), checkpoints have its master.
Scaling state lives in three rows of a `FP8ScalingManager`, beside the module: not in its state dict, not touched by
`.to(dtype)`. `nn/linear_function.py` has the equations.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from octavo.nn import held
from octavo.nn.fp8_only import OffloadedWeight
from octavo.nn.gathered import GatheredWeight, refuse_to_compile
from octavo.nn.linear_function import linear
from octavo.nn.parallel import linear_on_mesh
from octavo.nn.sharded import is_sharded, set_plain_class
from octavo.nn.styles import move_forward
from octavo.numerics import FP8ScalingManager, FP8TrainingConfig
from octavo.numerics.config import Recipe, check_config
from octavo.ops.linear import LinearSpec, linear_spec
from octavo.ops.weight import Weight
from octavo.support import announce_emulation, require_tensor_cores
from octavo.tracing import constant_when_traced, refuse_transforms

_WEIGHTS_ONLY: ContextVar[bool] = ContextVar("octavo_weights_only", default=False)


@contextmanager
def weights_only() -> Iterator[None]:
    """Take the inputs of frozen linears as they are, within this block and in this thread: only weights are in FP8.

    So log-probabilities of generated tokens do not depend on how inputs are rounded to FP8; and with few tokens, on a
    GPU, kernels read each weight once (`numerics/few_tokens.py`). Trained linears keep their products, unless their
    weights are held in FP8 (`held.py`). A compiled model keeps what held when it was traced: enter the block before its
    first call.
    """
    token = _WEIGHTS_ONLY.set(True)
    try:
        yield
    finally:
        _WEIGHTS_ONLY.reset(token)


@constant_when_traced
def _is_weights_only() -> bool:
    return _WEIGHTS_ONLY.get()


def change_class(module: Any, cls: type[nn.Module]) -> None:
    """Let a module be of another class, under what `torch.nn.utils.parametrize` may have made of it since.

    That puts a class of the module's own, with the computed tensors as properties, between the module and its class.
    """
    if parametrize.is_parametrized(module):
        type(module).__bases__ = (cls,)
    else:
        set_plain_class(module, cls)


class LinearInFP8(nn.Linear):
    """Base class of linears in FP8, whether their weight is trained or frozen."""

    config: FP8TrainingConfig
    scaling: FP8ScalingManager
    recipe: Recipe
    is_trained: bool = False
    state_x: Tensor  # scaling state of the input
    state_g: Tensor  # scaling state of the gradient
    fp8_products: bool = True  # compute products in FP8; else a frozen weight is dequantised for each of them
    fp8_forward: bool = True  # with `fp8_products`: False has y in high precision, and dx alone is an FP8 product
    input_is_saved: bool = False  # the module before saves it for its own backward: adapters then save it as it is, too

    @property
    def scaling_manager(self) -> FP8ScalingManager:
        """Another name for `scaling`."""
        return self.scaling

    @property
    def scaling_device(self) -> torch.device:
        """Where products are computed: with the weight, or, if that is a shard, on its mesh's devices."""
        device = self.weight.device
        if isinstance(self.weight, DTensor) and device.type != self.weight.device_mesh.device_type:
            kind = self.weight.device_mesh.device_type
            return (
                torch.device(kind)
                if kind == "cpu"
                else torch.device(kind, torch.get_device_module(kind).current_device())
            )
        return torch.device("cpu") if device.type == "meta" else device

    @property
    def states(self) -> tuple[Tensor, Tensor]:
        """Scaling state of input and gradient."""
        return self.state_x, self.state_g

    def as_weight(self, *others: Any) -> Weight:
        """Return the weight as products take it, with those of others side by side."""
        raise NotImplementedError

    def spec(self, input: Tensor) -> LinearSpec:
        """Return how to multiply this input."""
        if self.config.emulate is False and not torch.compiler.is_compiling():
            require_tensor_cores(input.device, self.config)  # it may have been moved since
        if input.device != self.state_x.device and not input.is_meta:
            # Weights were brought to a GPU without a call of `to`: by `fully_shard`, or by Accelerate for each call.
            self.scaling.to(input.device)
        if "_is_replica" in self.__dict__:
            raise ValueError(
                "nn.DataParallel copies a model to several GPUs for each step, and they would share one scaling state: "
                "use one process per GPU (torch.nn.parallel.DistributedDataParallel, accelerate launch)"
            )
        autocast = torch.is_autocast_enabled(input.device.type)
        recipe, accumulation = self.recipe, self.config.fast_accumulation
        is_stored = not self.is_trained or held.current() is not None  # in FP8, for this call
        in_fp8 = self.fp8_products and not (is_stored and _is_weights_only())
        fields = (
            recipe.x if in_fp8 and self.fp8_forward else None,
            None if is_stored else recipe.w,
            recipe.g if in_fp8 else None,
            torch.get_autocast_dtype(input.device.type) if autocast else input.dtype,
            # Evaluation may forget `no_grad`: it is to leave no trace either.
            torch.is_grad_enabled() and self.training,
            self.config.emulate is True,
            accumulation != "none",
            accumulation == "all",
            self.weight.dtype if isinstance(self.weight, GatheredWeight) else None,
        )
        if torch.compiler.is_compiling():
            refuse_transforms()
            return LinearSpec(*fields)  # Dynamo warns of functions with a cache, and traces what they compute anyway
        return linear_spec(*fields)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.scaling.to(self.scaling_device)
        return self

    def _bring_states(self) -> None:
        """Move scaling states to the weight, which `load_state_dict(assign=True)` may have put on another device."""
        if self.scaling.device != self.scaling_device:
            self.scaling.to(self.scaling_device)


class FP8Linear(LinearInFP8):
    """A linear layer that multiplies in FP8, forward and backward. Any leading dimensions, any sizes."""

    is_trained = True
    fp8_only: OffloadedWeight | None = None
    arrives_in_fp8: bool = False  # its weight, of which FSDP2 gathers the shards (`dist/gather.py`)
    gathers_in_fp8: bool = False  # takes tokens that are sharded, and gathers them in FP8 (`dist/parallel.py`)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        config: FP8TrainingConfig | str | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        scaling: FP8ScalingManager | None = None,
        name: str = "linear",
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._enable_fp8(check_config(config), scaling, name)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        config: FP8TrainingConfig | str | None = None,
        *,
        scaling: FP8ScalingManager | None = None,
        name: str = "linear",
    ) -> Self:
        """A new layer with the very same Parameters."""
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new.in_features, new.out_features = linear.in_features, linear.out_features
        new.weight, new.bias = linear.weight, linear.bias
        new.train(linear.training)
        new._enable_fp8(check_config(config), scaling, name)
        return new

    def _enable_fp8(self, config: FP8TrainingConfig, scaling: FP8ScalingManager | None, name: str) -> None:
        """Add what an FP8 linear has. `scaling`: share this manager; whoever made it lets it follow optimisers."""
        require_tensor_cores(self.weight.device, config)
        announce_emulation(self.weight.device, config.emulate)
        if scaling is None:
            scaling = FP8ScalingManager.from_config(config, self.scaling_device)
            scaling.follow_optimizers(self)
        self.config = config
        self.scaling = scaling
        self.recipe = config.recipe
        self.state_x, self.state_w, self.state_g = (
            scaling.register(f"{name}.{operand}", recipe.format, recipe.margin)
            for operand, recipe in (("x", self.recipe.x), ("w", self.recipe.w), ("g", self.recipe.g))
        )

    @classmethod
    def convert_in_place(
        cls, module: nn.Module, config: FP8TrainingConfig, scaling: FP8ScalingManager, name: str
    ) -> Self:
        """Make this very module an FP8 one: its hooks and references to it stay."""
        move_forward(module, lambda: set_plain_class(module, cls))
        assert isinstance(module, cls)
        module._enable_fp8(config, scaling, name)
        return module

    def restore_in_place(self) -> None:
        """Undo `convert_in_place`."""
        for name in ("config", "scaling", "recipe", "state_x", "state_w", "state_g"):
            del self.__dict__[name]
        move_forward(self, lambda: change_class(self, nn.Linear))

    @property
    def weight_master(self) -> Tensor:
        """The high-precision weight that the optimiser updates."""
        return self.weight if self.fp8_only is None else self.fp8_only.read()

    def as_weight(self, *others: "FP8Linear") -> Weight:
        """Return the weight as products take it, with those side by side of others that share its scaling state."""
        members = (self, *others)
        holder = held.current()
        if holder is not None:
            return holder.weight(members)
        if self.arrives_in_fp8 and torch.compiler.is_compiling():
            refuse_to_compile()
        if isinstance(self.weight, GatheredWeight):
            return self.weight.source.together([member.weight for member in members], "forward")
        if self.fp8_only is None:
            return Weight([member.weight for member in members], state=self.state_w)
        weights = [member.fp8_only.data for member in members if member.fp8_only is not None]
        scale = self.fp8_only.group_scale if others else self.fp8_only.scale
        return Weight(weights, (scale,), parameters=[member.weight for member in members])

    def forward(self, input: Tensor) -> Tensor:
        if is_sharded(input) or is_sharded(self.weight):
            return linear_on_mesh(self, input)
        # Its part of them, where transformers calls it with the part of the weight that this rank has (`tp_plan`).
        features = self.weight.shape[-1] if self.weight.dim() == 2 else self.in_features
        if input.shape[-1] != features:
            raise ValueError(f"input has {input.shape[-1]} features; this FP8Linear takes {features}")
        if not input.is_floating_point():
            raise TypeError(f"input is in {input.dtype}; this FP8Linear takes floating-point numbers")
        if input.numel() == 0:
            # Nothing to quantise; keeps the graph.
            weight = self.weight if self.fp8_only is None else self.weight_master.to(input)
            return nn.functional.linear(input, weight, self.bias)
        return linear(input, self.as_weight(), self.spec(input), self.states, bias=self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        if self.fp8_only is not None:
            probe = self.weight.new_zeros(1)
            moved = fn(probe)
            if moved.device != probe.device or moved.dtype != probe.dtype:
                raise ValueError(
                    f"{probe.dtype} on {probe.device} to {moved.dtype} on {moved.device}: this FP8Linear has its "
                    "weight in FP8 only; move the model before offload_master, or call remove() on what that returned"
                )
            return self
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.fp8_only is not None:
            destination[prefix + "weight"] = self.weight_master

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        loaded = state_dict.get(prefix + "weight") if self.fp8_only is not None else None
        if self.fp8_only is not None and loaded is not None:
            if loaded.shape == self.weight.shape:
                self.fp8_only.load(loaded)
            else:
                error_msgs.append(
                    f"{prefix}weight has shape {tuple(loaded.shape)}; this linear takes {tuple(self.weight.shape)}"
                )
            state_dict = {name: value for name, value in state_dict.items() if name != prefix + "weight"}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if loaded is not None and prefix + "weight" in missing_keys:
            missing_keys.remove(prefix + "weight")
        if local_metadata.get("assign_to_params_buffers"):
            self._bring_states()

    def extra_repr(self) -> str:
        state = "" if self.fp8_only is None else ", weight in FP8 only"
        return f"{super().extra_repr()}, fp8={self.recipe}, scaling={self.config.scaling}{state}"
