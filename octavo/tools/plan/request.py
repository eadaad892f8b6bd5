"""What a person asks for: a model, a mode, the tokens of a step. Checked here, so that what follows can trust it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.numerics.checks import check_choice, check_positive_int
from octavo.tools.bench.cases import DECODERS, RANK, TARGETS, Case, read_config
from octavo.training.errors import UserError

MODES = ("full", "lora", "grpo")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose layers `layer.py` describes
HUB = {
    "1b": "meta-llama/Llama-3.2-1B",
    "3b": "meta-llama/Llama-3.2-3B",
    "8b": "meta-llama/Llama-3.1-8B",
    "70b": "meta-llama/Llama-3.1-70B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def make_request(
    model: str,
    *,
    mode: str,
    batch: int,
    seq: int,
    layers: int | None = None,
    rank: int | None = None,
    targets: str | None = None,
) -> Case:
    """The model and the step that memory is planned for."""
    check_choice("mode", mode, MODES)
    if mode == "grpo":
        raise UserError(
            "--mode grpo: comes with reinforcement learning, which Octavo does not have yet; for its training step "
            "alone, plan --mode lora"
        )
    for option, given in (("rank", rank), ("targets", targets)):
        if mode == "full" and given is not None:
            raise UserError(f"--{option} {given}: without --mode lora there are no adapters; leave it out")
    rank = RANK if rank is None else rank
    targets = targets or "all"
    for field, value in (("batch", batch), ("seq", seq), ("rank", rank)):
        check_positive_int(field, value)
    check_choice("targets", targets, tuple(TARGETS))
    config = _config(model)
    _check_config(model, config)
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and seq > positions:
        raise UserError(f"--seq {seq}: {model} has {positions} positions (max_position_embeddings); ask for no more")
    frozen = mode == "lora"
    return Case(
        name=model if model in DECODERS else _name(model),
        config=config,
        layers=config["num_hidden_layers"] if layers is None else layers,
        tokens=batch * seq,
        seq=seq,
        seed=0,
        device="cpu",
        frozen=frozen,
        rank=rank if frozen else 0,
        targets=targets,
    )


def with_batch(case: Case, batch: int) -> Case:
    return replace(case, tokens=batch * case.seq)


def checkpoint_name(model: str) -> str:
    """What to load it by: a name on the Hub, or the folder that was given."""
    if model in HUB:
        return HUB[model]
    path = Path(model)
    return str(path.parent if path.is_file() else path)


def _config(model: str) -> dict[str, Any]:
    if model in DECODERS:
        return DECODERS[model]
    path = Path(model)
    if not path.exists():
        raise UserError(
            f"MODEL {model}: neither a file or folder nor one of {', '.join(DECODERS)}; "
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


def _check_config(model: str, config: Mapping[str, Any]) -> None:
    """A configuration from a file may hold anything."""
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
