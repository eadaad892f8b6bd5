"""File writes that never leave half a file in place of a good one after a crash, a kill or a full disk.

A file is written under another name, forced to the disk, then renamed: the rename is atomic, so a reader finds either
the old content or the new. The folder is forced to the disk too, because that is where the new name lives.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.dist.durable import sync_folder, write_durable
from octavo.training.errors import RunError

HINT = "free some space or choose another --out"


@contextmanager
def disk_errors(path: Path, hint: str = HINT) -> Iterator[None]:
    """Turn an operating system's error about a failed write (a full disk, a lost permission) into one clear line."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}; {hint}") from error


def replace_file(path: Path, content: bytes | str, hint: str = HINT) -> None:
    """Replace the content of a file atomically. `hint`: what to do if it cannot be written."""
    temporary = path.with_name(path.name + ".tmp")
    with disk_errors(path, hint):
        write_durable(temporary, content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
        sync_folder(path.parent)


def write_json(path: Path, value: Any, hint: str = HINT) -> None:
    replace_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", hint)


def model_file(path: Path) -> Path:
    """Return the file of a model that is saved to, or read from, a file or a folder."""
    if path.suffix in (".pt", ".pth", ".safetensors"):
        return path
    if path.suffix and not path.is_dir():
        raise ValueError(f"{path}: a model file ends in .safetensors, .pt or .pth; a folder has no such ending")
    return path / "model.safetensors"


def read_object(path: Path, hint: str) -> dict[str, Any]:
    """Read a JSON object. `hint`: what to do if the file does not hold one."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}; {hint}") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {error}; {hint}") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged: it holds no JSON object; {hint}")
    return content
