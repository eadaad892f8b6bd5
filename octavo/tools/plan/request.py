"""Request for a plan: a model, a mode, the tokens of a step. Checked here, so that later code can trust it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from octavo.numerics.checks import check_choice, check_positive_int
from octavo.tools.families import family_of
from octavo.tools.plan.options import OFFLOADS
from octavo.tools.shapes import HUB, MODES, POSITIONS, PRESETS, RANK, SHAPES, TARGETS, Case, read_config
from octavo.training.errors import UserError

HEADS = ("bf16", "fp8")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose layers `layer.py` describes
SEQ = 2048
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Request:
    """Request for a plan, with the options of `octavo plan`.

    `gpu`: its name or its GiB; None leaves out what fits. `head`: precision of the head in FP8 options. `offload`:
    compare only options that do so with BF16 (`none`: only those that do not); None: all of them. `seq`: None takes
    2,048 tokens, or the model's positions if fewer.
    """

    model: str
    mode: str = "full"
    batch: int = 4
    seq: int | None = None
    layers: int | None = None
    rank: int | None = None
    targets: str | None = None
    head: str = "bf16"
    compiled: bool = True
    offload: str | None = None
    gpu: str | None = None

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES)
        check_choice("head", self.head, HEADS)
        family_of(SHAPES.get(self.model, {}).get("model_type")).check_request(self)
        for option in ("rank", "targets"):
            if self.mode == "full" and (given := getattr(self, option)) is not None:
                raise UserError(f"--{option} {given}: without --mode lora there are no adapters; leave it out")
        if self.offload is not None:
            check_choice("offload", self.offload, ("none", *OFFLOADS))
        if self.mode == "lora" and self.offload in OFFLOADS:
            raise UserError(
                f"--offload {self.offload}: with --mode lora only adapters have states, which are small; leave it out"
            )
        for field in ("batch", "seq", "rank"):
            if getattr(self, field) is not None:
                check_positive_int(field, getattr(self, field))
        if self.targets is not None:
            check_choice("targets", self.targets, tuple(TARGETS))
        positions = self.case.config.get("max_position_embeddings")
        if isinstance(positions, int) and self.case.seq > positions:
            raise UserError(
                f"--seq {self.seq}: {self.model} has {positions} positions (max_position_embeddings); ask for no more"
            )

    @cached_property
    def case(self) -> Case:
        """The model and the step that memory is planned for."""
        config = _config(self.model)
        family = family_of(config["model_type"])
        family.check_config(self.model, config)
        frozen = self.mode == "lora"
        seq = self.seq or min(SEQ, config.get("max_position_embeddings") or SEQ)
        return Case(
            name=self.model if self.model in SHAPES else _name(self.model),
            config=config,
            layers=family.depth(config) if self.layers is None else self.layers,
            tokens=self.batch * seq,
            seq=seq,
            seed=0,
            device="cpu",
            frozen=frozen,
            rank=(self.rank or RANK) if frozen else 0,
            targets=self.targets or "all",
        )


def with_batch(case: Case, batch: int) -> Case:
    return replace(case, tokens=batch * case.seq)


def with_sequence(case: Case, length: int) -> Case:
    """Return the case with one sequence of so many tokens."""
    return replace(case, tokens=length, seq=length)


def checkpoint_name(model: str) -> str:
    """Return the name to load the model by: on the Hub, or the given folder."""
    if model in HUB:
        return HUB[model]
    path = Path(model)
    return str(path.parent if path.is_file() else path)


def _config(model: str) -> dict[str, Any]:
    if model in SHAPES:
        positions = {"max_position_embeddings": POSITIONS[model]} if model in POSITIONS else {}
        return {**SHAPES[model], **positions}
    path = Path(model)
    if not path.exists():
        raise UserError(
            f"MODEL {model}: neither a file or folder nor one of {', '.join(PRESETS)}; "
            "give one of these, or a Hugging Face config.json"
        )
    if path.is_dir():
        path = path / "config.json"
        if not path.exists():
            raise UserError(f"MODEL {model}: no config.json in this folder; give a folder or file that has one")
    return read_config(path, f"MODEL {model}")


def _name(model: str) -> str:
    path = Path(model).resolve()
    return path.parent.name if path.name == "config.json" else path.stem if path.is_file() else path.name


def check_decoder(model: str, config: Mapping[str, Any]) -> None:
    """Refuse a decoder's configuration that the plan does not cover: one from a file may hold anything."""
    kind = config["model_type"]
    if kind not in FAMILIES:
        raise UserError(
            f"MODEL {model}: model_type={kind!r}: the plan knows the layers of {', '.join(FAMILIES)}; "
            "for another, measure it with octavo bench --config"
        )
    given = [name for name in ("num_key_value_heads", "head_dim", "max_position_embeddings") if config.get(name)]
    for name in (*_SIZES, *given):
        value = config[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(
                f"MODEL {model}: {name}={value!r}: has to be a whole number of at least 1; correct it there"
            )
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if not config.get("head_dim") and hidden % heads:
        raise UserError(
            f"MODEL {model}: hidden_size={hidden} is no multiple of num_attention_heads={heads}; add a head_dim there"
        )
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise UserError(
            f"MODEL {model}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}; correct it"
        )
