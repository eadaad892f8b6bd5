"""Checkpoints of several ranks: each writes its own shards, and any number of ranks reads them.

    save(path, model, optimizer, extra={"step": 120})      # all ranks call it
    loaded = load(path, model, optimizer)                  # on as many ranks, or on more, or fewer, or in one process

A checkpoint is a folder:

    .metadata, __0_0.distcp, …   torch.distributed.checkpoint: parameters, buffers, optimiser states, by name
    rank-0.pt, rank-1.pt, …      of each rank: scaling states, random number generators, buffers that differ between
                                 ranks, `data`; of rank 0 also `extra`
    manifest.json                the number of ranks, and the size and CRC-32 of every other file

It is written as `<path>.tmp`, forced to the disk and, when every rank is done, renamed by rank 0. So a rank that is
killed while it saves leaves the previous checkpoint whole, and a folder with the right name was complete once. All
ranks must see the same file system.

On as many ranks as saved it, everything is as it was, bit for bit. On another number, tensors are cut anew, and

- scaling states of all ranks become one: the larger of each number (`merged`), as if amax had been shared;
- a low-bit state whose blocks do not end where shards do is read as a whole, and rounded again in its new blocks;
- buffers that differed between ranks, such as the running statistics of a BatchNorm, are those of rank 0;
- a rank that had no predecessor draws from a generator of its own.

Parameters may be plain (one process, DDP) or DTensors (FSDP2), and either is read into either.
"""

import json
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.dist.amax import managers_in
from octavo.dist.buffers import of_each_rank
from octavo.dist.durable import sync_folder, write_durable
from octavo.dist.optimizer_states import load_optimizer, optimizer_tensors
from octavo.dist.random_states import get_rng_states, set_rng_states
from octavo.dist.rank_files import DamagedCheckpoint, read_state, state_bytes, state_file
from octavo.dist.together import all_or_none, from_all, host_group, one_process_is_meant, rank
from octavo.nn.autocast import FP8Autocast, all_contexts
from octavo.nn.frozen import SCALE_NAME
from octavo.nn.sharded import local, ranks, refuse_fsdp1
from octavo.numerics import FP8ScalingManager

MANIFEST, METADATA = "manifest.json", ".metadata"
MODEL, OPTIMIZER = "model.", "optimizer."
FILE = re.compile(r"rank-\d+\.pt|__\d+_\d+\.distcp|manifest\.json|\.metadata(\.tmp)?")  # names in a checkpoint
_CHUNK = 2**24  # bytes read at a time


@dataclass(frozen=True)
class Loaded:
    """The contents of a checkpoint besides tensors: the ranks that saved it, `extra`, and `data` of each rank."""

    ranks: int
    extra: dict[str, Any]
    data: list[Any]


def is_sharded_checkpoint(path: Path) -> bool:
    """Return True if a folder is a checkpoint of this module."""
    return (path / METADATA).is_file()


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scaling: FP8ScalingManager | Iterable[FP8ScalingManager] | None = None,
    data: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint; every rank calls it with the same `path`, which must not exist.

    `scaling`: the managers whose states to save; by default those of the model's FP8 layers, and that of the autocast
    which was given the model. (An `fp8_autocast()` without `model` has to be named: `scaling=context.scaling`.) `data`:
    of this rank, such as the state of its data loader. `extra`: of the whole run; that of rank 0 is kept. Both are
    tensors and plain values, in lists, tuples and dicts; others raise a TypeError before anything is written.
    """
    refuse_fsdp1("octavo.dist.checkpoint", model)
    target = _same_on_all_ranks(path)
    unfinished = target.with_name(target.name + ".tmp")
    model = unwrapped(model)
    with all_or_none():
        state = _tensors(model)
    own_buffers, buffers = of_each_rank(model, state)
    with all_or_none():
        managers = _managers(model, scaling)
        tensors, own = _contents(model, state | buffers, optimizer, managers, data, dict(extra or {}))
        content = state_bytes({**own, "buffers": own_buffers})
    with all_or_none():
        if rank() == 0:
            if target.exists():
                raise FileExistsError(f"{target} exists: a checkpoint is not written over another")
            _clear(unfinished)
            unfinished.mkdir(parents=True)
    try:
        _write(unfinished, tensors, content)
        with all_or_none():
            if rank() == 0:
                unfinished.rename(target)
                sync_folder(target.parent)
    except OSError:
        if rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)  # frees the space on a full disk
        raise
    return target


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scaling: FP8ScalingManager | Iterable[FP8ScalingManager] | None = None,
) -> Loaded:
    """Load a checkpoint into a model, its optimiser, its scaling states and this rank's random number generators.

    The optimiser needs no states yet. Every rank calls it; on any number of ranks.
    """
    from torch.distributed.checkpoint import load as read_tensors

    refuse_fsdp1("octavo.dist.checkpoint", model)
    path, model = _same_on_all_ranks(path), unwrapped(model)
    with all_or_none():
        _check_exists(path)
    saved_by = _check(path)
    states = [read_state(path, number) for number in range(saved_by)]
    first = states[0]
    tensors = {MODEL + name: tensor for name, tensor in _tensors(model).items()}
    reader = _reader(path)
    _check_names(path, tensors, reader)
    with one_process_is_meant():
        read_tensors(tensors, storage_reader=reader, process_group=host_group(), no_dist=ranks() == 1)
    if saved_by == ranks():
        for name, buffer in states[rank()].get("buffers", {}).items():  # not in checkpoints of earlier versions
            tensors[MODEL + name].copy_(buffer)
    if any(not _is_view(tensors[MODEL + name], value) for name, value in _tensors(model).items()):
        model.load_state_dict({name.removeprefix(MODEL): tensor for name, tensor in tensors.items()})
    if optimizer is not None:
        if "optimizer" not in first:
            raise ValueError(f"{path} holds no optimiser: it was saved without one; load it with optimizer=None")
        load_optimizer(model, optimizer, first["optimizer"], _reader(path), OPTIMIZER)
    _load_scaling(_managers(model, scaling), [state["scaling"] for state in states], path)
    _load_rng([state["rng"] for state in states])
    return Loaded(saved_by, first["extra"], [state["data"] for state in states])


def read_extra(path: str | Path) -> dict[str, Any]:
    """Return `extra` of a checkpoint, without its tensors and without other ranks."""
    path = Path(path)
    _check_exists(path)
    extra: dict[str, Any] = read_state(path, 0)["extra"]
    return extra


def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one scaling state for those of several ranks: the larger of each number, for every name."""
    first: dict[str, Any] = {}
    for name, value in states[0].items():
        first[name] = list(value) if isinstance(value, list) else value.clone()
    per_name = [name for name, value in first.items() if isinstance(value, Tensor)]
    for state in states[1:]:
        places = {name: i for i, name in enumerate(first["names"])}
        for i, name in enumerate(state["names"]):
            j = places.get(name)
            if j is None:
                for key in ("names", "maximum", "margin"):
                    first[key].append(state[key][i])
                for key in per_name:
                    first[key] = torch.cat([first[key], state[key][i : i + 1]])
            else:
                for key in per_name:
                    first[key][j] = torch.maximum(first[key][j], state[key][i])
    return first


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel or `torch.compile`, whose names have no prefix."""
    while True:
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        inner = inner._modules.get("_orig_mod") or inner  # of `torch.compile`, whose class is Dynamo's
        if inner is model:
            return model
        model = inner


def _contents(
    model: nn.Module,
    state: dict[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    managers: list[FP8ScalingManager],
    data: Any,
    extra: dict[str, Any],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what torch.distributed.checkpoint writes, and what this rank writes itself."""
    tensors = {MODEL + name: tensor for name, tensor in state.items()}
    common: dict[str, Any] = {"extra": extra}
    if optimizer is not None:
        states, common["optimizer"] = optimizer_tensors(model, optimizer)
        tensors |= {OPTIMIZER + name: tensor for name, tensor in states.items()}
    own = {
        "scaling": [manager.state_dict() for manager in managers],
        "rng": get_rng_states(p.device for p in model.parameters()),
        "data": data,
        **(common if rank() == 0 else {}),
    }
    return tensors, own


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} in the state of {type(model).__name__} is no tensor: {type(value).__name__}")
    # The scale of a whole frozen weight has a dimension where it is sharded, and none elsewhere: here it always has.
    return {name: x.reshape(1) if name.endswith(SCALE_NAME) and not x.dim() else x for name, x in state.items()}


def _is_view(read: Tensor, current: Tensor) -> bool:
    """Whether a tensor that was read into is the model's own, and not a copy that `state_dict` made."""
    return local(read).data_ptr() == local(current).data_ptr()


def _managers(
    model: nn.Module, given: FP8ScalingManager | Iterable[FP8ScalingManager] | None
) -> list[FP8ScalingManager]:
    if given is not None:
        return [given] if isinstance(given, FP8ScalingManager) else list(given)
    found = [*managers_in(model.modules()), *_managers_of_autocasts(model)]
    if not found and any(map(_may_be_of_any_model, all_contexts())):
        raise ValueError(
            f"no scales of this {type(model).__name__} were found, and an fp8_autocast() was made without a model: say "
            "whose scales belong to the checkpoint, scaling=context.scaling, or scaling=[] for none; or make it by "
            "fp8_autocast(model=model)"
        )
    return found


def _managers_of_autocasts(model: nn.Module) -> list[FP8ScalingManager]:
    managers = [context.scaling for context in all_contexts()]
    models = [manager.followed_model() for manager in managers]
    of_model = [x for x, its in zip(managers, models, strict=True) if its is not None and unwrapped(its) is model]
    if len(of_model) > 1:
        raise ValueError(
            f"{len(of_model)} contexts of fp8_autocast were made for this {type(model).__name__}: say which scales "
            "belong to the checkpoint, scaling=context.scaling, or scaling=[…] for several"
        )
    return of_model


def _may_be_of_any_model(context: FP8Autocast) -> bool:
    """Whether a context has scales from earlier steps, and was not told of which model."""
    return not context.has_model and context.config.scaling == "delayed" and bool(context.scaling.states)


def _write(folder: Path, tensors: dict[str, Tensor], own: bytes) -> None:
    """Write the files of all ranks, and wait until they are on the disk."""
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint import save as write_tensors
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with one_process_is_meant():
            write_tensors(
                tensors,
                storage_writer=FileSystemWriter(folder),
                process_group=host_group(),
                no_dist=ranks() == 1,
            )
    except CheckpointException as error:  # on every rank, with the errors of those that failed
        number, failure = next(iter(error.failures.items()))
        raise OSError(f"rank {number}: {failure[0]}") from error
    with all_or_none():
        mine = folder / state_file(rank())
        write_durable(mine, own)
        files = [mine, *sorted(folder.glob(f"__{rank()}_*.distcp"))]
        if rank() == 0:
            files.append(folder / METADATA)
        facts = {file.name: {"bytes": file.stat().st_size, "crc32": _crc32(file)} for file in files}
    everyone = from_all(facts)
    with all_or_none():
        if rank() == 0:
            manifest = {"ranks": ranks(), "files": {name: fact for facts in everyone for name, fact in facts.items()}}
            write_durable(folder / MANIFEST, json.dumps(manifest, indent=2).encode())
            sync_folder(folder)


def _same_on_all_ranks(path: str | Path) -> Path:
    """Refuse paths that differ: a name with the time in it, say, or a relative path in several working folders."""
    paths = from_all(str(Path(str(path)).absolute()))
    for number, other in enumerate(paths):
        if other != paths[0]:
            raise ValueError(f"rank 0 has the path {paths[0]}, and rank {number} {other}: give all ranks the same")
    return Path(path)


def _clear(unfinished: Path) -> None:
    """Remove what a save that was killed has left; nothing else."""
    foreign = [file.name for file in sorted(unfinished.glob("*")) if not FILE.fullmatch(file.name)]
    if foreign:
        raise FileExistsError(
            f"{unfinished} exists and holds {foreign[0]}, which is of no checkpoint: move it, or save to another path"
        )
    shutil.rmtree(unfinished, ignore_errors=True)


def _check_exists(path: Path) -> None:
    if not any((path / name).exists() for name in (MANIFEST, METADATA)):
        why = f"it has neither {MANIFEST} nor {METADATA}" if path.exists() else "there is no such folder"
        raise FileNotFoundError(f"{path} is no checkpoint of several ranks: {why}")


def _check(path: Path) -> int:
    """Compare the files with the manifest, each rank some of them; return the number of ranks that wrote them."""
    found, saved_by = "", 0
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        saved_by, files = int(manifest["ranks"]), sorted(manifest["files"].items())
        for name, fact in files[rank() :: ranks()]:
            size = (path / name).stat().st_size
            if size != fact["bytes"]:
                found = found or f"{name} has {size:,} bytes instead of {fact['bytes']:,}"
            elif _crc32(path / name) != fact["crc32"]:
                found = found or f"{name} is not what was written (its checksum differs)"
    except OSError as error:
        found = f"{Path(error.filename or path).name}: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, AttributeError):
        found = f"{MANIFEST} cannot be read"
    for words in from_all(found):
        if words:
            raise DamagedCheckpoint(f"checkpoint {path} is damaged: {words}")
    return saved_by


def _check_names(path: Path, tensors: Mapping[str, Tensor], reader: Any) -> None:
    saved = {name: data for name, data in reader.read_metadata().state_dict_metadata.items() if name.startswith(MODEL)}
    if missing := sorted(tensors.keys() - saved.keys()):
        raise ValueError(f"{path} has no {missing[0].removeprefix(MODEL)}: it is of another model")
    if extra := sorted(saved.keys() - tensors.keys()):
        raise ValueError(f"{path} has {extra[0].removeprefix(MODEL)}, and the model has not: it is of another model")
    for name, tensor in tensors.items():
        if saved[name].size != tensor.shape:
            raise ValueError(
                f"{path}: {name.removeprefix(MODEL)} has shape {tuple(saved[name].size)}, the model's has "
                f"{tuple(tensor.shape)}: it is of another model"
            )


def _reader(path: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemReader

    return FileSystemReader(path)


def _load_scaling(managers: list[FP8ScalingManager], states: list[list[dict[str, Any]]], path: Path) -> None:
    if any(len(state) != len(managers) for state in states):
        raise ValueError(
            f"{path} holds {len(states[0])} scaling states, and there are {len(managers)} here: build both with the "
            "same conversion, and pass the manager of an autocast as scaling="
        )
    for i, manager in enumerate(managers):
        of_ranks = [state[i] for state in states]
        manager.load_state_dict(of_ranks[rank()] if len(states) == ranks() else merged(of_ranks))


def _load_rng(states: list[dict[str, Any]]) -> None:
    state = dict(states[min(rank(), len(states) - 1)])
    if torch.cuda.is_available() and state["cuda"]:  # a rank has one GPU; its number may be another now
        state["cuda"] = {torch.cuda.current_device(): next(iter(state["cuda"].values()))}
    set_rng_states(state)
    if rank() >= len(states):
        torch.manual_seed(int(torch.randint(2**62, ())) + rank())


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while content := file.read(_CHUNK):
            value = zlib.crc32(content, value)
    return value
