"""A rollout timed: warm-up, runs, prefill alone, the gap to a full forward, and memory until standby.

    tokens a second   all generated tokens over the seconds of the whole rollout, prompts included
    decode step       (whole rollout − rollout of one token) / (tokens of a completion − 1)

The first rollout records CUDA graphs and compiles kernels; it is not timed. Transformers' own may generate fewer tokens
(`peer_tokens`), since they take half a minute otherwise: the number is in the result, and their step is a little faster
for it, as the cache is shorter.
"""

import statistics
import time
from typing import Any

import torch

from octavo.tools.bench.rollout.gap import measure_gap
from octavo.tools.bench.rollout.generators import generator_of
from octavo.tools.bench.rollout.ways import Way
from octavo.tools.rollouts import Size
from octavo.tools.shapes import Case

GIB = 2**30
WARM_TOKENS = 4  # of transformers' own, which record nothing for a length


def make_prompts(case: Case, size: Size) -> list[list[int]]:
    """Return the prompts of a rollout: random, different, and the same for every way."""
    generator = torch.Generator().manual_seed(case.seed)
    prompts: list[list[int]] = torch.randint(case.vocabulary, (size.prompts, size.prompt), generator=generator).tolist()
    return prompts


def measure(
    model: Any, case: Case, way: Way, size: Size, *, runs: int, peer_tokens: int | None = None, gap: bool = True
) -> dict[str, Any]:
    """Return seconds, memory and the gap of a way at a size, ready for JSON."""
    memory = MemoryMeter(case.device)
    generator = generator_of(model, way, size, case.seed)
    prompts = make_prompts(case, size)
    new_tokens = size.new_tokens if way.is_native else min(peer_tokens or size.new_tokens, size.new_tokens)

    started = time.perf_counter()
    generator.complete(prompts, size.group, new_tokens if way.is_native else min(WARM_TOKENS, new_tokens))
    warm_s = time.perf_counter() - started
    memory.start()
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        done = generator.complete(prompts, size.group, new_tokens)
        times.append(time.perf_counter() - started)
        tokens = sum(len(each.tokens) for each in done)
        if tokens != size.slots * new_tokens:
            raise RuntimeError(f"{tokens} tokens were generated instead of {size.slots * new_tokens}")
    noted = generator.statistics()
    started = time.perf_counter()
    generator.complete(prompts, size.group, 1)
    prefill_s = time.perf_counter() - started
    used = memory.read()
    figures = measure_gap(model, way, generator, prompts, done) if gap else {}
    generator.standby()
    seconds = statistics.median(times)
    return {
        "new_tokens": new_tokens,
        "times": times,
        "warm_s": warm_s,
        "prefill_s": prefill_s,
        "step_s": (seconds - prefill_s) / (new_tokens - 1) if new_tokens > 1 else None,
        "tokens_per_s": size.slots * new_tokens / seconds,
        "cache_bytes": noted.get("cache_bytes"),
        "prefills": noted.get("prefills"),
        **figures,
        **used,
        **memory.after_standby(noted.get("cache_bytes")),
    }


class MemoryMeter:
    """Memory of a rollout, in GiB; None on a CPU. Allocated by tensors, and reserved: with the pools of CUDA graphs."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._before = self._now()

    def start(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def read(self) -> dict[str, float | None]:
        """Return the peaks since the start, and what there was before."""
        if not self._on_gpu:
            return dict.fromkeys(("before_gib", "peak_gib", "peak_reserved_gib"))
        return {
            "before_gib": self._before[0] / GIB,
            "peak_gib": torch.cuda.max_memory_allocated() / GIB,
            "peak_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        }

    def after_standby(self, cache_bytes: float | None) -> dict[str, float | None]:
        """Return what there is after standby. `kept`: beyond what there was before, as a share of the cache."""
        if not self._on_gpu:
            return dict.fromkeys(("standby_gib", "standby_reserved_gib", "kept"))
        torch.cuda.synchronize()
        allocated, reserved = self._now()
        kept = None if not cache_bytes else max(now - then for now, then in zip(
            (allocated, reserved), self._before, strict=True)) / cache_bytes  # fmt: skip
        return {"standby_gib": allocated / GIB, "standby_reserved_gib": reserved / GIB, "kept": kept}

    def _now(self) -> tuple[int, int]:
        if not self._on_gpu:
            return 0, 0
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
