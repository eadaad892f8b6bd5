"""Kernels in Triton's interpreter, on the CPU (tests/conftest.py switches it on): no GPU needed, only patience.

Where there is a GPU, kernels run on it (tests/gpu) and these tests stay out.
"""

import pytest
import torch

if torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
else:
    pytest.importorskip("triton")
