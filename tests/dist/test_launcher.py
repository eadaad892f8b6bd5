"""`--nproc`: who has the terminal, what is passed on, and who is blamed. The ranks are scripts, without torch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.cli import app, launcher
from octavo.cli.launcher import launch, planned_ranks, run_ranks, without_option
from octavo.training.errors import RunError, UserError

ROOT = Path(launcher.__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    """Have ranks run a script in place of the command."""

    def use(text):
        monkeypatch.setattr(
            launcher, "PROGRAM", [sys.executable, "-c", f"import os, sys, time\nrank = os.environ['RANK']\n{text}"]
        )

    return use


def test_ranks_find_each_other_and_the_first_prints(script, capfd):
    script(
        "print(rank, os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'], sys.argv[1:])\n"
        "print('a warning', file=sys.stderr)"
    )
    assert run_ranks(3, ["train", "--steps", "3"]) == 0
    output, error = capfd.readouterr()
    assert output == "0 3 0 ['train', '--steps', '3']\n" and error == "a warning\n"


def test_the_rank_that_was_killed_is_named_in_one_line(script, capfd):
    script(
        "if rank == '1': os.kill(os.getpid(), 9)\n"
        "time.sleep(0.3); print('octavo: rank 0 has lost contact with another rank', file=sys.stderr); sys.exit(3)"
    )
    with pytest.raises(RunError, match=r"^rank 1 of 2 was killed by SIGKILL; the others were stopped\. Continue with"):
        run_ranks(2, [])
    assert capfd.readouterr().err == ""


def test_the_words_of_the_rank_that_failed_are_said(script, monkeypatch):
    script("print(f'octavo: no space left', file=sys.stderr); sys.exit(1 if rank == '2' else 3)")
    with pytest.raises(RunError, match=r"^no space left \(rank 2\)$"):
        run_ranks(3, [])
    script("if rank == '1': raise ValueError('a bug')\ntime.sleep(60)")
    monkeypatch.setattr(launcher, "NOTICE", 0.2)
    began = time.monotonic()
    with pytest.raises(RunError, match="rank 1 of 2 ended with exit code 1: ValueError: a bug"):
        run_ranks(2, [])
    assert time.monotonic() - began < 30


def test_a_signal_is_passed_on_to_all(tmp_path):
    """Ctrl-C reaches the launcher alone; every rank gets it once, and its exit code is the launcher's."""
    text = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        f"mark = Path({str(tmp_path)!r}) / os.environ['RANK']\n"
        "def stop(number, _):\n    mark.write_text(str(number)); sys.exit(128 + number)\n"
        "signal.signal(signal.SIGINT, stop); mark.touch(); time.sleep(60)"
    )
    parent = (
        "import sys\nfrom octavo.cli import launcher\n"
        f"launcher.PROGRAM = [sys.executable, '-c', {text!r}]\nsys.exit(launcher.run_ranks(2, []))"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], env={**os.environ, "PYTHONPATH": str(ROOT)})
    while sum(1 for _ in tmp_path.iterdir()) < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert [(tmp_path / name).read_text() for name in "01"] == ["2", "2"]


def test_a_signal_to_one_rank_stops_all(script, monkeypatch, tmp_path):
    """They have agreed to stop; one takes longer to save than the launcher waits after a failure."""
    monkeypatch.setattr(launcher, "NOTICE", 0.2)
    script(f"time.sleep(0.1 if rank == '1' else 1.5); open({str(tmp_path)!r} + '/' + rank, 'w'); sys.exit(143)")
    assert run_ranks(2, []) == 143
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    script("sys.exit(130 if rank == '1' else 3)")  # the other was in the middle of a collective
    assert run_ranks(2, []) == 130
    script("if rank == '1': os.kill(os.getpid(), 9)\nsys.exit(3)")
    with pytest.raises(RunError, match="rank 1 of 2 was killed by SIGKILL"):
        run_ranks(2, [])


@pytest.mark.parametrize("value", ["abc", "0", "-1", "", "1.5"])
def test_an_environment_that_no_launcher_has_set(monkeypatch, value):
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(UserError, match=f"^WORLD_SIZE='{value}' in the environment: .* a whole number, at least 1"):
        planned_ranks(2)


def test_options_of_the_launcher(monkeypatch):
    assert without_option(["train", "--nproc", "2", "--steps", "3"], "--nproc") == ["train", "--steps", "3"]
    assert without_option(["train", "--nproc=2", "--out", "--nproc-x"], "--nproc") == ["train", "--out", "--nproc-x"]
    assert (planned_ranks(None), planned_ranks(1), planned_ranks(3)) == (1, 1, 3) and launch(1) is False
    with pytest.raises(UserError, match="--nproc 0: at least 1"):
        planned_ranks(0)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="--nproc 2: a launcher has started 4 ranks already"):
        planned_ranks(2)
    assert planned_ranks(None) == 4 and launch(4) is False


def test_a_request_that_ranks_refuse_has_the_exit_code_of_one(script):
    script("print('octavo: MODEL nowhere: no such folder', file=sys.stderr); sys.exit(2)")
    with pytest.raises(UserError, match=r"^MODEL nowhere: no such folder") as caught:
        run_ranks(2, [])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["train", "--steps", "0"], "steps=0"),
        (["sft", "--rank", "0"], "rank=0"),
        (["sft", "--resume", "--overwrite"], "--resume continues the run in --out and --overwrite replaces it"),
        (["train", "--batch", "3", "--micro-batches", "1"], "cannot be shared equally by 2 ranks"),
    ],
)
def test_mistakes_in_options_are_found_before_a_rank_starts(monkeypatch, command, words):
    def start(*_):
        raise AssertionError("a rank was started")

    monkeypatch.setattr(launcher, "run_ranks", start)
    result = CliRunner().invoke(app, [*command, "--nproc", "2"])
    assert isinstance(result.exception, UserError) and result.exception.exit_code == 2, result.output
    assert words in str(result.exception)
