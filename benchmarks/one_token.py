"""Products of one token by frozen FP8 weights: which tiles are best, for the linears of an 8B with adapters of rank 32.

    python benchmarks/one_token.py    # on a GPU, half a minute; `few_tokens.py` has what is timed, and how

It prints the best tiles of each linear, and what a layer takes with the first of them.
"""

import itertools
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

import few_tokens as bench
import torch
import triton

from octavo.kernels import few_tokens as kernels
from octavo.kernels.few_token_tiles import OneTokenTiles, RowsTile
from octavo.kernels.tuning import HOPPER
from octavo.tools.bench.kernels import copy_bandwidth

BYTES = (16, 128)  # of a weight, for each thread and step
LARGEST = 100_000  # bytes of all steps that are on their way


class Job(NamedTuple):
    """A linear and the tile of its kind; "down" is timed with all of its MLP."""

    name: str
    tile: RowsTile

    @property
    def call(self) -> str:
        return "mlp" if self.name == "down" else self.name


def set_tiles(tiles: OneTokenTiles) -> None:
    kernels._LAUNCHES.clear()
    tuning = HOPPER._replace(one_token=tiles)
    kernels.one_token.tuning_for = lambda _: tuning  # type: ignore[assignment]


def with_tile(tiles: OneTokenTiles, job: Job) -> OneTokenTiles:
    chosen = {bench.KINDS[job.name]: job.tile}
    return tiles._replace(**chosen)


def jobs_of(name: str) -> Iterator[Job]:
    halves = 2 if name == "gate_up" else 1
    for rows, width, warps, stages in itertools.product((4, 8, 16, 32), (512, 1024, 2048), (4, 8), (1, 3, 5)):
        step = halves * rows * width
        if BYTES[0] <= step // (32 * warps) <= BYTES[1] and stages * step <= LARGEST:
            yield Job(name, RowsTile(rows, width, warps, stages))


def compile_one(job: Job) -> None:
    """Compile without a launch: it goes to Triton's cache on disk."""
    launch = triton.runtime.jit.JITFunction
    honest = launch.run
    launch.run = lambda self, *args, grid, warmup, **how: honest(self, *args, grid=grid, warmup=True, **how)  # noqa: ARG005
    try:
        set_tiles(with_tile(OneTokenTiles(), job))
        x = torch.empty(1, bench.HIDDEN, dtype=bench.BF16, device=bench.DEVICE)
        bench.Linears(copies=1, values=False).run(job.call, x)(0)
    finally:
        launch.run = honest


def main() -> None:
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, [job for name in bench.SHAPES for job in jobs_of(name)], chunksize=4))
    rate, linears, x = 1e12 * copy_bandwidth(bench.DEVICE), bench.Linears(), bench.tokens_of(1, bench.HIDDEN)
    best, calls = OneTokenTiles(), []
    for name in bench.SHAPES:
        found = []
        for job in jobs_of(name):
            set_tiles(with_tile(best, job))
            found.append((bench.time_graph(linears.run(job.call, x), linears.count(job.call)), job))
        found.sort(key=lambda each: each[0])
        for taken, job in found[:5]:
            print(f"{job.call:8} {1e6 * taken:6.1f} µs {tuple(job.tile)}", flush=True)
        best = with_tile(best, found[0][1])
        set_tiles(best)
        if name != "gate_up":
            calls.append(linears.run(found[0][1].call, x))
    taken = bench.time_graph(partial(bench._call_all, calls), linears.count("mlp"))
    share = sum(n * k for n, k in bench.SHAPES.values()) / taken / rate
    print(f"a layer by the best: {1e6 * taken:.1f} µs, {share:.1%} of a copy at {rate / 1e12:.2f} TB/s")


if __name__ == "__main__":
    main()
