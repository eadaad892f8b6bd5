"""`--nproc N`: the same command again in N processes of this machine, which find each other as under torchrun.

Rank 0 has the terminal. A signal is passed on to all ranks once, so that they finish the step, save and stop; they do
the same where one of them is sent a signal by itself, since they agree on stops after each step. Where a rank ends
before its time, the others are stopped, and one line says which rank it was and why: the words of the first
to fail, since the others only lost contact with it.

Restarts and several machines are torchrun's: `torchrun --nproc-per-node N -m octavo …` runs the same code.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO

from octavo.training.environment import launched_ranks
from octavo.training.errors import LostContact, RunError, UserError
from octavo.training.signals import SIGNALS

GRACE = 30.0  # seconds to finish a step and save, after a signal
NOTICE = 5.0  # seconds to find that another rank has ended
PROGRAM = [sys.executable, "-m", "octavo"]
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def planned_ranks(nproc: int | None) -> int:
    """Return the number of ranks that will run this command: `--nproc`, or those that a launcher has started."""
    started = launched_ranks()
    if nproc is None:
        return started
    if nproc < 1:
        raise UserError(f"--nproc {nproc}: at least 1")
    if started > 1:
        raise UserError(f"--nproc {nproc}: a launcher has started {started} ranks already; leave it out")
    return nproc


def launch(count: int) -> bool:
    """Run this command in `count` processes and leave with their exit code; False if this process should run it.

    Call it once the options have been checked, so that a mistake in them is reported before any rank starts.
    """
    if count == launched_ranks():
        return False
    if code := run_ranks(count, without_option(sys.argv[1:], "--nproc")):
        sys.exit(code)
    return True


def without_option(arguments: list[str], name: str) -> list[str]:
    """Return a command line without an option and its value, as `--name value` or `--name=value`."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and argument != name and not argument.startswith(f"{name}="):
            kept.append(argument)
        skip = argument == name and not skip
    return kept


def run_ranks(count: int, arguments: list[str]) -> int:
    """Run `octavo arguments` in `count` processes; return the exit code, or raise for a rank that failed."""
    ranks = _start(count, arguments)
    passed: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        number = signal.SIGTERM if number == signal.SIGHUP else number  # the terminal is gone: save and stop
        passed.append(number)
        for rank in ranks:
            rank.send(number)

    with _handled(pass_on):
        try:
            failed = _wait(ranks, passed)
        finally:
            for rank in ranks:
                rank.kill()
    stopped = [128 + number for number in passed] or [rank.code for rank in ranks if rank.code in _STOPPED]
    if stopped and all(rank.code in (*_STOPPED, LostContact.exit_code, -signal.SIGKILL) for rank in ranks):
        return stopped[0]
    if failed is None:
        return 0
    error = UserError if failed.code == UserError.exit_code else RunError
    raise error(failed.words(count))


class _Rank:
    """One process, and what it has written to stderr."""

    def __init__(self, number: int, count: int, port: int, arguments: list[str]) -> None:
        self.number = number
        threads = max((os.cpu_count() or 1) // count, 1)
        environment = {
            **os.environ,
            **{"RANK": str(number), "LOCAL_RANK": str(number)},
            **{"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        }
        self.process = subprocess.Popen(
            [*PROGRAM, *arguments],
            env=environment,
            stdout=None if number == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
            text=True,
            errors="replace",
        )
        self.error: list[str] = []
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def send(self, number: int) -> None:
        if self.code is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        if self.code is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(timeout=5)

    def words(self, count: int) -> str:
        """The line on a rank that ended before its time."""
        assert self.code is not None
        lines = [line for line in self.error if line.strip()]
        said = next((line for line in reversed(lines) if line.startswith("octavo: ")), None)
        if self.code < 0:
            how = f"was killed by {signal.Signals(-self.code).name}"
        elif said is not None:
            return said.removeprefix("octavo: ").strip() + ("" if self.number == 0 else f" (rank {self.number})")
        else:
            how = f"ended with exit code {self.code}: {lines[-1].strip() if lines else 'it said nothing'}"
        way = f"--resume --out RUN --nproc {count}"
        return f"rank {self.number} of {count} {how}; the others were stopped. Continue with {way}"

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.error.append(line)
            if self.number == 0 and not line.startswith("octavo: "):  # that one is said at the end, if it is the cause
                sys.stderr.write(line)
                sys.stderr.flush()


def _start(count: int, arguments: list[str]) -> list[_Rank]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    return [_Rank(number, count, port, arguments) for number in range(count)]


def _wait(ranks: list[_Rank], passed: list[int]) -> _Rank | None:
    """Wait for all ranks, or some seconds after the first has failed; return the one that is to blame."""
    failed: list[_Rank] = []
    deadline = float("inf")
    while time.monotonic() < deadline:
        ended = [rank for rank in ranks if rank.code is not None]
        failed += [rank for rank in ended if rank.code != 0 and rank not in failed]
        if len(ended) == len(ranks):
            break
        if failed or len(passed) > 1:
            stops = passed or failed[0].code in _STOPPED
            deadline = min(deadline, time.monotonic() + (GRACE if stops else NOTICE))
        time.sleep(0.02)
    blamed = [rank for rank in failed if rank.code != LostContact.exit_code]
    return next(iter(blamed + failed), None)


@contextmanager
def _handled(handler: object) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in (*SIGNALS, signal.SIGHUP)}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
