"""Settings of a training run: one frozen dataclass, complete and checked at construction.

People give a few options; `settings_from_options` fills in the rest from the defaults of the model size and the device,
or, for a resumed run, from the settings it was started with. A run's `config.json` is these settings.

Every field changes the loss curve except those in `HARMLESS`. A run may be resumed under different settings only if
they leave the curve alone: a resumed run's is bit for bit that of an uninterrupted one.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import torch

from octavo.models.bdh import PRESETS, BDHConfig, why_not_fused
from octavo.numerics import FP8TrainingConfig
from octavo.numerics.checks import check_choice, check_positive_int
from octavo.optim import OPTIMIZERS
from octavo.support import has_fp8_tensor_cores
from octavo.training.shares import check_shares, own_micro_batches

MODELS = ("bdh",)
PRECISIONS = ("fp8", "bf16", "fp32")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEVICES = ("cpu", "cuda")
SCHEDULES = ("cosine", "constant")
STRATEGIES = ("ddp", "fsdp2")
# `data` is only a path; resuming checks that the bytes are the same.
# `ranks` and `strategy` alter it within rounding; a run that is resumed on others says so.
# `steps` is checked against the checkpoint: a finished run may be extended, and a constant rate does not know its end.
HARMLESS = (
    *("data", "steps", "log_interval", "save_interval", "evaluation_batches", "sample_bytes", "compare"),
    *("ranks", "strategy"),
)
ADDED_LATER = ("fused", "compile", "ranks", "strategy")  # runs of earlier versions go on without them
SHAPE_OPTIONS = ("dim", "heads", "neurons", "layers", "dropout")

# Found by short runs on the default data: CPU sizes for minutes on two cores, GPU sizes for minutes on one H200. A GPU
# with room for it takes the 16 × 512 bytes of a step at once. Planned for 100M parameters: 41 GiB in BF16 that
# is not compiled, 11 in fused FP8, and 79 in FP32, which keeps its micro-batches.
LARGE = {"steps": 300, "seq": 512, "lr": 1e-3, "warmup": 30, "save_interval": 100}
SIZE_DEFAULTS: dict[str, dict[str, Any]] = {
    "tiny": {"steps": 100, "batch": 8, "seq": 128, "lr": 3e-3, "warmup": 10, "save_interval": 20},
    "25m": LARGE | {"batch": 8, "micro_batches": 2},
    "100m": LARGE | {"batch": 4, "micro_batches": 4},
}
AT_ONCE = {"batch": 16, "micro_batches": 1}
ROOM_FOR_ALL = 70 * 2**30  # bytes; what is sold as 80 GB has more


@dataclass(frozen=True)
class TrainSettings:
    """One run.

    Fields:
        model, size, shape: `bdh`; what its shape is called (`tiny`, `25m`, `100m` or `custom`); and the shape itself.
        device: `cpu` or `cuda`.
        precision: `fp8` (products in FP8, the rest in `dtype`), `bf16` or `fp32`. Parameters are FP32 in all three.
        dtype: of activations outside the FP8 products: `float32` or `bfloat16`.
        fp8: the FP8 recipe; used when `precision` is `fp8`.
        data, held_out: the source (None: the Python standard library) and the share of it never trained on.
        steps, batch, micro_batches, seq: optimiser steps; sequences per micro-batch; micro-batches per step (their
            gradients add up in FP32); bytes per sequence. On several ranks, these are a step of all of them together.
        lr, warmup, schedule: the peak rate, the steps that rise to it, and then `cosine` (down to 0) or `constant`.
        clip: the largest gradient norm let through; 0 never clips.
        optimizer, weight_decay, beta1, beta2: see `octavo.optim`.
        tf32: let a GPU round the inputs of FP32 products to TF32.
        seed: of the initial weights, the data order, dropout and stochastic rounding.
        log_interval, save_interval: steps between printed lines (with scaling statistics), and between checkpoints.
        evaluation_batches, sample_bytes: how much to measure on held-out data and to generate at the end.
        compare: train again in BF16 afterwards, on the same seed and data.
        fused: train through the fused FP8 layers of `octavo.models.bdh`.
        compile: train through `torch.compile`, where the layers are not fused; always in the BF16 comparison.
        ranks, strategy: processes that share each step, and how: `ddp` (whole copies) or `fsdp2` (shards).
    """

    shape: BDHConfig
    size: str
    device: str
    precision: str
    dtype: str
    steps: int
    batch: int
    seq: int
    lr: float
    warmup: int
    save_interval: int
    model: str = "bdh"
    fp8: FP8TrainingConfig = field(default_factory=FP8TrainingConfig)
    data: str | None = None
    held_out: float = 0.05
    micro_batches: int = 1
    schedule: str = "cosine"
    clip: float = 1.0
    optimizer: str = "adamw"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    tf32: bool = True
    seed: int = 0
    log_interval: int = 10
    evaluation_batches: int = 8
    sample_bytes: int = 120
    compare: bool = False
    fused: bool = False
    compile: bool = False
    ranks: int = 1
    strategy: str = "ddp"

    def __post_init__(self) -> None:
        check_choice("model", self.model, MODELS)
        check_choice("size", self.size, (*PRESETS, "custom"))
        check_choice("device", self.device, DEVICES)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("dtype", self.dtype, tuple(DTYPES))
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("strategy", self.strategy, STRATEGIES)
        for name in ("steps", "batch", "micro_batches", "seq", "ranks"):
            check_positive_int(name, getattr(self, name))
        for name in ("log_interval", "save_interval", "evaluation_batches"):
            check_positive_int(name, getattr(self, name))
        for name in ("warmup", "sample_bytes", "seed"):
            value = getattr(self, name)
            self._check(name, isinstance(value, int) and value >= 0, "a whole number, 0 or more")
        for name in ("clip", "weight_decay"):
            self._check(name, 0 <= getattr(self, name) < math.inf, "a number, 0 or more")
        for name in ("beta1", "beta2"):
            self._check(name, 0 <= getattr(self, name) < 1, "a number of at least 0 and less than 1")
        check_shares(self.batch, self.micro_batches, self.ranks)
        self._check("lr", 0 < self.lr < math.inf, "a number above 0, such as 0.001")
        self._check("held_out", 0 < self.held_out <= 0.5, "a share above 0 and up to 0.5")
        self._check("data", self.data != "", "a file, a folder or a pattern; leave it out for the standard library")
        expected = {"bf16": "bfloat16", "fp32": "float32"}.get(self.precision, self.dtype)
        if self.dtype != expected:
            raise ValueError(f"dtype={self.dtype!r}: precision {self.precision} computes in {expected}; leave it out")
        if self.compare and self.precision != "fp8":
            raise ValueError(f"compare=True: compares FP8 with BF16, so precision must be fp8, not {self.precision!r}")
        if self.fused and (reason := self._why_not_fused()):
            raise ValueError(f"fused=True: {reason}; use --no-fused")

    def _check(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)!r}: {wanted}")

    def _why_not_fused(self) -> str:
        if self.precision != "fp8":
            return f"the fused layers are in FP8, and precision is {self.precision}"
        return why_not_fused(self.fp8, self.shape.dropout)

    @property
    def name(self) -> str:
        return f"{self.model}-{self.size}"

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.micro_batches * self.seq

    @property
    def own_micro_batches(self) -> int:
        """Micro-batches of one rank in a step."""
        return own_micro_batches(self.batch, self.micro_batches, self.ranks)

    def learning_rate(self, step: int) -> float:
        """Return the rate of step 1, 2, …: linear over `warmup` steps, then the schedule (cosine ends near 0)."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        if self.schedule == "constant":
            return self.lr
        progress = (step - self.warmup - 1) / max(self.steps - self.warmup, 1)
        return self.lr * 0.5 * (1 + math.cos(math.pi * progress))

    def replace(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def in_bf16(self) -> Self:
        """Return the same run with plain BF16 products, for comparison."""
        return replace(self, precision="bf16", dtype="bfloat16", compare=False, fused=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {**asdict(self), "shape": asdict(self.shape), "fp8": self.fp8.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}
        if missing := sorted(known - set(values) - set(ADDED_LATER)):
            raise ValueError(f"the setting {missing[0]} is missing")
        if unknown := sorted(set(values) - known):
            raise ValueError(f"{unknown[0]}={values[unknown[0]]!r}: no such setting")
        nested = {"shape": BDHConfig(**values["shape"]), "fp8": FP8TrainingConfig.from_dict(values["fp8"])}
        return cls(**{**values, **nested})

    def changes_to_curve(self, other: Self) -> list[str]:
        """Return the fields in which `other` would give a different loss curve."""
        mine, others = self.to_dict(), other.to_dict()
        return [name for name in mine if name not in HARMLESS and mine[name] != others[name]]


def settings_from_options(options: Mapping[str, Any], base: TrainSettings | None = None) -> TrainSettings:
    """Complete a user's options with the settings of `base` (a run to resume) or with defaults.

    Options are the fields of `TrainSettings`, except: `size` is a preset; `dim`, `heads`, `neurons`, `layers` and
    `dropout` change the preset's shape; `device` and `dtype` may be `auto`; `fp8` is a dict of fields of
    `FP8TrainingConfig`, and `recipe` names a recipe to start it from.
    """
    given = dict(options)
    if given.get("data"):
        given["data"] = str(Path(given["data"]).expanduser().absolute())  # a run may be resumed from another folder
    device = _device(given, base)
    shape, size, defaults = _shape(given, base, device)
    precision, dtype = _precision(given, base, device)
    fp8 = _fp8(given, base, precision)
    resolved = {"shape": shape, "size": size, "device": device, "precision": precision, "dtype": dtype, "fp8": fp8}
    if base is None or precision != base.precision:
        defaults = {**defaults, **_code(precision, device, shape, fp8)}
    elif why_not_fused(fp8, shape.dropout):
        defaults = {**defaults, "fused": False}  # resuming names the option that made it so
    return TrainSettings(**{**defaults, **given, **resolved})


# Each of these takes its options out of `given`.
def _device(given: dict[str, Any], base: TrainSettings | None) -> str:
    device: str = given.pop("device", base.device if base else "auto")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return device


def _shape(given: dict[str, Any], base: TrainSettings | None, device: str) -> tuple[BDHConfig, str, dict[str, Any]]:
    """Return the model's shape, the name of its size, and the defaults of that size or of the resumed run."""
    size: str = given.pop("size", base.size if base else ("tiny" if device == "cpu" else "100m"))
    preset = base.shape if base and size == base.size else BDHConfig.preset(size)
    shape = replace(preset, **{name: given.pop(name) for name in SHAPE_OPTIONS if name in given})
    at_once = given.get("precision") != "fp32" and _fits_at_once(size, device)
    defaults = base.to_dict() if base else SIZE_DEFAULTS[size] | (AT_ONCE if at_once else {})
    is_preset = replace(shape, dropout=preset.dropout) == preset
    return shape, size if is_preset else "custom", defaults


def _precision(given: dict[str, Any], base: TrainSettings | None, device: str) -> tuple[str, str]:
    precision: str = given.pop("precision", base.precision if base else "fp8")
    dtype: str = given.pop("dtype", base.dtype if base and precision == base.precision else "auto")
    if dtype == "auto":
        # FP8 on a CPU is emulated in FP32, so BF16 activations would only add casts there.
        dtype = "float32" if precision == "fp32" or (precision == "fp8" and device == "cpu") else "bfloat16"
    return precision, dtype


def _fp8(given: dict[str, Any], base: TrainSettings | None, precision: str) -> FP8TrainingConfig:
    options, recipe = given.pop("fp8", {}), given.pop("recipe", None)
    if precision != "fp8" and (options or recipe):
        raise ValueError(f"precision={precision!r}: {recipe or next(iter(options))} is an option of FP8; leave it out")
    if base and recipe is None:
        return base.fp8.replace(**options)
    return FP8TrainingConfig.from_recipe(recipe or "delayed", **options)


def _fits_at_once(size: str, device: str) -> bool:
    if size == "tiny" or device != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_properties(device).total_memory >= ROOM_FOR_ALL


def _code(precision: str, device: str, shape: BDHConfig, fp8: FP8TrainingConfig) -> dict[str, bool]:
    """Return the fastest code for a new run; where FP8 is emulated, and on a CPU, the model as it was written."""
    if device != "cuda":
        return {"fused": False, "compile": False}
    if precision != "fp8":
        return {"fused": False, "compile": True}
    native = fp8.emulate is not True and has_fp8_tensor_cores(torch.device(device))
    has_kernels = fp8.percentile is None and not why_not_fused(fp8, shape.dropout)
    return {"fused": native and has_kernels, "compile": native}
