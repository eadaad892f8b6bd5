"""Weights out of shards: one folder of safetensors, written by one process.

    export("checkpoint-000120", "model")        # from a checkpoint of any number of ranks; needs no other rank

(`octavo/dist/whole.py` gathers the shards that ranks have in memory, and `FP8Trainer.save_model` writes those.)

`export` reads and writes a file's worth of tensors at a time, so that its memory does not grow with the model. Files
and their index have the names that Hugging Face's libraries expect; `config.json` and the tokenizer are the model's own
and are not in a checkpoint: copy them beside.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.dist.checkpoint import MODEL, is_sharded_checkpoint
from octavo.dist.durable import sync_folder
from octavo.dist.together import one_process_is_meant
from octavo.numerics.checks import check_choice

LARGEST = 5 * 10**9  # bytes of a file, as transformers writes them
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def export(
    checkpoint: str | Path, folder: str | Path, *, dtype: torch.dtype | str | None = None, largest: int = LARGEST
) -> list[Path]:
    """Write the weights of a sharded checkpoint as safetensors; return the files. One process calls it.

    `dtype`: what floating-point weights become (FP8 ones stay), such as `torch.bfloat16` or "bf16"; as they are, by
    default. `largest`: bytes of a file.
    A file appears under its name only when it is complete, and the index last.
    """
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint import load as read_tensors

    if isinstance(dtype, str):
        check_choice("dtype", dtype, DTYPES)
        dtype = DTYPES[dtype]
    checkpoint, folder = Path(checkpoint), Path(folder)
    if not is_sharded_checkpoint(checkpoint):
        raise ValueError(f"{checkpoint} is no checkpoint of several ranks: it has no .metadata")
    reader = FileSystemReader(checkpoint)
    saved = reader.read_metadata().state_dict_metadata
    about: dict[str, Any] = {name: value for name, value in saved.items() if name.startswith(MODEL)}
    parts = list(_parts(about, largest))
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    index: dict[str, str] = {}
    for number, names in enumerate(parts, start=1):
        tensors = {name: torch.empty(about[name].size, dtype=about[name].properties.dtype) for name in names}
        with one_process_is_meant():
            read_tensors(tensors, storage_reader=FileSystemReader(checkpoint), no_dist=True)
        plain = {name.removeprefix(MODEL): _as(tensor, dtype) for name, tensor in tensors.items()}
        name = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        temporary = folder / f"{name}.tmp"
        save_file(plain, temporary, metadata={"format": "pt"})
        files.append(temporary.replace(folder / name))
        index |= dict.fromkeys(plain, name)
    if len(parts) > 1:
        size = sum(file.stat().st_size for file in files)
        content = {"metadata": {"total_size": size}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))
    sync_folder(folder)
    return files


def _as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or not tensor.is_floating_point() or tensor.dtype in _FP8:
        return tensor
    return tensor.to(dtype)


def _parts(about: dict[str, Any], largest: int) -> Iterator[list[str]]:
    """Yield names of tensors that fit into one file, in their order."""
    names: list[str] = []
    size = 0
    for name, value in about.items():
        bytes = value.size.numel() * value.properties.dtype.itemsize
        if names and size + bytes > largest:
            yield names
            names, size = [], 0
        names.append(name)
        size += bytes
    yield names
