"""`fuse(model)`: run the layers of a BDH in FP8 through fused kernels, forward and backward.

    fused = fuse(model)                    # the same module, the same Parameters, another forward
    logits, loss = model(tokens, targets)
    loss.backward()
    optimizer.step()                       # scaling histories roll here, by themselves
    unfuse(model)

Without gradients (`torch.no_grad`, so also `generate`) the model runs as it was written. `layer.py` has the layer; its
results differ from those of BDH under `fp8_autocast` in rounding only.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.models.bdh.layer import OPERANDS, WEIGHTS, Layer, fp8_bdh_layer, quantize_weights
from octavo.models.bdh.model import BDH, rope_angles
from octavo.nn.names import is_skipped
from octavo.nn.product import fp8_product
from octavo.nn.report import FP8, Entry, Report
from octavo.nn.undo import Fused
from octavo.numerics import FP8ScalingManager, FP8TrainingConfig
from octavo.numerics.config import check_config
from octavo.ops import ProductSpec
from octavo.support import announce_emulation, require_tensor_cores

_FUSED = "_octavo_bdh"
_AUTOCAST = "run the model under octavo.fp8_autocast(config) instead of fusing it"


@dataclass
class FusedBDH:
    """The result of `fuse`: `scaling` has the scale and statistics of every tensor, `report` lists what runs in FP8."""

    config: FP8TrainingConfig
    scaling: FP8ScalingManager
    state: dict[str, Tensor]
    report: Report

    def layer_state(self, i: int) -> dict[str, Tensor]:
        """Return the scaling state of layer `i`, by the names in `OPERANDS`."""
        return {name: self.state[f"layers.{i}.{name}"] for name in OPERANDS}

    @property
    def scaling_manager(self) -> FP8ScalingManager:
        """The same as `scaling`."""
        return self.scaling

    def __str__(self) -> str:
        return str(self.report)


class _FusedBDHModel(BDH, Fused):
    """A BDH with fused layers. Only `fuse` makes one, out of a BDH."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if not torch.is_grad_enabled() or tokens.numel() == 0:
            return super().forward(tokens, targets)
        config, fused = self.config, self.__dict__[_FUSED]
        if config.dropout and self.training:
            raise RuntimeError(f"BDHConfig.dropout={config.dropout}: the fused layers have no dropout; {_AUTOCAST}")
        device = tokens.device
        if fused.scaling.device != device:
            fused.scaling.to(device)
        recipe = fused.config.recipe
        weights = quantize_weights(self.encoder, self.encoder_v, self.decoder, recipe.w, fused.state)
        angles = rope_angles(tokens.shape[1], config.neurons, device)
        x_BTD = self.norm(F.embedding(tokens, self.embedding))
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else x_BTD.dtype
        layer = Layer(recipe, dtype, emulate=fused.config.emulate is True)
        for i in range(config.layers):
            y_BTD = fp8_bdh_layer(
                x_BTD, self.encoder, self.encoder_v, self.decoder, weights, angles, layer, fused.layer_state(i)
            )
            x_BTD = self.norm(x_BTD + self.norm(y_BTD))
        logits_BTV = self._head(x_BTD, dtype)
        if targets is None:
            return logits_BTV, None
        return logits_BTV, F.cross_entropy(logits_BTV.float().flatten(0, 1), targets.flatten())

    @property
    def scaling(self) -> FP8ScalingManager:
        """Scaling states of all layers: `share_amax` and checkpoints look for them on modules."""
        scaling: FP8ScalingManager = self.__dict__[_FUSED].scaling
        return scaling

    def unfuse(self) -> None:
        """Give the model its own class back."""
        del self.__dict__[_FUSED]
        self.__class__ = BDH  # type: ignore[assignment]

    def _head(self, x_BTD: Tensor, dtype: torch.dtype) -> Tensor:
        fused = self.__dict__[_FUSED]
        if is_skipped("lm_head", fused.config):
            return x_BTD @ self.lm_head
        recipe = fused.config.recipe
        product = ProductSpec(recipe.x, recipe.w, recipe.g, dtype, emulate=fused.config.emulate is True)
        x, w, g = (fused.state[f"lm_head.{operand}"] for operand in "xwg")
        return fp8_product(x_BTD, self.lm_head, None, product, (x, w, g))


def fuse(model: BDH, config: FP8TrainingConfig | str | None = None) -> FusedBDH:
    """Run the model's layers in FP8 through fused kernels from now on, in place. Parameters stay the same objects."""
    config = check_config(config)
    if type(model) is not BDH:
        fused_already = is_fused(model)
        raise TypeError(
            f"model is a {type(model).__name__}: "
            + ("fused already; unfuse(model) first" if fused_already else "fuse takes an octavo.models.BDH")
        )
    if reason := why_not_fused(config):
        raise ValueError(f"{reason}; {_AUTOCAST}")
    device = model.encoder.device
    require_tensor_cores(device, config)
    announce_emulation(device, config.emulate)
    scaling = FP8ScalingManager.from_config(config, device=device)
    fused = FusedBDH(config, scaling, {}, Report("products of a fused BDH", [], scaling, config.emulate))
    _register(fused, model.config.layers)
    scaling.follow_optimizers(model)
    model.__dict__[_FUSED] = fused
    model.__class__ = _FusedBDHModel
    return fused


def why_not_fused(config: FP8TrainingConfig, dropout: float = 0.0) -> str:
    """Return why fused layers cannot train by this configuration, with this share of dropout; empty if they can."""
    if config.granularity != "tensor":
        return f"granularity={config.granularity!r}: the fused BDH has one scale per tensor"
    for name in ("encoder", "encoder_v", "decoder"):
        if is_skipped(name, config):
            return f"skip={config.skip!r}: names {name}, which is part of every fused layer"
    return f"dropout={dropout}: the fused layers have no dropout" if dropout else ""


def is_fused(model: nn.Module) -> bool:
    """Return True if `fuse` was called on the model."""
    return isinstance(model, _FusedBDHModel)


def fused_layers(model: nn.Module) -> FusedBDH | None:
    """Return what `fuse` returned for the model; None if it is not fused."""
    return model.__dict__[_FUSED] if is_fused(model) else None


def unfuse(model: nn.Module) -> None:
    """Undo `fuse`: give the model its own forward back."""
    if not isinstance(model, _FusedBDHModel):
        raise TypeError(f"model is a {type(model).__name__}: not fused")
    model.unfuse()


def _register(fused: FusedBDH, layers: int) -> None:
    """Register a scaling state for every weight and every operand of every layer, and fill the report."""
    recipe = fused.config.recipe
    head_in_fp8 = not is_skipped("lm_head", fused.config)
    names = [*WEIGHTS, *(f"layers.{i}.{name}" for i in range(layers) for name in OPERANDS)]
    names += [f"lm_head.{operand}" for operand in "xwg"] if head_in_fp8 else []
    for name in names:
        kind = name.rpartition(".")[2]
        operand: Any = recipe.w if kind == "w" else recipe.g if kind == "g" else recipe.x
        fused.state[name] = fused.scaling.register(name, operand.format, operand.margin)
    for i in range(layers):
        for product in ("encoder", "scores", "attention", "encoder_v", "decoder"):
            fused.report.entries.append(Entry(f"layers.{i}.{product}", "matmul", FP8, formats=str(recipe)))
    head = Entry("lm_head", "matmul", FP8, formats=str(recipe)) if head_in_fp8 else None
    skipped = Entry("lm_head", "matmul", "high", "left alone: config.skip names it")
    fused.report.entries.append(head or skipped)
