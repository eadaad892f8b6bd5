"""Silence for libraries that would write between the lines of a run."""

from collections.abc import Iterator
from contextlib import contextmanager

import datasets

from octavo.hf.quiet import quiet_transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Show errors of transformers and datasets alone, and none of their bars; afterwards all is as it was."""
    level, bars = datasets.utils.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        with quiet_transformers():
            yield
    finally:
        datasets.utils.logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()
