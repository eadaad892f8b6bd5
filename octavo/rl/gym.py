"""Prompts and scores of a task of the package reasoning-gym, from a process of its own (`gym_process.py`).

Two properties of the package make the process necessary. Several tasks draw from sets of strings, whose order depends
on the hash seed; a fixed one gives all processes of a run, and its continuation, the same prompts. And verifiers
evaluate what a model has written: `countdown` would compute 9**9**9**9 to the last digit. An answer has `LIMIT`
seconds, and what goes wrong with it costs nothing but that process.
"""

import json
import logging
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from octavo.training.errors import RunError, UserError

logger = logging.getLogger("octavo")

SIZE = 2048
LIMIT = 10.0
GRACE = 30.0  # until a process that its own timer has not ended is killed; it may have had to make the prompt anew


class Gym:
    """A task of reasoning-gym. `source`: its name, and options as in `chain_sum,max_terms=2`; values are JSON or text.

    Raises `UserError` if there is no such task, or if it does not accept these options.
    """

    def __init__(self, source: str, seed: int) -> None:
        self.name, given = _parsed(source)
        options = {"seed": seed, "size": SIZE, **given}
        self.size = options["size"]
        if type(self.size) is not int or self.size < 1:
            raise UserError(f"TASK {source}: size={self.size!r}: the number of prompts, at least 1")
        if type(options["seed"]) is not int:  # with None, each process would draw its own
            raise UserError(f"TASK {source}: seed={options['seed']!r}: a whole number")
        self._source, self._task = source, (self.name, options)
        self._process: _Process | None = self._start()
        self._endings = 0  # answers that have ended the process

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield `size` entries in order, each with a `question` and an `answer`: plain values, as JSON has them."""
        for index in range(self.size):
            try:
                yield self._ask("entry", index)
            except _Failed as failed:
                raise UserError(f"TASK {self._source}: prompt {index} cannot be made: {failed}") from failed

    def score(self, text: str, index: int, entry: dict[str, Any] | None = None) -> float:
        """Return the score of an answer to entry `index`: 0 if the verifier raises, crashes, or exceeds `LIMIT`.

        `entry`: as it was when it was asked. Raises `RunError` for what the answer is not to blame for: the package or
        the entry is at fault.
        """
        try:
            return float(self._ask("score", text, index, LIMIT, entry, wait=LIMIT + GRACE))
        except _Ended as ended:
            if not self._endings:
                logger.warning("octavo: the verifier of %s: %s; such answers have a reward of 0", self.name, ended)
            self._endings += 1
            return 0.0
        except _Failed as failed:
            raise RunError(f"TASK {self._source}: answer to prompt {index} cannot be scored: {failed}") from failed

    def _ask(self, *request: Any, wait: float | None = None) -> Any:
        if self._process is None or self._process.ended:
            self._process = self._start()
        return self._process.ask(*request, wait=wait)

    def _start(self) -> "_Process":
        process = _Process()
        try:
            process.ask("open", *self._task)
        except _Failed as failed:
            raise UserError(f"TASK {self._source}: {failed}") from failed
        return process


class _Failed(Exception):
    """A request without an answer: the text says why."""


class _Ended(_Failed):
    """A request that has ended the process, or took so long that it was ended."""


class _Process:
    """A process that answers one request at a time. It ends with this object, or when this process is killed."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("gym_process.py")), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # some tasks print
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,  # Ctrl-C is for the run, which ends this process
            )
        self._end = weakref.finalize(self, _kill, self._child)

    @property
    def ended(self) -> bool:
        return self._child.poll() is not None

    def ask(self, *request: Any, wait: float | None = None) -> Any:
        """Return the answer to a request, for which to `wait` so many seconds.

        Raises `_Failed`; the process may have ended then.
        """
        try:
            self._connection.send(request)
            if not self._connection.poll(wait):
                raise _Ended(f"reasoning-gym's process gave no answer in {wait} s")
            answer, error = self._connection.recv()
        except (EOFError, OSError) as closed:
            with suppress(subprocess.TimeoutExpired):  # its own code says more than that of the kill
                self._child.wait(timeout=1)
            self._end()
            raise _Ended(f"reasoning-gym's process ended with code {self._child.returncode}") from closed
        except BaseException:  # it still owes an answer, and would give it to the next request
            self._end()
            raise
        if error is not None:
            raise _Failed(error)
        return answer


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()


def _parsed(source: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a task, and its options. A comma before anything but `OPTION=` is part of a value."""
    first, *pairs = re.split(r",(?=\w+=)", source)
    name, comma, rest = first.partition(",")
    if comma:
        raise UserError(f"TASK {source}: {rest!r} is no option; write NAME,OPTION=VALUE,... without spaces")
    options: dict[str, Any] = {}
    for option, _, text in (pair.partition("=") for pair in pairs):
        if option in options:
            raise UserError(f"TASK {source}: {option} is given twice; leave one out")
        options[option] = _value(text)
    return name, options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
