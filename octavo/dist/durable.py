"""Files that are on the disk when a function returns."""

import os
from pathlib import Path


def write_durable(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk. Not atomic by itself: write under another name, then rename."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
