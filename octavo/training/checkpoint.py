"""Checkpoints that are either complete or absent.

A checkpoint is a folder `checkpoint-000120` with three files:

    model.safetensors   the parameters, readable by anything that reads safetensors
    state.pt            the rest: optimiser, random number generators, FP8 histories, step, settings
    manifest.json       the size and CRC-32 of the other two

It is written as `checkpoint-000120.tmp`, forced to the disk, and renamed. A process killed at any point, or a disk that
fills up, leaves at worst a `.tmp` folder, which nothing reads and the next save clears away. Removing an old checkpoint
goes the same way backwards: renamed to `.tmp` first. So a folder with the right name was complete once, and the
manifest tells whether it still is.

A run on several ranks writes folders of the same names by `octavo/dist/checkpoint.py`, which keeps to the same rules.

A damaged checkpoint is never passed over quietly for an older one: the error names it and the user decides.
"""

import io
import json
import pickle
import re
import shutil
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from octavo.dist import checkpoint as dist_checkpoint
from octavo.dist.checkpoint import FILE
from octavo.dist.durable import sync_folder, write_durable
from octavo.dist.together import all_or_none, from_first, rank
from octavo.training.errors import RunError
from octavo.training.files import disk_errors

KEEP = 2
NAME = re.compile(r"checkpoint-(\d{6,})")
UNFINISHED = re.compile(r"checkpoint-\d{6,}\.tmp")
MODEL, STATE, MANIFEST = "model.safetensors", "state.pt", "manifest.json"


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"checkpoint-{step:06d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return every complete checkpoint in `folder`, oldest first."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if NAME.fullmatch(path.name)]
    return sorted(checkpoints, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def written_checkpoints(folder: Path) -> list[Path]:
    """Return every checkpoint in `folder`, and the remains of unfinished ones."""
    return list_checkpoints(folder) + _all_unfinished(folder)


def foreign_files(path: Path) -> list[Path]:
    """Return the files in a checkpoint's folder that do not belong to a checkpoint, and must stay."""
    ours = (MODEL, STATE)
    return [file for file in sorted(path.rglob("*")) if file.name not in ours and not FILE.fullmatch(file.name)]


def save_checkpoint(folder: Path, step: int, model: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Write the checkpoint of `step`, then remove all but the newest two."""
    target = checkpoint_path(folder, step)
    if target.exists():  # a signal right after a regular save asks for the same step again
        return target
    contents = {MODEL: model_bytes(model), STATE: _state_bytes(state)}
    manifest = {name: {"bytes": len(content), "crc32": zlib.crc32(content)} for name, content in contents.items()}
    contents[MANIFEST] = json.dumps(manifest, indent=2).encode()

    with _write_errors(target):
        _clear_unfinished(folder)
        unfinished = _unfinished(target)
        try:
            unfinished.mkdir(parents=True)
            for name, content in contents.items():
                write_durable(unfinished / name, content)
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)  # free the space on the full disk
            raise
        sync_folder(unfinished)
        unfinished.rename(target)
        sync_folder(folder)
        _remove_old(folder)
    return target


def save_shards(folder: Path, step: int, learner: Any, state: Mapping[str, Any]) -> Path:
    """Write the checkpoint of `step` on several ranks, which all call it; then rank 0 removes old ones."""
    target = checkpoint_path(folder, step)
    if from_first(target.exists()):
        return target
    with _write_errors(target):
        with all_or_none():
            if rank() == 0:
                _clear_unfinished(folder)
        dist_checkpoint.save(target, learner.model, learner.optimizer, scaling=_scaling(learner), extra=state)
        with all_or_none():
            if rank() == 0:
                _remove_old(folder)
    return target


def load_shards(path: Path, learner: Any) -> int:
    """Load a checkpoint of several ranks, on any number; return the number of ranks that saved it."""
    try:
        return dist_checkpoint.load(path, learner.model, learner.optimizer, scaling=_scaling(learner)).ranks
    except dist_checkpoint.DamagedCheckpoint as error:
        raise _damaged(path, str(error).partition(" is damaged: ")[2]) from error


def read_shards_state(path: Path) -> dict[str, Any]:
    """Return the state of a checkpoint of several ranks, without loading it."""
    try:
        return dist_checkpoint.read_extra(path)
    except dist_checkpoint.DamagedCheckpoint as error:
        raise _damaged(path, str(error).partition(" is damaged: ")[2]) from error


def _scaling(learner: Any) -> list[Any]:
    return [] if learner.scaling is None else [learner.scaling]


def _write_errors(target: Path) -> AbstractContextManager[None]:
    earlier = list_checkpoints(target.parent)
    earlier_one = f"{earlier[-1].name} is intact" if earlier else "there is no earlier one"
    return disk_errors(target, hint=f"{earlier_one}; free some space, then continue with --resume")


def _remove_old(folder: Path) -> None:
    for old in list_checkpoints(folder)[:-KEEP]:
        if not foreign_files(old):
            _remove(old)


def load_checkpoint(path: Path, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load the parameters (to `device`) and the state (to the CPU) of a checkpoint, and check them by its manifest.

    Only tensors and plain values are unpickled (`weights_only`). The low-bit states of torchao's optimisers are allowed
    by torchao itself once it is imported, so build the optimiser first.
    """
    contents = _read_checked(path)
    try:
        model = safetensors.torch.load(contents[MODEL])
        state = torch.load(io.BytesIO(contents[STATE]), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's own message advises weights_only=False
        raise _damaged(path, f"{STATE} holds more than tensors and plain values, or is no file of torch") from error
    except (safetensors.SafetensorError, RuntimeError, ValueError, EOFError) as error:
        raise _damaged(path, str(error).splitlines()[0]) from error
    return {name: tensor.to(device) for name, tensor in model.items()}, state


def model_bytes(model: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    return safetensors.torch.save(
        {name: tensor.detach().cpu().contiguous() for name, tensor in model.items()}, metadata
    )


def _state_bytes(state: Mapping[str, Any]) -> bytes:
    # In memory first: written straight to a full disk, torch.save reports an internal error instead of the OSError.
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def _read_checked(path: Path) -> dict[str, bytes]:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        contents = {name: (path / name).read_bytes() for name in (MODEL, STATE)}
        for name, content in contents.items():
            size, crc32 = manifest[name]["bytes"], manifest[name]["crc32"]
            if len(content) != size:
                raise _damaged(path, f"{name} has {len(content):,} bytes instead of {size:,}")
            if zlib.crc32(content) != crc32:
                raise _damaged(path, f"{name} is not what was written (its checksum differs)")
    except OSError as error:
        raise _damaged(path, f"{Path(error.filename or path).name}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"{MANIFEST} cannot be read") from error
    return contents


def _damaged(path: Path, why: str) -> RunError:
    checkpoints = list_checkpoints(path.parent)
    earlier = checkpoints[: checkpoints.index(path)] if path in checkpoints else []
    fall_back = f"from {earlier[-1].name}" if earlier else "from the start, as there is no earlier one"
    return RunError(f"checkpoint {path} is damaged: {why}; delete that folder to resume {fall_back}")


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _all_unfinished(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("checkpoint-*.tmp") if UNFINISHED.fullmatch(path.name))


def _clear_unfinished(folder: Path) -> None:
    for path in _all_unfinished(folder):
        shutil.rmtree(path)


def _remove(path: Path) -> None:
    unfinished = _unfinished(path)
    path.rename(unfinished)
    shutil.rmtree(unfinished)
