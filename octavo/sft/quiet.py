"""Silence for libraries that would write between the lines of a run."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import datasets
from transformers.utils import logging


@contextmanager
def quiet() -> Iterator[None]:
    """Show errors of transformers and datasets alone, and none of their bars; afterwards all is as it was."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    their_level, their_bars = datasets.utils.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        datasets.utils.logging.set_verbosity(their_level)
        if bars:
            logging.enable_progress_bar()
        if not their_bars:
            datasets.enable_progress_bars()
