"""Timing on the device: CUDA events on a GPU, the wall clock elsewhere."""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch


def time_each(function: Callable[[], object], count: int, device: str, before: Callable[[], object]) -> list[float]:
    """Return the seconds of each of `count` calls. `before` runs before every call, untimed.

    The device is not drained between calls, so the host may run ahead of the GPU, as it does in training.
    """
    if device != "cuda":
        times = []
        for _ in range(count):
            before()
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return times
    events = []
    for _ in range(count):
        before()
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        function()
        pair[1].record()
        events.append(pair)
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


class StepClock:
    """Times of steps, from the end of one to the end of the next: everything that happens in between counts.

    The host is not held up: on a GPU, the ends are events in its queue.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._marks: list[Any] = []

    def start(self) -> None:
        """Begin with the first step, once the device has nothing else to do; peak memory counts from here."""
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._marks.clear()
        self.mark()

    def mark(self) -> None:
        """Note that a step has ended."""
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        if not self._on_gpu:
            return [after - before for before, after in pairwise(self._marks)]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._marks)]

    def peak_bytes(self) -> int | None:
        """Return the peak of allocated memory since the start; None on a CPU."""
        return torch.cuda.max_memory_allocated() if self._on_gpu else None


def try_device_time(calls: Sequence[Callable[[], object]], device: str) -> tuple[float | None, str]:
    """Return `device_time`, or None and the reason, so that one shape that does not fit costs only its own row."""
    try:
        return device_time(calls, device), ""
    except RuntimeError as error:  # also out of memory, and unsupported shapes
        return None, str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__


def device_time(calls: Sequence[Callable[[], object]], device: str, repeats: int = 10) -> float:
    """Return the median seconds of one of `calls`, which do the same work on different memory to defeat caches.

    On a GPU they are replayed from a CUDA graph: a kernel of 40 µs would otherwise be timed by the 30 µs that Python
    takes to launch it.
    """

    def run_all() -> None:
        for call in calls:
            call()

    run_all()
    if device != "cuda":
        return statistics.median(time_each(run_all, repeats, device, lambda: None)) / len(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all()
    for _ in range(3):
        graph.replay()
    return statistics.median(time_each(graph.replay, repeats, device, lambda: None)) / len(calls)
