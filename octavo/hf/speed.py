"""Measuring the tokens per second of a Trainer."""

import time


class Speed:
    """Tokens per second between two logs, without what happens between steps: evaluations and saves."""

    def __init__(self, tokens: int = 0) -> None:
        self._tokens = tokens
        self._since = self._step_end = time.perf_counter()
        self._other = 0.0

    def step_ended(self) -> None:
        self._step_end = time.perf_counter()

    def other_work_ended(self) -> None:
        now = time.perf_counter()
        self._other += now - self._step_end
        self._step_end = now

    def since_last_log(self, tokens: int) -> float:
        """Tokens per second since the last log. The Trainer has just read the loss: the device is done with them."""
        now = time.perf_counter()
        rate = (tokens - self._tokens) / (now - self._since - self._other)
        self._tokens, self._since, self._step_end, self._other = tokens, now, now, 0.0
        return rate
