import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for bounds.py

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for tests/kernels; read when anything first imports triton

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers that each take all cores wait for one another


def pytest_collection_modifyitems(items):
    """The longest tests first: a core that comes to them at the end works alone, while the other has nothing left.

    (Naming their folder first on the command line does nothing: pytest takes it for part of the other one.)
    """
    items.sort(key=lambda item: Path(item.path).name != "test_bdh_fp8.py")


@pytest.fixture(autouse=True)
def fresh_seed():
    torch.manual_seed(0)


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
