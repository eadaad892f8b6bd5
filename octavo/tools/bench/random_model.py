"""A Hugging Face decoder from its configuration, with no weights to download: for benchmarks and tests of shapes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_IGNORED = ("architectures", "dtype", "torch_dtype", "transformers_version", "quantization_config")


def build_causal_lm(
    config: Mapping[str, Any], *, layers: int, positions: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    """A causal language model in `dtype`, made on `device` itself: a CPU would need a minute for 8 billion weights.

    `config` is what a `config.json` holds; `layers` replaces its depth and `positions` is the longest sequence wanted.
    Embedding and head are two matrices, whatever the configuration says: tied ones have no FLOPs to save, and a head
    in FP8 would then change the embedding's gradient, too.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {name: value for name, value in config.items() if name not in _IGNORED}
    values |= {"num_hidden_layers": layers, "tie_word_embeddings": False, "use_cache": False}
    values["max_position_embeddings"] = max(positions, values.get("max_position_embeddings", 0))
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:layers]
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**values), dtype=dtype, attn_implementation="sdpa"
        ).train()


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a causal language model, in order."""
    layers = getattr(getattr(model, "base_model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(model).__name__} has no base_model.layers: it is not a Hugging Face decoder")
    return layers
