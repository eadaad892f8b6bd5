"""The file of each rank in a checkpoint: tensors and plain values, the only ones that torch unpickles without risk.

Values are read back before anything is written, so that none is saved that could not be loaded.
"""

import io
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch


class DamagedCheckpoint(ValueError):
    """A checkpoint is not what was written."""


def state_file(number: int) -> str:
    return f"rank-{number}.pt"


def state_bytes(state: dict[str, Any]) -> bytes:
    """Return the content of a rank's file. Raises TypeError for a value that could not be read back, and names it."""
    try:
        content = _pickled(state)
        _unpickled(content)
    except Exception as error:  # pickle raises what the value's own methods raise
        raise TypeError(_why_not(state)) from error
    return content


def read_state(path: Path, number: int) -> dict[str, Any]:
    """Return what rank `number` saved."""
    try:
        state: dict[str, Any] = _unpickled((path / state_file(number)).read_bytes())
    except OSError as error:
        raise DamagedCheckpoint(f"checkpoint {path} is damaged: {state_file(number)}: {error.strerror}") from error
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise DamagedCheckpoint(f"checkpoint {path} is damaged: {state_file(number)} cannot be read") from error
    return state


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()  # in memory first: torch.save reports a full disk as an internal error
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpickled(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _can_be_read(value: Any) -> bool:
    try:
        _unpickled(_pickled(value))
    except Exception:  # as above; the caller names the value
        return False
    return True


def _why_not(state: dict[str, Any]) -> str:
    where, value = next(_culprits("", state))
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return (
        f"{where} is of type {name}, which a checkpoint would not give back: it holds tensors and plain values. Save "
        "float(x) for a NumPy number, torch.from_numpy(x) for an array, str(x) for a path, a dict for an object"
    )


def _culprits(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the innermost values that cannot be read back, with their places, such as `data['rng'][1]`."""
    inside: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        inside = [(f"{where}[{key!r}]" if where else str(key), item) for key, item in value.items()]
        inside += [(f"a key of {where}, {key!r},", key) for key in value]
    elif isinstance(value, list | tuple):
        inside = [(f"{where}[{i}]", item) for i, item in enumerate(value)]
    found = False
    for place, item in inside:
        if not _can_be_read(item):
            found = True
            yield from _culprits(place, item)
    if not found:
        yield where, value
