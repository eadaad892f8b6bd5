"""The tests themselves: they hold on a machine that is busy, and in the background of a shell."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

TESTS = Path(__file__).parent


def test_no_test_has_a_limit_of_its_own() -> None:
    """One for all, long enough for a machine ten times as slow, ends those that hang."""
    limited = re.compile(r"timeout=\d|mark\.timeout|time\.monotonic\(\) <")
    actual = [str(path) for path in TESTS.rglob("*.py") if path != Path(__file__) and limited.search(path.read_text())]
    assert not [path for path in actual if "/gpu/" not in path]
    settings = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())
    assert settings["tool"]["pytest"]["ini_options"]["timeout"] >= 1800


def test_plain_pytest_in_the_background_is_as_good_as_make() -> None:
    """Without make's settings, and started by a shell that has it ignore Ctrl-C."""
    code = """
import os, signal, subprocess, sys
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and "torch" not in sys.modules
import conftest, torch
assert torch.get_num_threads() == 1 and os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
child = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGINT)"]
assert subprocess.run(child, stderr=subprocess.DEVNULL).returncode == -signal.SIGINT
"""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    variables["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path])

    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    done = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=ignore, capture_output=True, text=True, env=variables
    )
    assert done.returncode == 0, done.stderr
