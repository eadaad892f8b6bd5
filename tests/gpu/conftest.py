import os
import sys

import pytest
import torch


def pytest_collection_modifyitems(items):
    """These tests need a GPU with FP8 tensor cores; elsewhere they do not count as run."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _memory_goes_back():
    """Leave to the other processes what a test has taken: each of them keeps what it once had."""
    yield
    if torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**31:
        torch.cuda.empty_cache()


def pytest_runtest_logreport(report):
    """Print a failure when it happens: a run that is ended by a time limit prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = str(crash.message if crash else report.longrepr).strip()[-500:]
        print(f"\n{report.nodeid} ({report.when}): {reason}", file=sys.__stderr__, flush=True)
