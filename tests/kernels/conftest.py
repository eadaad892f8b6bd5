"""Kernels in Triton's interpreter, on the CPU (tests/conftest.py switches it on): no GPU needed, only patience.

Where there is a GPU, kernels run on it (tests/gpu) and these tests stay out.
"""

import pytest
import torch

if torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
else:
    pytest.importorskip("triton")

    from triton.runtime import interpreter

    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _patch_with_index(tensor, scope):
        """For `range(n)` over an argument: numpy 2.4 makes no number of a one-element array, as Triton 3.6 expects."""
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_with_index
