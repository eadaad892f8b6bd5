"""Shapes of models, the tokens of a step, and the FLOPs that both imply: for `octavo bench`, `octavo plan` and scripts.

    FLOPs of a step = 6 · matmul parameters · tokens + attention

Forward is one product per weight, backward two, and a product of n weights by t tokens is 2·n·t FLOPs. The embedding is
a look-up and counts nothing; the head counts. Attention is causal, so half of each score matrix:

    Hugging Face decoder   6 · seq · tokens · heads · head_dim · layers       (q·kᵀ and p·v, forward and backward)
    BDH                    3 · seq · tokens · heads · (neurons + dim) · layers

With LoRA the weights are frozen: forward and one product of backward, and the adapters, which are trained:

    FLOPs of a step = 4 · matmul parameters · tokens + 6 · adapter parameters · tokens + attention

Rank 0 is the frozen base without adapters, whose backward extends to the embedding's output. With adapters it ends at
the lowest of them; the work saved in the first layer is counted nevertheless (at 8 layers of 8B 0.5 % of a step; 1.2 %
with adapters on the MLP alone).

Additional work of an implementation (recomputation, masked halves, padding) is not counted.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from octavo.numerics.checks import check_choice, check_positive_int
from octavo.tools import bdh
from octavo.tools.families import Family, family_of
from octavo.training.errors import UserError

FLOPS_FORMULA = "6 * matmul parameters * tokens + causal attention (half of every score matrix), forward and backward"
LORA_FLOPS_FORMULA = "4 * matmul parameters * tokens + 6 * adapter parameters * tokens + causal attention"
CHECK_LAYERS = 2
LARGEST_ON_CPU = 50_000_000  # parameters; larger models take minutes per step with emulated FP8
MODES = ("full", "lora")
RANK = 32
# Linears with adapters, by the names of `Case.linears`, and the members of each.
TARGETS = {"all": ("qkv", "o", "gate_up", "down"), "attention": ("qkv", "o"), "mlp": ("gate_up", "down")}
MEMBERS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
_NEEDED = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _llama(
    hidden: int, layers: int, intermediate: int, heads: int, kv: int, head_dim: int, vocab: int, tied: bool = False
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,  # as published; the bench builds two matrices in any case
    }


def _as_qwen3(shape: dict[str, Any]) -> dict[str, Any]:
    return {**shape, "model_type": "qwen3", "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}


# SmolLM2 135M and 360M, Llama 3.2 1B and 3B, Llama 3.1 8B and 70B; `tiny` is for a CPU.
LLAMAS = {
    "135m": _llama(576, 30, 1536, 9, 3, 64, 49152, tied=True),
    "360m": _llama(960, 32, 2560, 15, 5, 64, 49152, tied=True),
    "1b": _llama(2048, 16, 8192, 32, 8, 64, 128256, tied=True),
    "3b": _llama(3072, 28, 8192, 24, 8, 128, 128256, tied=True),
    "8b": _llama(4096, 32, 14336, 32, 8, 128, 128256),
    "70b": _llama(8192, 80, 28672, 64, 8, 128, 128256),
    "tiny": _llama(64, 2, 128, 4, 2, 16, 256),
}
QWENS = {
    "qwen3-0.6b": _as_qwen3(_llama(1024, 28, 3072, 16, 8, 128, 151936, tied=True)),
    "qwen3-8b": _as_qwen3(_llama(4096, 36, 12288, 32, 8, 128, 151936)),
    "qwen3-32b": _as_qwen3(_llama(5120, 64, 25600, 64, 8, 128, 151936)),
}
DECODERS = {**LLAMAS, **QWENS}
# Names on the Hugging Face Hub.
HUB = {
    "135m": "HuggingFaceTB/SmolLM2-135M",
    "360m": "HuggingFaceTB/SmolLM2-360M",
    "1b": "meta-llama/Llama-3.2-1B",
    "3b": "meta-llama/Llama-3.2-3B",
    "8b": "meta-llama/Llama-3.1-8B",
    "70b": "meta-llama/Llama-3.1-70B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
}
# Positions of the published models.
POSITIONS = {
    "tiny": 2048,
    "135m": 8192,
    "360m": 8192,
    "1b": 131072,
    "3b": 131072,
    "8b": 131072,
    "70b": 131072,
    "qwen3-0.6b": 40960,
    "qwen3-8b": 40960,
    "qwen3-32b": 40960,
}
SHAPES = {**DECODERS, **bdh.SHAPES}
PRESETS = tuple(SHAPES)


@dataclass(frozen=True)
class Linear:
    """One kind of product `x_MK · w_NKᵀ`, with M the tokens of a step, and `count` of them in the model."""

    name: str
    n: int
    k: int
    count: int

    @property
    def parameters(self) -> int:
        return self.n * self.k * self.count


@dataclass(frozen=True)
class Case:
    """One model at one depth, and the tokens of a step. `config`: a Hugging Face configuration, or one of `SHAPES`."""

    name: str
    config: Mapping[str, Any]
    layers: int
    tokens: int
    seq: int
    seed: int
    device: str
    frozen: bool = False  # LoRA: the weights are not trained
    rank: int = 0  # rank of the adapters beside frozen weights; 0: none
    targets: str = "all"  # which linears have adapters

    def __post_init__(self) -> None:
        for field in ("layers", "tokens", "seq"):
            check_positive_int(field, getattr(self, field))
        if not isinstance(self.rank, int) or self.rank < 0:
            raise ValueError(f"rank={self.rank!r}: a positive integer, or 0 for the frozen base alone")
        check_choice("targets", self.targets, tuple(TARGETS))
        if self.tokens % self.seq:
            raise ValueError(f"tokens={self.tokens}: whole sequences of seq={self.seq}, so a multiple of it")

    @property
    def family(self) -> Family:
        """The family of the model, with everything that differs between kinds of models."""
        return family_of(self.config["model_type"])

    @property
    def vocabulary(self) -> int:
        """The number of different tokens."""
        return self.family.vocabulary(self.config)

    @property
    def head_dim(self) -> int:
        return int(self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"])

    @property
    def linears(self) -> list[Linear]:
        """Every product with a weight."""
        return self.family.linears(self)

    @property
    def matmul_parameters(self) -> int:
        return sum(linear.parameters for linear in self.linears)

    @property
    def parameters(self) -> int:
        """The number of the model's values, norms and biases apart."""
        return self.family.parameters(self)

    @property
    def attention_flops(self) -> int:
        """FLOPs of causal attention in a step."""
        return self.family.attention_flops(self)

    @property
    def adapter_parameters(self) -> int:
        """Number of parameters in A and B of each target; q, k and v have three of each, gate and up two."""
        linears = [linear for linear in self.linears if linear.name in TARGETS[self.targets]]
        return sum(self.rank * (len(MEMBERS[w.name]) * w.k + w.n) * w.count for w in linears)

    @property
    def target_modules(self) -> list[str]:
        """Names in the model of the linears with adapters."""
        return [member for name in TARGETS[self.targets] for member in MEMBERS[name]]

    @property
    def products(self) -> int:
        """FLOPs per weight and token: forward, and one or two products of backward."""
        return 4 if self.frozen else 6

    @property
    def flops(self) -> int:
        own = self.products * self.matmul_parameters * self.tokens
        return own + 6 * self.adapter_parameters * self.tokens + self.attention_flops

    def gemm_flops(self, fp8: bool, fp8_head: bool) -> dict[str, int]:
        """FLOPs of all GEMMs by the precision they could run in. Attention counts if it is made of GEMMs alone."""
        body = sum(linear.parameters for linear in self.linears if linear.name != "head") * self.products * self.tokens
        head = self.products * self.matmul_parameters * self.tokens - body
        body += self.family.attention_gemm_flops(self)
        flops = {"fp8": 0, "bf16": 0}
        flops["fp8" if fp8 else "bf16"] += body
        flops["fp8" if fp8 and fp8_head else "bf16"] += head
        flops["bf16"] += 6 * self.adapter_parameters * self.tokens
        return flops

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)


def make_case(
    *,
    preset: str | None,
    config: Path | None,
    layers: int | None,
    tokens: int | None,
    seq: int | None,
    seed: int,
    device: str,
    force: bool,
    mode: str = "full",
    rank: int | None = None,
    targets: str | None = None,
) -> Case:
    """Return a case from a user's options; an impossible one is an error that names the way out."""
    if (preset is None) == (config is None):
        raise UserError("give one of --preset and --config")
    check_choice("mode", mode, MODES)
    for option, given in (("rank", rank), ("targets", targets)):
        if mode == "full" and given is not None:
            raise UserError(f"--{option} {given}: without --mode lora there are no adapters; leave it out")
    if rank == 0 and targets is not None:
        raise UserError(f"--targets {targets}: with --rank 0 there are no adapters; leave it out")
    check_choice("device", device, ("auto", "cpu", "cuda"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; use --device cpu with --preset tiny")
    values = read_config(config, f"--config {config}") if config is not None else _preset(str(preset))
    name = config.stem if config is not None else str(preset)
    case = Case(
        name=name,
        config=values,
        layers=family_of(values["model_type"]).depth(values) if layers is None else layers,
        tokens=usual_tokens(name) if tokens is None else tokens,
        seq=(64 if name.endswith("tiny") else 2048) if seq is None else seq,
        seed=seed,
        device=device,
        frozen=mode == "lora",
        rank=(RANK if mode == "lora" else 0) if rank is None else rank,
        targets=targets or "all",
    )
    case.family.check_mode(mode)
    if device == "cpu" and case.parameters > LARGEST_ON_CPU and not force:
        raise UserError(
            f"{case.name} with {case.layers} layers has {case.parameters:,} parameters: on a CPU a step takes minutes "
            "and says nothing about FP8; use a GPU, --preset tiny, or --force"
        )
    return case


def usual_tokens(name: str) -> int:
    """Return the default number of tokens of a step."""
    return 256 if name.endswith("tiny") else 8192


def _preset(name: str) -> dict[str, Any]:
    check_choice("preset", name, PRESETS)
    return SHAPES[name]


def read_config(path: Path, given: str) -> dict[str, Any]:
    """Read a Hugging Face `config.json` of a dense decoder. `given`: how the user named it, for error messages."""
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{given}: no such file") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{given}: not a JSON file that can be read: {error}") from error
    missing = [name for name in _NEEDED if not (isinstance(values, dict) and values.get(name))]
    if missing:
        raise UserError(f"{given}: no {missing[0]} in it; this takes the config.json of a dense decoder")
    experts = [name for name in _EXPERTS if values.get(name)]
    if experts:
        raise UserError(f"{given}: {experts[0]}={values[experts[0]]}: this counts dense decoders only")
    values.pop("_name_or_path", None)  # written to results, and may be a local path
    return values
