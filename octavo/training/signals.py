"""Ctrl-C and SIGTERM: finish the step, save, exit.

Outside `deferred()` a signal raises `Interrupted` at once: nothing would be lost. Inside it the first signal is only
noted, and the loop asks after each step; a second one, from someone who does not want to wait, raises. On several ranks
a launcher and a scheduler may both pass a signal on, so what comes within `ECHO` seconds is taken for the same one.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ECHO = 5.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """The run was asked to stop, by signal `number`. Like KeyboardInterrupt, this is not an error to be handled."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


class StopSignals:
    """Requests to stop. Handlers are installed only inside `with stop_signals.caught():`."""

    def __init__(self) -> None:
        self.requested: int | None = None
        self.shared: Callable[[int | None], int | None] = lambda number: number
        self.echo = 0.0  # seconds in which a signal that comes again is the same one
        self._first = -math.inf
        self._deferred = False

    @contextmanager
    def caught(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # Python delivers signals to the main one only
            yield
            return
        previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        self.raise_if_requested()  # a signal after the loop's last check

    def asked(self) -> int | None:
        """Return the signal to stop for. On several ranks, where `shared` asks all of them, the same on each."""
        return self.shared(self.requested)

    def raise_if_requested(self) -> None:
        if (number := self.asked()) is not None:
            raise Interrupted(number)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested is None:
            self._first = time.monotonic()
        is_first = self.requested is None or time.monotonic() - self._first < self.echo
        self.requested = number
        if not (self._deferred and is_first):
            raise Interrupted(number)
