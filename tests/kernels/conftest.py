"""Kernels in Triton's interpreter, on the CPU (tests/conftest.py switches it on): no GPU needed, only patience.

Where there is a GPU, kernels run on it (tests/gpu) and these tests stay out.
"""

from dataclasses import replace

import numpy as np
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


@pytest.fixture(scope="session", autouse=True)
def no_overflow_looked_for_in_vain():
    """After each sum and product of integers, Triton computes it once more in 64 bits, to compare the two.

    It says what it found to `device_assert`, which does nothing unless one debugs: a third of all time, and no check.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield


@pytest.fixture(scope="session", autouse=True)
def shapes_and_types_made_once():
    """For each value, Triton makes objects for its shape, and a table of all dtypes to look up one: half of the rest.

    Each shape is made, and checked, when it first comes; nobody writes into it. The table is that of Triton.
    """
    from triton.language import core
    from triton.runtime import interpreter

    new_block, new_tensor, honest_dtype = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    blocks, tensors, dtypes = {}, {}, {}

    def block(self, element_ty, shape):
        key = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if key not in blocks:
            new_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = blocks[key]
        self.name = f"<{text}, {element_ty}>"

    def tensor(self, handle, type):
        key = tuple(type.shape) if type.is_block() else ()
        if key not in tensors:
            new_tensor(self, handle, type)
            tensors[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[key]

    def dtype(asked):
        scalar = asked.scalar
        if scalar.is_ptr():
            return honest_dtype(scalar)
        if scalar.name not in dtypes:
            dtypes[scalar.name] = honest_dtype(scalar)
        return dtypes[scalar.name]

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(core.block_type, "__init__", block)
        patching.setattr(core.tensor, "__init__", tensor)
        patching.setattr(interpreter, "_get_np_dtype", dtype)
        yield


@pytest.fixture(scope="session", autouse=True)
def maxima_without_nan():
    """`tl.maximum`, `tl.minimum` and `tl.clamp` drop NaN unless told to propagate it, as on a GPU.

    The interpreter of Triton 3.6 always keeps it (triton-lang/triton#10333), and would hide a kernel that loses NaN.
    """
    from triton.language import PropagateNan
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    honest_clamp = builder.create_clampf

    def clamp(self, x, low, high, propagate_nan):
        if propagate_nan == PropagateNan.ALL:
            return honest_clamp(self, x, low, high, propagate_nan)
        return self.create_minnumf(self.create_maxnumf(x, low), high)

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(builder, "create_maxnumf", lambda self, a, b: self.binary_op(a, b, np.fmax))
        patching.setattr(builder, "create_minnumf", lambda self, a, b: self.binary_op(a, b, np.fmin))
        patching.setattr(builder, "create_clampf", clamp)
        yield


def _extent(tensor):
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


@pytest.fixture(scope="session", autouse=True)
def nothing_beside_the_tensors():
    """What a kernel reads and writes lies in the tensors of its launch.

    Past an edge without a mask there may be memory that no result depends on, or none at all: the process would end.
    """
    from triton.runtime import interpreter

    launch, builder = interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    extents = []

    def is_inside(addresses):
        first, last = int(addresses.min()), int(addresses.max())
        return any(start <= first and last < stop for start, stop in extents)

    def check(pointers, mask):
        if pointers.data.size and not is_inside(pointers.data):
            chosen = pointers.data[np.asarray(mask.data, dtype=bool)]
            assert not chosen.size or is_inside(chosen), "past an edge"

    def checked_launch(self, *args, **kwargs):
        given = [getattr(x, "base", x) for x in (*args, *kwargs.values())]
        extents[:] = [_extent(x) for x in given if isinstance(x, torch.Tensor) and x.numel()]
        return launch(self, *args, **kwargs)

    def checked_load(self, pointers, mask, *args, **kwargs):
        check(pointers, mask)
        return load(self, pointers, mask, *args, **kwargs)

    def checked_store(self, pointers, value, mask, *args, **kwargs):
        check(pointers, mask)
        return store(self, pointers, value, mask, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(interpreter.GridExecutor, "__call__", checked_launch)
        patching.setattr(builder, "create_masked_load", checked_load)
        patching.setattr(builder, "create_masked_store", checked_store)
        yield


GUARD, POISON = 16384, 0xA5  # bytes on either side: as much as a tile may reach over an edge


@pytest.fixture
def guarded(monkeypatch):
    """Kernels write into memory with guards around it: what goes past an edge without a mask shows, and fails the test.

    Launches remember how their memory is made, so they are built anew.
    """
    from octavo.kernels import launch

    honest, around = torch.empty, []

    def empty(shape, *, dtype, device):
        size = torch.Size(shape).numel() * dtype.itemsize
        memory = torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8, device=device)
        around.append((memory, size))
        return memory[GUARD : GUARD + size].view(dtype).view(shape) if size else honest(shape, dtype=dtype)

    with monkeypatch.context() as patching:
        patching.setattr(launch.LaunchCache, "get", lambda *_: None)
        patching.setattr(torch, "empty", empty)
        yield
    assert around, "no kernel has made any memory"
    for memory, size in around:
        assert (memory[:GUARD] == POISON).all() and (memory[GUARD + size :] == POISON).all(), "written past an edge"
