"""Settings of a run of `octavo grpo`: one frozen dataclass, complete and checked at construction.

A user gives a few options; `settings_from_options` adds defaults, or, for a resumed run, the settings that it was
started with. A resumed run may change only what is in `HARMLESS`, so that its rewards are those of a run that was not
interrupted.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch

from octavo.numerics.checks import check_choice, check_positive_int
from octavo.rl.products import PRODUCTS
from octavo.rl.settings import GRPOSettings

DEVICES = ("cpu", "cuda")
PRECISIONS = ("fp8", "bf16")
RECIPES = ("channel", "block")
ENGINES = ("native", "vllm")
KV_DTYPES = ("auto", "fp8")
# A reward function that failed is mended before a run is resumed.
HARMLESS = ("rewards", "log_interval", "save_interval", "standby")
LORA_LR, FULL_LR = 2e-5, 1e-6
# A run without arguments: a minute of a core, half of it to make the model.
DEMO = {
    "steps": 100,
    "prompts": 16,
    "completions": 8,
    "max_new_tokens": 8,
    "rank": 8,
    "alpha": 16,
    "lr": 4e-3,
    "schedule": "linear",
    "beta": 0.01,
    "log_interval": 5,
    "save_interval": 20,
    "recipe": "block",
}


@dataclass(frozen=True)
class RunSettings(GRPOSettings):
    """One run; `GRPOSettings` and `GRPOLoss` have the fields of the algorithm.

    Fields:
        model: a name on the Hub or a folder; None is the small decoder that sorts digits.
        task, rewards: a .jsonl or .py file, or a task of reasoning-gym; a Python file of reward functions.
        engine: `native` or `vllm`. slots: completions that it writes at once; with another number, others are drawn.
            kv_dtype: keys and values in the dtype of the model (`auto`) or in `fp8`. standby: it frees its cache during
            updates.
        stop: a text that ends completions, or several, besides the model's end of text.
        device, precision, recipe: `cpu` or `cuda`; `fp8` or `bf16`; scales of FP8 weights per `channel` or `block`.
        products: of frozen FP8 weights in training: `fp8`, `weights-only` or `fp8-dgrad` (`rl/products.py`).
        full: train all weights; else adapters of rank `rank`, scaled by `alpha` / `rank`.
        checkpointing: compute activations again in backward.
        log_interval, save_interval: steps between printed lines, and between checkpoints (None: a tenth of the run).
    """

    model: str | None = None
    task: str | None = None
    rewards: str | None = None
    engine: str = "native"
    slots: int = 64
    kv_dtype: str = "auto"
    standby: bool = False
    stop: str | list[str] | None = None
    device: str = "cpu"
    precision: str = "fp8"
    recipe: str = "channel"
    products: str = "fp8-dgrad"
    full: bool = False
    rank: int = 32
    alpha: float = 32
    checkpointing: bool = False
    log_interval: int = 1
    save_interval: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        choices: dict[str, Any] = {"device": DEVICES, "precision": PRECISIONS, "recipe": RECIPES, "engine": ENGINES}
        for name, allowed in {**choices, "products": tuple(PRODUCTS), "kv_dtype": KV_DTYPES}.items():
            check_choice(name, getattr(self, name), allowed)
        for name in ("rank", "slots", "log_interval"):
            check_positive_int(name, getattr(self, name))
        if self.save_interval is not None:
            check_positive_int("save_interval", self.save_interval)
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        self._check("stop", all(isinstance(text, str) and text for text in texts), "texts of one character or more")
        self._check("alpha", self.alpha > 0, "a number above 0")
        if self.full and self.beta:
            raise ValueError(
                f"beta={self.beta} with full=True: the reference is the model without adapters, and here there would "
                "have to be a second copy; set beta=0, or train adapters"
            )
        if self.kv_dtype == "fp8" and self.engine == "vllm":
            raise ValueError("kv_dtype='fp8' with engine='vllm': it has no scale for each token; use engine='native'")

    @property
    def name(self) -> str:
        """Name of the run's folder: that of the model, and what is trained."""
        model = "sorting" if self.model is None else Path(self.model).name.lower()
        return f"{model}-grpo-{'full' if self.full else 'lora'}"

    @property
    def saves_every(self) -> int:
        return self.save_interval or max(self.steps // 10, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}
        if missing := sorted(known - set(values)):
            raise ValueError(f"the setting {missing[0]} is missing")
        return cls(**{name: values[name] for name in known})

    def changes_to_curve(self, other: Self) -> list[str]:
        """Return the fields in which `other` would give other rewards."""
        mine, others = self.to_dict(), other.to_dict()
        return [name for name in mine if name not in HARMLESS and mine[name] != others[name]]


def settings_from_options(options: Mapping[str, Any], base: RunSettings | None = None) -> RunSettings:
    """Complete a user's options with the settings of `base` (a run to resume), or with defaults.

    Options are the fields of `RunSettings`, except that `device` and `engine` may be `auto`.
    """
    given = dict(options)
    for name in ("model", "task", "rewards"):
        if name in given:
            given[name] = _absolute(given[name])  # a run may be resumed from another folder
    if given.get("device", "auto") == "auto":
        automatic = "cuda" if torch.cuda.is_available() else "cpu"
        given["device"] = base.device if base and "device" not in options else automatic
    if given.get("engine") == "auto":
        given["engine"] = base.engine if base else _engine()
    if base is not None:
        return RunSettings.from_dict({**base.to_dict(), **given})
    settings = RunSettings(**{**_defaults(given), **given})
    for holds, names, why in (
        (settings.full, ("products", "rank", "alpha"), "full=True: all weights are trained"),
        (settings.precision == "bf16", ("products", "recipe"), "precision='bf16': no weight is in FP8"),
        (settings.correction == "none", ("correction_level", "correction_max", "correction_min"), "correction='none'"),
    ):
        for name in names if holds else ():
            if name in given:
                raise ValueError(f"{name}={given[name]!r} would have no effect with {why}; leave it out")
    return settings


def _engine() -> str:
    """Return vLLM if it is installed, else our own."""
    from octavo.rl.vllm import is_installed

    return "vllm" if is_installed() else "native"


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that depend on other options."""
    full = given.get("full", False)
    defaults: dict[str, Any] = {"lr": FULL_LR if full else LORA_LR}
    if given.get("model") is None:
        defaults |= DEMO
        if full:
            defaults |= {"lr": 5e-4, "beta": 0.0}
    rank = given.get("rank", defaults.get("rank", RunSettings.rank))
    return {"alpha": rank} | _of_adapters(given.get("model")) | defaults


def _of_adapters(model: str | None) -> dict[str, Any]:
    """Return rank and alpha of a folder of adapters, which is trained on; nothing if MODEL is none."""
    if model is None:
        return {}
    try:
        config = json.loads((Path(model) / "adapter_config.json").read_text())
        return {"rank": config["r"], "alpha": config["lora_alpha"]}
    except (OSError, ValueError, KeyError, TypeError):  # what is wrong with adapters, loading them says
        return {}


def _absolute(name: str) -> str:
    """Return the absolute path of a file or folder; any other name as it is."""
    path = os.path.expanduser(name)  # noqa: PTH111  # unlike pathlib's, these raise for no name, however long
    return str(Path(path).absolute()) if os.path.exists(path) else name  # noqa: PTH110
