"""One decode step looked into: its time with every slot busy, and the kernels that it consists of.

After a rollout the slots are empty, and a step would attend to nothing. So their lengths are set to what they have half
way through a completion, and the step runs as it did there: a CUDA graph on a GPU.
"""

import statistics
from typing import Any

import torch

from octavo.rl.completions import Sampling
from octavo.rl.engine import NativeEngine
from octavo.tools.bench.timing import time_each

WARM = 3


class LiveStep:
    """The step of an engine that has just completed a rollout of `slots` completions. `length`: of each of them."""

    def __init__(self, engine: NativeEngine, slots: int, length: int) -> None:
        self._engine = engine
        self._step = next(step for step in engine._steps.values() if step.slots.count == slots)
        self._sampling = Sampling(stop_ids=())
        self._length = length

    def run(self) -> None:
        self._step.run(self._sampling)

    def prepare(self) -> None:
        """Fill all slots."""
        slots = self._step.slots
        slots.lengths.fill_(self._length)
        slots.limits.fill_(2**30)
        slots.active.fill_(True)

    def seconds(self, count: int) -> float:
        """Return the median seconds of a step."""
        device = self._engine.policy.device.type
        with self._engine.policy.rollout(self._engine.products):
            self.prepare()
            for _ in range(WARM):
                self.run()
            times = time_each(self.run, count, device, before=lambda: None)
        self._step.slots.active.fill_(False)
        return statistics.median(times)

    def kernels(self, count: int = 2) -> list[dict[str, Any]]:
        """Return what a step launches, the longest first: name, launches and microseconds a step."""
        on_gpu = self._engine.policy.device.type == "cuda"
        activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
        with self._engine.policy.rollout(self._engine.products):
            self.prepare()
            self.run()
            with torch.profiler.profile(activities=[activity]) as profile:
                for _ in range(count):
                    self.run()
                if on_gpu:
                    torch.cuda.synchronize()
        self._step.slots.active.fill_(False)
        rows = [
            {
                "name": event.key,
                "launches": event.count / count,
                "us": (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / count,
            }
            for event in profile.key_averages()
        ]
        found = [row for row in rows if row["us"] > 0 and not row["name"].startswith("cuda")]
        return sorted(found, key=lambda row: -row["us"])


def kernel_lines(kernels: list[dict[str, Any]], layers: int, step_s: float, most: int = 25) -> list[str]:
    """Return a table of kernels as lines: microseconds and launches of a step, launches of a layer."""
    total = sum(row["us"] for row in kernels)
    launches = sum(row["launches"] for row in kernels)
    lines = [
        f"a step: {step_s * 1e6:,.0f} µs, of which kernels {total:,.0f} µs; {launches:.0f} launches, "
        f"{launches / layers:.1f} for each of {layers} layers"
    ]
    for row in kernels[:most]:
        share = row["us"] / total
        lines.append(
            f"{row['us']:9.1f} µs {share:6.1%} {row['launches']:7.1f} × {row['us'] / row['launches']:7.2f} µs "
            f"{row['launches'] / layers:6.2f} a layer  {row['name'][:90]}"
        )
    if len(kernels) > most:
        rest = sum(row["us"] for row in kernels[most:])
        lines.append(f"{rest:9.1f} µs {rest / total:6.1%} in {len(kernels) - most} more")
    return lines
