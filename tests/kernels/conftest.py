"""Kernels in Triton's interpreter, on the CPU (tests/conftest.py switches it on): no GPU needed, only patience.

Where there is a GPU, kernels run on it (tests/gpu) and these tests stay out.
"""

import pytest
import torch

if torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
else:
    pytest.importorskip("triton")


@pytest.fixture(scope="session", autouse=True)
def language_patched_once():
    """For each call of a device function, Triton looks through its whole language for what is not interpreted yet.

    Within a launch there is nothing left to find after the first call from a module, and half of all time went there.
    """
    from triton.runtime import interpreter

    honest, patched = interpreter._patch_lang, set()

    def patch(function):
        if function.__module__ in patched:
            return None  # the scope of a launch is the only one that is ever restored
        patched.add(function.__module__)
        scope = honest(function)
        restore = scope.restore

        def restore_all():
            restore()
            patched.clear()

        scope.restore = restore_all
        return scope

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(interpreter, "_patch_lang", patch)
        yield
