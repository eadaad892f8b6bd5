"""A run small enough to take a fraction of a second."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.training.settings import TrainSettings, settings_from_options

TEXT = (b"def hatch(egg):\n    return egg.dragon\n" * 100)[:3000]
SMALL = {"dim": 16, "heads": 2, "neurons": 32, "layers": 1, "batch": 2, "seq": 24, "steps": 8, "warmup": 2}
BRIEF = {"save_interval": 3, "log_interval": 2, "evaluation_batches": 1, "sample_bytes": 5, "device": "cpu"}

MakeSettings = Callable[..., TrainSettings]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Such small products only lose by being shared between threads, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture
def make_settings(text: Path) -> MakeSettings:
    def make(**options: Any) -> TrainSettings:
        return settings_from_options({**SMALL, **BRIEF, "data": str(text), **options})

    return make
