"""`nn.Linear` in FP8: y = x · wᵀ + b, dx = g · w, dw = gᵀ · x, each one FP8 product.

The weight stays the high-precision Parameter it was (`weight_master` is another name for it), so optimisers,
checkpoints and state-dict keys do not notice. Scaling state lives in three rows of a `FP8ScalingManager`, beside the
module: not in its state dict, not touched by `.to(dtype)`.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn

from octavo.nn.linears import fp8_linears
from octavo.numerics import FP8ScalingManager, FP8TrainingConfig
from octavo.numerics.config import Recipe
from octavo.ops import Product
from octavo.support import require_tensor_cores


class LinearInFP8(nn.Linear):
    """What linears in FP8 have in common, whether they train their weight or hold it frozen."""

    config: FP8TrainingConfig
    scaling: FP8ScalingManager
    recipe: Recipe

    @property
    def scaling_device(self) -> torch.device:
        return torch.device("cpu") if self.weight.device.type == "meta" else self.weight.device

    def product(self, input: Tensor) -> Product:
        """How to multiply this input."""
        autocast = torch.is_autocast_enabled(input.device.type)
        return Product(
            a=self.recipe.x,
            b=self.recipe.w,
            g=self.recipe.g,
            out_dtype=torch.get_autocast_dtype(input.device.type) if autocast else input.dtype,
            b_is_nk=True,
            record=torch.is_grad_enabled(),
            emulate=self.config.emulate is True,
            fast_forward=self.config.fast_accumulation != "none",
            fast_backward=self.config.fast_accumulation == "all",
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.scaling.to(self.scaling_device)
        return self


class FP8Linear(LinearInFP8):
    """A linear layer that multiplies in FP8, forward and backward. Any leading dimensions, any sizes."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        config: FP8TrainingConfig | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        scaling: FP8ScalingManager | None = None,
        name: str = "linear",
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._enable_fp8(config or FP8TrainingConfig(), scaling, name)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        config: FP8TrainingConfig | None = None,
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
        new._enable_fp8(config or FP8TrainingConfig(), scaling, name)
        return new

    def _enable_fp8(self, config: FP8TrainingConfig, scaling: FP8ScalingManager | None, name: str) -> None:
        """What makes a linear an FP8 one. `scaling`: share this manager; whoever made it lets it follow optimisers."""
        require_tensor_cores(self.weight.device, config)
        if scaling is None:
            scaling = FP8ScalingManager.from_config(config, self.scaling_device)
            scaling.follow_optimizers(self)
        self.config = config
        self.scaling = scaling
        self.recipe = config.recipe
        self.row_x, self.row_w, self.row_g = (
            scaling.register(f"{name}.{operand}", recipe.format, recipe.margin)
            for operand, recipe in (("x", self.recipe.x), ("w", self.recipe.w), ("g", self.recipe.g))
        )

    @classmethod
    def take_over(cls, linear: nn.Module, config: FP8TrainingConfig, scaling: FP8ScalingManager, name: str) -> Self:
        """Make this very module an FP8 one: what else refers to it, and its hooks, stay."""
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear._enable_fp8(config, scaling, name)
        return linear

    def give_back(self) -> None:
        """Undo `take_over`."""
        for name in ("config", "scaling", "recipe", "row_x", "row_w", "row_g"):
            del self.__dict__[name]
        self.__class__ = nn.Linear  # type: ignore[assignment]

    @property
    def weight_master(self) -> Tensor:
        """The high-precision weight that the optimiser updates."""
        return self.weight

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-1] != self.in_features:
            raise ValueError(f"input has {input.shape[-1]} features; this FP8Linear takes {self.in_features}")
        if input.numel() == 0:
            return nn.functional.linear(input, self.weight, self.bias)  # nothing to quantise; keeps the graph
        return fp8_linears(input, (self.weight,), self.bias, self.product(input), self.rows)

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scaling state of input, weight and gradient."""
        return self.row_x, self.row_w, self.row_g

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.recipe}, scaling={self.config.scaling}"
