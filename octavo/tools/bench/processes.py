"""Parent's side of a worker: one request, one answer, and never a process left behind."""

import json
import os
import selectors
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any

from octavo.tools.bench.contenders import Contender
from octavo.tools.bench.workload import Workload
from octavo.tools.shapes import Case

TIMEOUT_S = 900.0


class WorkerError(Exception):
    """Failure of a worker, in one line."""


class Process:
    """A running worker, in a session of its own: Ctrl-C reaches the parent alone, which then kills it.

    `module`: to run; `setup`: its first line; `workers`: how many there are.
    """

    def __init__(self, module: str, setup: dict[str, Any], workers: int) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        environment = {
            "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads would take cores from the worker being timed
            "TORCHINDUCTOR_COMPILE_THREADS": str(max(2, (os.cpu_count() or 2) // workers)),
            **os.environ,
            # The Trainer would spread its batches over all GPUs; what is timed is one.
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            start_new_session=True,
            env=environment,
        )
        self._send(setup)

    def request(self, do: str, **arguments: Any) -> None:
        """Send a request without waiting; `answer` waits."""
        self._send({"do": do, **arguments})

    def answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(TIMEOUT_S):
                raise WorkerError(f"no answer for {TIMEOUT_S:.0f} s")
        line = stdout.readline()
        if not line:
            raise WorkerError(self._last_words())
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            assert stream is not None
            with suppress(BrokenPipeError):  # it died without reading the request
                stream.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died; `answer` reports why
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"exit code {code}" + (f": {lines[-1].strip()[:300]}" if lines else "")


class WorkerProcess(Process):
    """A contender of a training step."""

    def __init__(self, case: Case, contender: Contender, workers: int, workload: Workload | None = None) -> None:
        batches = None if workload is None else workload.to_dict()
        setup = {"case": case.to_dict(), "contender": contender.to_dict(), "workload": batches}
        super().__init__("octavo.tools.bench.worker", setup, workers)
