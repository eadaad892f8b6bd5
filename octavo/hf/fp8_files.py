"""The layout of a checkpoint in FP8: how it is quantised, by its `quantization_config`, and what its files hold."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open

from octavo.nn.frozen import FROZEN_GRANULARITIES, SCALE_NAME
from octavo.numerics.quantize import BLOCK

METHOD = "octavo"
_FP8_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}  # as safetensors call them


def read_layout(stored: Mapping[str, Any]) -> tuple[str, str, list[str]]:
    """Read granularity, name of the scales and linears left alone from the configuration of a checkpoint in FP8."""
    method = getattr(stored.get("quant_method"), "value", stored.get("quant_method"))
    if method == METHOD:
        return stored["granularity"], SCALE_NAME, list(stored.get("skip", ()))
    if method == "fp8":
        block = stored.get("weight_block_size")
        if block is not None and list(block) != [BLOCK, BLOCK]:
            raise ValueError(f"weight_block_size={block}: Octavo reads blocks of {[BLOCK, BLOCK]}")
        left = list(stored.get("modules_to_not_convert") or ())
        return "tensor" if block is None else "block", SCALE_NAME, left
    if method == "compressed-tensors":
        return _read_compressed(stored)
    raise ValueError(f"quant_method={method!r}: Octavo reads fp8, compressed-tensors in FP8, and its own checkpoints")


def _read_compressed(stored: Mapping[str, Any]) -> tuple[str, str, list[str]]:
    groups = list((stored.get("config_groups") or {}).values())
    weights = [group.get("weights") or {} for group in groups]
    if len(groups) != 1 or weights[0].get("num_bits") != 8 or weights[0].get("type") != "float":
        raise ValueError(f"config_groups={stored.get('config_groups')!r}: Octavo reads one group of weights in FP8")
    strategy, block = weights[0].get("strategy"), weights[0].get("block_structure")
    if strategy not in FROZEN_GRANULARITIES or (strategy == "block" and list(block or ()) != [BLOCK, BLOCK]):
        raise ValueError(
            f"strategy={strategy!r}, block_structure={block!r}: Octavo reads channel, tensor, and blocks of 128×128"
        )
    return strategy, "weight_scale", list(stored.get("ignore") or ())


def names_in(files: Sequence[str]) -> set[str]:
    """The names of all tensors in the files of a checkpoint, as far as they can be had without reading it all."""
    names: set[str] = set()
    for file in files:
        if str(file).endswith(".safetensors"):
            with safe_open(file, "pt") as content:
                names.update(content.keys())
    return names


def fp8_dtype_in(files: Sequence[str]) -> torch.dtype:
    """The dtype of a checkpoint's FP8 weights: transformers casts what it reads to what the model has there."""
    dtypes: set[str] = set()
    for file in files:
        if str(file).endswith(".safetensors"):
            with safe_open(file, "pt") as content:
                dtypes.update(str(content.get_slice(name).get_dtype()) for name in content.keys())  # noqa: SIM118
    kinds = dtypes & _FP8_DTYPES.keys()
    if len(kinds) > 1:
        raise ValueError(f"weights in {' and '.join(sorted(kinds))}: Octavo reads checkpoints with one FP8 format")
    return _FP8_DTYPES[kinds.pop()] if kinds else torch.float8_e4m3fn
