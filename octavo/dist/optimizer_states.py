"""States of an optimiser as tensors with names, which torch.distributed.checkpoint can cut anew for other ranks.

torch numbers the parameters of an optimiser; here a state is `<parameter>.<key>`, such as `layers.0.weight.exp_avg`. A
state of its parameter's shape is sharded as the parameter is. Everything goes through the optimiser's own `state_dict`
and `load_state_dict`, so that what hangs on these (FP32 masters, say) takes part.

A state in few bits has a scale for every block of elements. A block that a new shard would cut is the one case in which
bits cannot be kept: such a state is read as a whole, in FP32, and rounded again in the blocks of the shard.
"""

import math
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo.dist.together import from_all, host_group, one_process_is_meant
from octavo.dist.whole import has_shards, part_of
from octavo.nn.sharded import local, place_of, ranks, refuse_fsdp1

SIGNED = "exp_avg"  # of the states in few bits, the only one that may be negative
_IN_FEW_BITS = re.compile(r"(8bit|4bit|Fp8)$")


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the states of an optimiser by name, and the rest: its groups, and the blocks of states in few bits."""
    saved = optimizer.state_dict()
    names = _names(model, optimizer)
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    blocks: dict[str, int] = {}
    for number, state in saved["state"].items():
        for key, value in state.items():
            name = f"{names[number]}.{key}"
            if not isinstance(value, Tensor):
                plain[name] = value
                continue
            tensors[name] = value
            if block := _block_size(value):
                blocks[name] = block
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in saved["param_groups"]]
    keys = {names[number]: list(state) for number, state in saved["state"].items()}
    kind = _class_name(optimizer)
    return tensors, {"class": kind, "groups": groups, "keys": keys, "plain": plain, "blocks": blocks}


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any], reader: Any, prefix: str
) -> None:
    """Read states that were saved as `prefix` + name into an optimiser, which may have stepped before or not.

    Parameters and groups are found by name; their order may be another one.
    """
    from torch.distributed.checkpoint import load as read_tensors

    names = _names(model, optimizer)
    _check_class(optimizer, saved)
    numbers = {name: number for number, name in enumerate(names)}
    parameters = dict(zip(names, (p for group in optimizer.param_groups for p in group["params"]), strict=True))
    if unknown := sorted(saved["keys"].keys() - numbers.keys()):
        raise ValueError(
            f"the saved optimiser trained {unknown[0]}, and this one does not: give it the same parameters"
        )
    groups = _groups_in_this_order(optimizer, names, saved["groups"])
    metadata = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {}
    for name, keys in saved["keys"].items():
        for entry, key in ((f"{name}.{key}", key) for key in keys):
            if entry not in saved["plain"]:
                about, block = metadata[prefix + entry], saved["blocks"].get(entry)
                tensors[entry] = _empty(optimizer, parameters[name], key, about, block)
    cut = [e for e, into in tensors.items() if _cuts_a_block(metadata[prefix + e], saved["blocks"].get(e, 1), into)]
    whole = {entry for entries in from_all(cut) for entry in entries}  # ranks are cut at different places
    group, alone = host_group(), ranks() == 1
    as_saved = {prefix + entry: into for entry, into in tensors.items() if entry not in whole}
    with one_process_is_meant():
        read_tensors(as_saved, storage_reader=reader, process_group=group, no_dist=alone)
        for entry in sorted(whole):  # one by one: each is as large as its whole parameter in FP32
            full = torch.empty(tensors[entry].shape, dtype=torch.float32)
            read_tensors({prefix + entry: full}, storage_reader=reader, process_group=group, no_dist=alone)
            _put(full, tensors[entry])
    state: dict[int, dict[str, Any]] = {}
    for name, keys in saved["keys"].items():
        entries = {key: f"{name}.{key}" for key in keys}
        state[numbers[name]] = {
            key: saved["plain"][entry] if entry in saved["plain"] else tensors[entry] for key, entry in entries.items()
        }
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _class_name(optimizer: Any) -> str:
    """The name of an optimiser's class; looks inside Accelerate's wrapper."""
    return type(getattr(optimizer, "optimizer", optimizer)).__name__


def _check_class(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Refuse an optimiser of another kind: it would take a step of its own with states that are not its own."""
    ours = _class_name(optimizer)
    theirs = saved.get("class", ours)  # not in checkpoints of earlier versions
    if _kind(theirs) != _kind(ours):
        raise ValueError(
            f"the saved optimiser is {theirs}, this one {ours}: build the same, or load the model alone, with "
            "optimizer=None"
        )


def _kind(name: str) -> str:
    """Return the name of variants that read each other's states: "AdamW" for AdamW8bit, and for torchao's _AdamW."""
    return _IN_FEW_BITS.sub("", name.removeprefix("_"))


def _groups_in_this_order(
    optimizer: torch.optim.Optimizer, names: list[str], saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the saved groups in the order of this optimiser's, with its numbers: torch goes by position alone."""
    left, ordered, first = list(saved), [], 0
    if len(saved) != len(optimizer.param_groups):
        raise ValueError(
            f"the saved optimiser has {len(saved)} parameter groups, this one {len(optimizer.param_groups)}"
        )
    for own in optimizer.param_groups:
        numbers = range(first, first := first + len(own["params"]))
        mine = {names[number] for number in numbers}
        same = next((group for group in left if set(group["params"]) == mine), None)
        if same is None:
            raise ValueError(
                f"the saved optimiser has no parameter group of {_some(mine)}: build the same groups, in any order"
            )
        left = [group for group in left if group is not same]
        # `param_names` are in the order of the saved group, and this optimiser has its own.
        rest = {key: value for key, value in same.items() if key != "param_names"}
        ordered.append({**rest, "params": list(numbers)})
    return ordered


def _some(names: set[str]) -> str:
    few = ", ".join(sorted(names)[:3])
    return f"{few} and {len(names) - 3} more" if len(names) > 3 else few or "no parameters"


def cut_states(optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> dict[str, Any]:
    """Return a `state_dict` that one process saved, with states cut for the shards of this optimiser's parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        number: {key: _cut(optimizer, parameters[number], key, value) for key, value in states.items()}
        for number, states in whole["state"].items()
    }
    return {**whole, "state": state}


def _cut(optimizer: Any, parameter: Tensor, key: str, value: Any) -> Any:
    if not (isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape):
        return value
    block = _block_size(value)
    if block is None:
        return part_of(value, parameter)
    into: Tensor = optimizer._new_buffer(parameter, key == SIGNED)
    rows, *columns = _own_place(into)
    row = value.numel() // value.shape[0]
    aligned = not (rows.start * row % block or rows.stop * row % block) and local(into).shape[1:] == value.shape[1:]
    local(into).copy_(value[rows] if aligned else value.dequantize()[rows, *columns].contiguous())
    return into


def check_trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse an optimiser that was built before the model was sharded, or for another model: nothing would change.

    Refuses FSDP1, too: it clips by the norm of this rank's parts.
    """
    refuse_fsdp1("FP8Trainer", model)
    mine = set(model.parameters())
    foreign = [p not in mine for group in optimizer.param_groups for p in group["params"]]
    if all(foreign) or (has_shards(model) and any(foreign)):  # of a whole model, a loss may have parameters, too
        raise ValueError(_not_of(model))


def _not_of(model: nn.Module) -> str:
    return (
        f"the optimiser holds a parameter that {type(model).__name__} has not: build it from the model's parameters, "
        "after the model is sharded"
    )


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of an optimiser's parameters, in the order in which torch numbers them."""
    known = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p not in known for p in parameters):
        raise ValueError(_not_of(model))
    return [known[p] for p in parameters]


def _block_size(state: Tensor) -> int | None:
    """The elements that share a scale, if the state is one of torchao's in few bits."""
    return getattr(state.to_local() if isinstance(state, DTensor) else state, "block_size", None)


def _empty(optimizer: Any, parameter: Tensor, key: str, metadata: Any, block: int | None) -> Tensor:
    """Return a tensor to read a state into: sharded like its parameter, if it has the parameter's shape."""
    dtype: torch.dtype = metadata.properties.dtype
    if block is not None:
        if not hasattr(optimizer, "_new_buffer"):
            raise ValueError(
                f"the saved optimiser has states in few bits, {type(optimizer).__name__} has not: build the same"
            )
        fresh: Tensor = optimizer._new_buffer(parameter, key == SIGNED)
        return fresh
    if metadata.size == parameter.shape and parameter.dim():
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(metadata.size, dtype=dtype)


def _cuts_a_block(metadata: Any, block: int, into: Tensor) -> bool:
    """Whether a shard of the saved state and one of `into` overlap in a part that does not consist of whole blocks.

    Blocks follow each other along the rows of a shard: shards of other columns have no block in common. `into` need not
    be in few bits itself: then its own shard has no blocks.
    """
    mine = _block_size(into) or 1
    if (block == 1 and mine == 1) or not into.dim():
        return False
    rows, *columns = _own_place(into)
    row = math.prod(place.stop - place.start for place in columns)
    for chunk in metadata.chunks:
        saved = [slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if not all(x.start < y.stop and y.start < x.stop for x, y in zip(saved, (rows, *columns), strict=True)):
            continue
        edges = max(saved[0].start, rows.start), min(saved[0].stop, rows.stop)
        if saved[1:] != columns or any(
            (edge - saved[0].start) * row % block or (edge - rows.start) * row % mine for edge in edges
        ):
            return True
    return False


def _own_place(tensor: Tensor) -> tuple[slice, ...]:
    """Return where this rank's shard lies in the whole tensor, by dimension."""
    return place_of(tensor) if isinstance(tensor, DTensor) else tuple(slice(0, size) for size in tensor.shape)


def _put(full: Tensor, into: Tensor) -> None:
    """Write this rank's part of a tensor that it has whole."""
    local(into).copy_(full[_own_place(into)].contiguous())
