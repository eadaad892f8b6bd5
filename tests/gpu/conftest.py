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


def pytest_runtest_logreport(report):
    """Print a failure when it happens: a run that is ended by a time limit prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = str(crash.message if crash else report.longrepr).strip()[-500:]
        print(f"\n{report.nodeid} ({report.when}): {reason}", file=sys.__stderr__, flush=True)
