"""A linear whose weight is frozen in FP8: what LoRA trains its adapters on.

The FP8 copy is the only one, one byte an element, and serves forward and dgrad alike (see `ops/weight.py`). It is
stored as bytes, its scales as integers with their bits: `.to(bfloat16)` on a model casts every floating-point tensor to
BF16, float8 ones silently, too, and would ruin both. The state dict shows them as what they are, `weight` in float8
and `weight_scale_inv` in FP32: the names of Hugging Face's FP8 checkpoints. (`inv` is theirs: it is the factor that
dequantises.) On the meta device there are no values to ruin, and they have these dtypes: who fills them from a state
dict, as Accelerate does, goes by them.

FSDP2 shards both by rows. It takes no tensor without dimensions, so a scale for the whole weight has one, and the state
dict leaves it out where the weight is whole.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo.nn.bits import gather_as_is, let_integers_be_sharded
from octavo.nn.linear import LinearInFP8
from octavo.nn.linear_function import linear
from octavo.nn.sharded import is_sharded, local, may_be_freed, placed_like
from octavo.numerics import FP8ScalingManager, FP8TrainingConfig
from octavo.numerics.checks import check_choice
from octavo.numerics.config import check_config
from octavo.numerics.formats import Format, format_of
from octavo.numerics.quantize import BLOCK, Quantized, quantize
from octavo.ops.weight import Weight
from octavo.support import require_tensor_cores

FROZEN_GRANULARITIES = ("block", "channel", "tensor")  # of a frozen weight; `numerics.quantize` has all
SCALE_NAME = "weight_scale_inv"
_STORED = ("weight", SCALE_NAME)


class FrozenTensor(nn.Parameter):
    """A Parameter, so that it moves and is sharded like one, that cannot be trained and says why."""

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> Self:
        """Signature that Accelerate uses to re-create Parameters after moving them."""
        let_integers_be_sharded()
        return super().__new__(cls, data, requires_grad=False).requires_grad_(requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrozenTensor":
        return memo.setdefault(id(self), FrozenTensor(self.data.clone()))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return FrozenTensor, (self.data.clone(),)  # not the whole buffer of a group, of which it may be a slice

    @property
    def requires_grad(self) -> bool:
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        if requires_grad:
            raise ValueError(
                "requires_grad=True: this weight is frozen in FP8 and would never change. To train it, load the model "
                "with full_finetuning=True; to train adapters beside it, use FastLanguageModel.get_peft_model or "
                "peft.get_peft_model"
            )
        return self


class FP8FrozenLinear(LinearInFP8):
    """y = x · wᵀ + b with w in FP8. Gradients flow to x (and b), never to w."""

    granularity: str
    chosen_by_cost_model: bool = False  # `fp8_products` was chosen by the cost model rather than by the user
    high_dtype: torch.dtype  # dtype of the weight before it was quantised, and so of PEFT's adapters beside it

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        granularity: str = "block",
        config: FP8TrainingConfig | None = None,
        scaling: FP8ScalingManager | None = None,
        name: str = "linear",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the linear without a weight: call `set_weight`, or load one. `dtype`: of the bias and the weight."""
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._init_fp8(granularity, config, scaling, name)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        granularity: str = "block",
        config: FP8TrainingConfig | None = None,
        *,
        scaling: FP8ScalingManager | None = None,
        name: str = "linear",
    ) -> Self:
        """A frozen copy of a linear: its weight quantised, its bias the very same."""
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new.in_features, new.out_features = linear.in_features, linear.out_features
        new.weight, new.bias = linear.weight, linear.bias
        new.train(linear.training)
        new._init_fp8(granularity, config, scaling, name)
        new.set_weight(quantize_weight(linear.weight, granularity))
        return new

    def _init_fp8(
        self, granularity: str, config: FP8TrainingConfig | None, scaling: FP8ScalingManager | None, name: str
    ) -> None:
        check_choice("granularity", granularity, FROZEN_GRANULARITIES)
        config = check_config(config or activation_config(granularity))
        require_tensor_cores(self.weight.device, config)
        if scaling is None:
            scaling = FP8ScalingManager.from_config(config, self.scaling_device)
            scaling.follow_optimizers(self)
        self.granularity, self.config, self.scaling = granularity, config, scaling
        self.recipe = config.recipe
        self.high_dtype = self.weight.dtype
        self.state_x, self.state_g = (
            scaling.register(f"{name}.{operand}", recipe.format, recipe.margin)
            for operand, recipe in (("x", self.recipe.x), ("g", self.recipe.g))
        )
        self.register_parameter(SCALE_NAME, None)
        self.format: Format | None = None

    def set_weight(self, weight: Quantized) -> None:
        """Set the weight from FP8 data and FP32 scales."""
        if tuple(weight.data.shape) != (self.out_features, self.in_features):
            raise ValueError(
                f"weight has shape {tuple(weight.data.shape)}; this linear takes "
                f"{(self.out_features, self.in_features)}"
            )
        self.format = format_of(weight.data.dtype)
        scale = self._check_scale(weight.scale.float())
        self._store("weight", weight.data.contiguous().view(torch.uint8))
        self._store(SCALE_NAME, scale.contiguous().view(torch.int32))

    def _store(self, name: str, data: Tensor) -> None:
        """Copy into the present tensor, which may be part of a group's buffer, or else store a new one."""
        old = getattr(self, name)
        stored = isinstance(old, FrozenTensor) or is_sharded(old)
        alike = stored and (old.shape, old.device, old.dtype) == (data.shape, data.device, data.dtype)
        if alike and is_sharded(old) == is_sharded(data):
            old.detach().copy_(data)  # not `old.data`: a backward that is still to come must notice
        else:
            setattr(self, name, FrozenTensor(data))

    def __setattr__(self, name: str, value: Any) -> None:
        """FSDP2 sets shards and gathered weights here, several times a step."""
        if name in _STORED and name in self.__dict__.get("_parameters", ()) and isinstance(value, nn.Parameter):
            if isinstance(value, DTensor):
                gather_as_is(value)
            self._parameters[name] = value
        else:
            super().__setattr__(name, value)

    def finish_loading(self) -> None:
        """Freeze the weight that a loader has set: FP8 data with its scales, or one that is still to be quantised."""
        if not isinstance(self.weight, FrozenTensor):
            scale = getattr(self, SCALE_NAME)
            if self.weight.element_size() == 1:
                if scale is None:
                    raise ValueError(
                        f"weight in {self.weight.dtype} without {SCALE_NAME}: the checkpoint lacks its scales"
                    )
                self.set_weight(Quantized(self.weight.data, scale.data))
            else:
                self.set_weight(quantize_weight(self.weight.data, self.granularity))

    def _check_scale(self, scale: Tensor) -> Tensor:
        n, k = self.out_features, self.in_features
        if self.granularity == "tensor":
            if scale.numel() != 1:
                raise ValueError(f"{SCALE_NAME} has shape {tuple(scale.shape)}; per tensor there is one")
            return scale if tuple(scale.shape) == (1,) else scale.reshape(1)
        expected = (n, 1) if self.granularity == "channel" else (-(-n // BLOCK), -(-k // BLOCK))
        if scale.shape == expected[:1]:
            scale = scale[:, None]
        if tuple(scale.shape) != expected:
            raise ValueError(
                f"{SCALE_NAME} has shape {tuple(scale.shape)}; granularity={self.granularity!r} of a weight "
                f"{(n, k)} takes {expected}"
            )
        return scale

    @property
    def quantized(self) -> Quantized:
        """The weight as FP8 and FP32, without a copy."""
        if self.format is None:
            raise RuntimeError("this FP8FrozenLinear has no weight yet: load one, or call set_weight")
        weight, scale = self.weight.detach(), getattr(self, SCALE_NAME).detach()
        if weight.element_size() != 1 or scale.element_size() != 4:
            raise RuntimeError(
                f"this FP8FrozenLinear finds its weight in {weight.dtype}, its scales in {scale.dtype}: FSDP2 of torch "
                f"{torch.__version__} has cast them. Update to torch 2.13, or leave param_dtype out of the "
                "MixedPrecisionPolicy"
            )
        scale = scale.view(torch.float32)
        per_tensor = self.granularity == "tensor" and not is_sharded(scale)
        return Quantized(weight.view(self.format.dtype), scale.reshape(()) if per_tensor else scale)

    def as_weight(self, *others: "FP8FrozenLinear") -> Weight:
        """Return the weight as products take it, with those of others side by side."""
        members = (self, *others)
        weights, scales = zip(*(member.quantized for member in members), strict=True)
        names = ("weight", SCALE_NAME) if may_be_freed() else ()
        return Weight(weights, scales, sources=[getattr(member, name) for name in names for member in members])

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self.quantized.dequantize(dtype)

    def forward(self, input: Tensor) -> Tensor:
        hook = self.__dict__.get("_hf_hook")  # Accelerate's, or several as one
        if any(getattr(each, "offload", False) for each in getattr(hook, "hooks", (hook,))):
            raise ValueError(
                "Accelerate has moved this FP8 weight off its device, and casts what it brings back: keep the model on "
                "one device (device_map={'': 0}); in FP8 it takes a byte a parameter"
            )
        if is_sharded(input):
            raise ValueError(
                "input of an FP8FrozenLinear is a DTensor: a weight that is frozen in FP8 cannot be sharded by tensor "
                "parallelism; leave it out of the plan of parallelize_module, or shard the model by fully_shard"
            )
        if not input.is_floating_point():
            raise TypeError(f"input is in {input.dtype}; this FP8FrozenLinear takes floating-point numbers")
        if input.shape[-1] != self.in_features:
            raise ValueError(f"input has {input.shape[-1]} features; this FP8FrozenLinear takes {self.in_features}")
        if input.numel() == 0:
            return nn.functional.linear(input, self.dequantize(input.dtype), self.bias)
        return linear(input, self.as_weight(), self.spec(input), self.states, bias=self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.high_dtype = fn(torch.empty(0, dtype=self.high_dtype, device=self.weight.device)).dtype
        super()._apply(fn, recurse)
        if self.format is not None:
            shown = self.format.dtype, torch.float32
            for name, dtype in zip(_STORED, shown if self.weight.is_meta else (torch.uint8, torch.int32), strict=True):
                self._give_dtype(name, dtype)
        return self

    def _give_dtype(self, name: str, dtype: torch.dtype) -> None:
        """Store the bits of a tensor under another dtype, as when it comes to the meta device, or leaves it empty."""
        old = getattr(self, name)
        if old.dtype != dtype:
            mine = local(old.detach())
            bits = torch.empty_like(mine, dtype=dtype) if mine.is_meta else mine.view(dtype)
            setattr(self, name, FrozenTensor(placed_like(bits, old)))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.format is not None:
            destination[prefix + "weight"], destination[prefix + SCALE_NAME] = self.quantized

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
        """FP8 with scales, or a weight in high precision, which is quantised."""
        state_dict = dict(state_dict)
        weight, scale = (state_dict.get(prefix + name) for name in ("weight", SCALE_NAME))
        if weight is not None and weight.element_size() == 1 and scale is None:
            error_msgs.append(f"{prefix}weight is in {weight.dtype}, but {prefix}{SCALE_NAME} is missing")
            del state_dict[prefix + "weight"]
        elif weight is not None:
            # With assign=True, where the loaded ones are: this linear may be on the meta device.
            device = weight.device if local_metadata.get("assign_to_params_buffers") else self.weight.device
            if is_sharded(weight) and weight.element_size() > 1:
                error_msgs.append(f"{prefix}weight is a shard in {weight.dtype}: quantise it before it is sharded")
            elif weight.element_size() == 1 and not (scale.is_floating_point() or _are_bits(scale)):
                error_msgs.append(
                    f"{prefix}{SCALE_NAME} is in {scale.dtype}: something has cast it from float32"
                    + ("; load a base before it is sharded, and adapters alone afterwards" if is_sharded(scale) else "")
                )
            elif weight.element_size() == 1:
                known = torch.float8_e4m3fn if self.format is None else self.format.dtype
                data = weight.view(known) if weight.dtype == torch.uint8 else weight  # bytes do not say what they are
                scale = scale if scale.is_floating_point() else scale.view(torch.float32)
                self.set_weight(Quantized(data.to(device), scale.to(device)))
            else:
                self.set_weight(quantize_weight(weight.to(device), self.granularity))
            # Set already; shown as stored, so that the call below copies it onto itself.
            state_dict[prefix + "weight"], state_dict[prefix + SCALE_NAME] = self.weight, getattr(self, SCALE_NAME)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if local_metadata.get("assign_to_params_buffers"):
            self._bring_states()

    def extra_repr(self) -> str:
        products = "" if self.fp8_forward else ", forward in high precision"
        products = products if self.fp8_products else ", products in high precision"
        return f"{super().extra_repr()}, frozen in {self.format or 'FP8'} per {self.granularity}{products}"


def _are_bits(scale: Tensor) -> bool:
    """Whether integers are the bits of FP32 scales, rather than scales that were rounded.

    torch's `set_model_state_dict` completes a state dict that lacks a Parameter with the Parameter itself. Scales are
    normal positive numbers, whose bits are integers of 2**23 and more; a rounded scale is far smaller.
    """
    if scale.dtype != torch.int32 or scale.is_meta:
        return False
    smallest = torch.tensor(torch.finfo(torch.float32).tiny).view(torch.int32).item()
    return bool((local(scale) >= smallest).all())


def activation_config(granularity: str) -> FP8TrainingConfig:
    """How inputs and gradients are quantised beside a weight of this granularity.

    Gradients with a scale for every row do without the range of E5M2, and have its error halved by E4M3: nothing but
    the rounded gradient decides what reaches the adapters of the layers below.

    Fast accumulation everywhere: beside a frozen weight there is no sum over tokens in FP8, and over outputs it is off
    by 0.2 to 0.4 % (`FP8TrainingConfig`) of a gradient that rounding has put off by ten times as much.
    """
    if granularity == "channel":
        return FP8TrainingConfig.from_recipe("channel", fp8_format="E4M3", fast_accumulation="all")
    return FP8TrainingConfig.from_recipe({"tensor": "current"}.get(granularity, granularity), fast_accumulation="all")


def quantize_weight(weight: Tensor, granularity: str, format: str = "E4M3") -> Quantized:
    """A weight `[N, K]` with one scale per tensor, per row, or per 128×128 block."""
    return quantize(weight.detach(), format=format, granularity=granularity, block=(BLOCK, BLOCK))
