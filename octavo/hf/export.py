"""Checkpoints that others read: plain BF16, or FP8 in the layouts of transformers and vLLM.

    export_fp8(model, "out")                    # the scales that the weights have; per block if they have none
    save_merged(model, "out", "merged_16bit")   # adapters merged into the weights, in BF16

    per block of 128×128   quant_method: fp8                   weight + weight_scale_inv [N/128, K/128]
    per channel            quant_method: compressed-tensors    weight + weight_scale [N, 1]; inputs per token

Weights that are in FP8 with these scales already are written byte for byte, if no adapter changes them. A folder is
filled when all of it is there: everything is written beside it first.

Every rank calls for a sharded model (FSDP2): layers are gathered one at a time, rank 0 keeps them in host memory and
writes, into the folder that it was given, and the others wait.
"""

import copy
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.dist.whole import has_shards
from octavo.hf.sharded import alone, kept, made_ready, whole_parameters, written_by_first
from octavo.nn.fp8_only import full_precision
from octavo.nn.frozen import SCALE_NAME, FP8FrozenLinear, quantize_weight
from octavo.nn.sharded import plain_class
from octavo.numerics.checks import check_choice
from octavo.numerics.formats import E4M3
from octavo.numerics.quantize import BLOCK, Quantized

METHODS = ("merged_16bit", "merged_fp8", "lora")
GRANULARITIES = ("block", "channel")
_SCALE_NAMES = {"block": SCALE_NAME, "channel": "weight_scale"}
_WRAPPED = ".base_layer"
_PEFT_PARTS = ("base_layer", "original_module", "modules_to_save", "token_adapter", "trainable_tokens_delta")


def export_fp8(
    model: nn.Module,
    path: str | Path,
    *,
    tokenizer: Any = None,
    granularity: str | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write the model with its linears in FP8, for transformers and vLLM; the rest in `dtype` if it is in FP32.

    `granularity`: "block" of 128×128, or "channel", which transformers reads with the package compressed-tensors. Not
    given: "channel" for weights that are frozen in FP8 per channel, else "block".
    """
    sharded = made_ready(model)
    base = _base_model(model)
    if granularity is None:
        frozen = {module.granularity for module in base.modules() if isinstance(module, FP8FrozenLinear)}
        granularity = "channel" if frozen == {"channel"} else "block"
    check_choice("granularity", granularity, GRANULARITIES)
    left = sorted(name for name, module in _linears(base) if not _goes_into_fp8(base, name, module))
    left += sorted(name for name, chosen in _saved_whole(base).items() if isinstance(chosen, nn.Linear))
    quantization = _blocks_layout(left) if granularity == "block" else _channels_layout(left)
    return _save(base, granularity, quantization, sharded, Path(path), tokenizer, dtype)


def _blocks_layout(left: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": left,
    }


def _channels_layout(left: list[str]) -> dict[str, Any]:
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": fp8 | {"strategy": "channel", "dynamic": False},
        "input_activations": fp8 | {"strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": left,
    }


def save_merged(
    model: nn.Module,
    path: str | Path,
    method: str = "merged_16bit",
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write the model with its adapters merged into the weights, in BF16 or in FP8. The model itself stays as it is.

    `lora`: the adapters alone, as PEFT's `save_pretrained` writes them; also those of a sharded model. `dtype`: of
    tensors that the model has in FP32; without it they are written in FP32.
    """
    check_choice("save_method", method, METHODS)
    if method == "merged_fp8":
        return export_fp8(model, path, tokenizer=tokenizer, dtype=dtype)
    sharded = made_ready(model)
    if method == "lora":
        return _save_adapters(model, sharded, Path(path), tokenizer)
    return _save(_base_model(model), None, None, sharded, Path(path), tokenizer, dtype)


def _save_adapters(model: Any, sharded: bool, path: Path, tokenizer: Any) -> Path:
    if not hasattr(model, "get_base_model"):  # within a PEFT model, the base has a `peft_config`, too
        raise ValueError(
            f"save_method='lora' of a {plain_class(model).__name__}: it has no adapters of PEFT's; give "
            "FastLanguageModel.save_pretrained_merged the model that get_peft_model returned"
        )
    options = {"state_dict": kept(_adapters(model), sharded)} if sharded else {}
    with written_by_first(sharded) as writes:
        if writes:
            model.save_pretrained(str(path), **options)
            if tokenizer is not None:
                tokenizer.save_pretrained(path)
    return path


def _adapters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that PEFT saves of all adapters, under the names in the model's state dict."""
    from peft import get_peft_model_state_dict

    state = model.state_dict()
    chosen = {
        id(value)
        for name in model.peft_config
        for value in get_peft_model_state_dict(model, state_dict=state, adapter_name=name).values()
    }
    yield from ((name, value) for name, value in state.items() if id(value) in chosen)


def _base_model(model: Any) -> Any:
    """The transformers model, without what PEFT or a wrapper put around it."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(model, "config") or not hasattr(model, "save_pretrained"):
        raise TypeError(f"model is a {type(model).__name__}: takes a transformers model, or a PEFT model around one")
    for name, module in model.named_modules():
        if hasattr(module, "get_base_layer") and module.disable_adapters and getattr(module, "merged", False):
            if has_shards(module):
                raise ValueError(
                    f"{name}: its adapters are disabled, and merged into weights that are shards; call "
                    "unmerge_adapter() before fully_shard"
                )
            module.unmerge()  # as PEFT's own forward would: what is disabled is not in the weights
    return model


def _linears(base: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every linear under the name it has without adapters: the layer that PEFT put around it, or itself."""
    inside: set[str] = set()
    whole = tuple(f"{name}." for name in _saved_whole(base))
    for name, module in base.named_modules():
        if name.startswith(whole):
            continue
        if hasattr(module, "get_base_layer") and isinstance(module.get_base_layer(), nn.Linear):
            inside.add(f"{name}{_WRAPPED}")
            yield name, module
        elif isinstance(module, nn.Linear) and name not in inside and ".lora_" not in name:
            yield name, module


def _saved_whole(base: nn.Module) -> dict[str, nn.Module]:
    """The modules that PEFT trains a whole copy of (`modules_to_save`): the copy in use, or the original, by name."""
    chosen: dict[str, nn.Module] = {}
    for name, module in base.named_modules():
        copies: Any = getattr(module, "modules_to_save", None)
        if isinstance(copies, nn.ModuleDict):
            wrapper: Any = module
            active = [key for key in wrapper.active_adapters if key in copies]
            chosen[name] = copies[active[0]] if active and not wrapper.disable_adapters else wrapper.original_module
    return chosen


def _goes_into_fp8(base: Any, name: str, module: Any) -> bool:
    head = base.get_output_embeddings()
    inner = module.get_base_layer() if hasattr(module, "get_base_layer") else module
    return inner is not head and name != "lm_head"


def _tensors(base: Any, granularity: str | None) -> Iterator[tuple[str, Tensor]]:
    """The tensors to write, under the names of the plain model; linears in FP8 if there is a granularity."""
    linears = dict(_linears(base))
    wrapped = tuple(f"{name}." for name, module in linears.items() if hasattr(module, "get_base_layer"))
    for name, module in linears.items():
        inner = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        changed = hasattr(module, "get_base_layer") and bool(_active(module))
        with whole_parameters(module):
            if granularity is not None and _goes_into_fp8(base, name, module):
                q = _in_fp8(inner, _merged(module, inner) if changed else None, granularity)
                yield f"{name}.weight", q.data
                yield f"{name}.{_SCALE_NAMES[granularity]}", q.scale
            else:
                yield f"{name}.weight", _merged(module, inner).to(_dtype(base))
            if inner.bias is not None:
                yield f"{name}.bias", inner.bias.detach()
    whole = _saved_whole(base)
    for name, chosen in whole.items():
        yield from ((f"{name}.{key}", value.detach()) for key, value in chosen.state_dict().items())
    wrapped += tuple(f"{name}." for name in whole)
    for name, module in _adapted_embeddings(base):
        wrapped += (f"{name}.",)
        with whole_parameters(module):
            yield f"{name}.weight", _merged(module, module.get_base_layer()).to(_dtype(base))
    taken = {f"{name}.{key}" for name in linears for key in ("weight", "bias", SCALE_NAME)}
    for name, value in base.state_dict().items():
        if name not in taken and not name.startswith(wrapped) and ".lora_" not in name:
            odd = next((part for part in _PEFT_PARTS if f".{part}." in name), None)
            if odd is not None:
                raise ValueError(
                    f"{name}: PEFT holds this module as {odd}, which cannot be merged here; save the adapter itself "
                    "(model.save_pretrained), or train it by modules_to_save"
                )
            yield name, value.detach()


def _adapted_embeddings(base: nn.Module) -> list[tuple[str, Any]]:
    return [
        (name, module)
        for name, module in base.named_modules()
        if hasattr(module, "lora_embedding_A") and isinstance(module.get_base_layer(), nn.Embedding)
    ]


def _in_fp8(inner: nn.Linear, merged: Tensor | None, granularity: str) -> Quantized:
    there = isinstance(inner, FP8FrozenLinear) and inner.granularity == granularity and inner.format is E4M3
    if merged is None and there and isinstance(inner, FP8FrozenLinear):
        return inner.quantized
    return quantize_weight(_high_precision(inner) if merged is None else merged, granularity)


def _high_precision(inner: Any) -> Tensor:
    return (
        inner.dequantize(torch.float32) if isinstance(inner, FP8FrozenLinear) else full_precision(inner.weight).detach()
    )


def _active(module: Any) -> list[str]:
    if module.merged or module.disable_adapters:
        return []
    known = module.lora_A if len(module.lora_A) else module.lora_embedding_A
    return [name for name in module.active_adapters if name in known]


def _merged(module: Any, inner: nn.Module) -> Tensor:
    """The weight with the active adapters added, in FP32 if there are any."""
    weight = _high_precision(inner)
    for name in _active(module) if hasattr(module, "get_base_layer") else ():
        weight = weight.float() + module.get_delta_weight(name).detach().float()
    return weight


def _dtype(base: Any) -> torch.dtype:
    """The dtype of tensors that are not in FP8."""
    embedding = base.get_input_embeddings()
    return embedding.weight.dtype if embedding is not None else torch.bfloat16


def _save(
    base: Any,
    granularity: str | None,
    quantization: Any,
    sharded: bool,
    path: Path,
    tokenizer: Any,
    dtype: torch.dtype | None,
) -> Path:
    tensors = kept(_in_dtype(_tensors(base, granularity), dtype), sharded)
    with written_by_first(sharded) as writes:
        if writes:
            _write(base, tensors, quantization, path, tokenizer, dtype)
    return path


def _in_dtype(tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Cast what is in FP32, except scales."""
    scales = tuple(f".{name}" for name in _SCALE_NAMES.values())
    for name, value in tensors:
        cast = dtype is not None and value.dtype == torch.float32 and not name.endswith(scales)
        yield name, value.to(dtype) if cast else value


def _write(
    base: Any,
    tensors: dict[str, Tensor],
    quantization: Any,
    path: Path,
    tokenizer: Any,
    dtype: torch.dtype | None,
) -> None:
    from huggingface_hub import save_torch_state_dict

    if path.is_file():
        raise ValueError(f"path={str(path)!r}: a file; give a folder")
    config = copy.deepcopy(base.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if quantization is not None:
        config.quantization_config = quantization
    config.architectures = [plain_class(base).__name__]
    config.dtype = dtype or _dtype(base)
    if getattr(config, "tie_word_embeddings", False):
        head = tensors.pop("lm_head.weight", None)
        embedding = next((value for name, value in tensors.items() if name.endswith("embed_tokens.weight")), None)
        if head is not None and embedding is not None and not torch.equal(head, embedding):
            config.tie_word_embeddings = False  # one of them was trained apart from the other
            tensors["lm_head.weight"] = head
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        save_torch_state_dict({k: alone(v) for k, v in tensors.items()}, folder, metadata={"format": "pt"})
        config.save_pretrained(folder)
        if getattr(base, "generation_config", None) is not None:
            base.generation_config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        path.mkdir(exist_ok=True)
        for old in path.glob("model*.safetensors*"):
            old.unlink()
        for file in Path(folder).iterdir():
            shutil.move(str(file), path / file.name)


@cache
def add_saving() -> None:
    """Give transformers' models the methods that scripts for merged checkpoints call, of them or through PEFT."""
    from transformers import PreTrainedModel

    def save_pretrained_merged(
        self: nn.Module,
        save_directory: str | Path,
        tokenizer: Any = None,
        save_method: str = "merged_16bit",
        maximum_memory_usage: float | None = None,  # noqa: ARG001
    ) -> Path:
        """Write the model with its adapters merged in: see `FastLanguageModel.save_pretrained_merged`."""
        return save_merged(self, save_directory, save_method, tokenizer=tokenizer)

    cls: Any = PreTrainedModel
    cls.save_pretrained_merged = save_pretrained_merged
    if find_spec("peft") is not None:  # whose models would call the base's, which has the adapters in its layers alone
        from peft import PeftModel

        adapted: Any = PeftModel
        adapted.save_pretrained_merged = save_pretrained_merged
    for name, fix in _NOT_WRITTEN.items():
        setattr(cls, name, _refused(name, fix))


_NOT_WRITTEN = {
    "save_pretrained_gguf": "save_pretrained_merged(folder), then convert_hf_to_gguf.py of llama.cpp on that folder",
    "push_to_hub_gguf": "save_pretrained_merged(folder), then convert_hf_to_gguf.py of llama.cpp on that folder",
    "push_to_hub_merged": "save_pretrained_merged(folder), then huggingface_hub.upload_folder(folder_path=folder, ...)",
}


def _refused(name: str, fix: str) -> Any:
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name}: Octavo writes safetensors into a folder; call {fix}")

    return method
