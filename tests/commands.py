"""`octavo …` as a process of its own, forked from one that has imported what it needs.

Importing torch and its compiler takes four seconds of CPU, training a small model a fraction of one. A forked process
is as real to signals, limits and locks as one that was started; tests/test_cli.py starts the installed command, too.
"""

import multiprocessing
import os
import resource
import sys
import tempfile
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch._dynamo", "octavo.cli", "octavo.training.loop"])


class Command:
    """A running `octavo …` in the current folder, with the methods of `subprocess.Popen` that tests need.

    `largest_file`: the size in bytes at which the system refuses to write on. `environment`: variables to set.
    """

    def __init__(
        self, *arguments: str, largest_file: int | None = None, environment: dict[str, str] | None = None
    ) -> None:
        self._files = tempfile.TemporaryDirectory()
        how = (arguments, str(Path.cwd()), self._files.name, largest_file, environment or {})
        self._process = _CONTEXT.Process(target=_run, args=how)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self) -> tuple[str, str]:
        """Wait for its end; what it wrote to stdout and to stderr."""
        self._process.join()
        output, error = (Path(self._files.name, name).read_text() for name in ("1", "2"))
        self._files.cleanup()
        return output, error


def _run(
    arguments: tuple[str, ...], folder: str, files: str, largest_file: int | None, environment: dict[str, str]
) -> None:
    """In the forked process."""
    os.environ.update(environment)
    from octavo.cli import main

    os.chdir(folder)
    for descriptor in (1, 2):
        os.dup2(os.open(f"{files}/{descriptor}", os.O_WRONLY | os.O_CREAT), descriptor)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.argv = ["octavo", *arguments]
    main()
