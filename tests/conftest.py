import os
import signal
import sys
import threading
from pathlib import Path

import pytest

# Before torch is imported, which reads them once. Threads that wait for one another by spinning starve when anything
# else runs, and products as small as those of tests only lose by being shared.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# A shell without job control starts what runs in the background with SIGINT ignored: children would ignore it, too.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(Path(__file__).parent))  # for bounds.py

from matrix import mark_all_but_samples

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for tests/kernels; read when anything first imports triton


# Each a process or a training of its own, ten seconds or more.
LONGEST = (
    "test_gradient_",
    "test_a_run_on_a_hugging_face_model",
    "test_ctrl_c_leaves",
    "test_python_runs",
    "test_tiles_",
    "test_kernels_are_as_recorded",
)


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` is applied
def pytest_collection_modifyitems(items):
    """Mark as slow what is not in a matrix's sample. The longest tests first.

    A core that came to those at the end would work alone, while the other had nothing left. (Naming their folder first
    on the command line does nothing: pytest takes it for part of the other one.)
    """
    mark_all_but_samples(items)
    items.sort(key=lambda item: not item.name.startswith(LONGEST))


@pytest.fixture(autouse=True)
def fresh_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def no_manager_follows_other_tests():
    """A scaling manager steps after every optimiser for as long as it lives, and some outlive their test.

    After those of a thousand tests, a small training step takes forty times as long as it should.
    """
    from octavo.numerics import scaling

    before = {id(manager) for manager in scaling._followers}
    yield
    for manager in list(scaling._followers):
        if id(manager) not in before:
            del scaling._followers[manager]


@pytest.fixture(autouse=True)
def accelerate_as_found():
    """Loading a model lets Octavo watch Accelerate's variable from then on, in the whole process: not in the next test.

    Before the test, too: what its module's fixtures have loaded comes first.
    """
    _stop_watching()
    yield
    _stop_watching()


def _stop_watching():
    ours = sys.modules.get("octavo.hf.accelerate")
    for mode in list(ours._on.values()) if ours is not None else ():
        mode.disable()


@pytest.fixture
def invoke(capsys, monkeypatch, tmp_path):
    """`octavo …` in this process, in a folder of its own: exit code, stdout and stderr."""
    from octavo.cli import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["octavo", *arguments])
        try:
            main()
            code = 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run
