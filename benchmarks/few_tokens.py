"""Products of few tokens by frozen FP8 weights, as decoding computes them: which tiles are best, and how fast they are.

    python benchmarks/few_tokens.py --out few_tokens.json    # on a GPU; checks first, then times

For the products of an 8B with adapters of rank 32 on all of them: tiles of the products alone, then what surrounds them
(tiles of the sum, parts of `x · Aᵀ`, whether launches overlap), then whole linears and MLPs by tokens. Times are of
CUDA graphs that go through copies of a weight, together larger than L2. GB/s are of FP8 bytes alone, and `share` is
that of a copy, which reads and writes; a linear that reads nothing else than its weight would reach about 1.

`--tokens` and `--shapes` choose some, `--quick` takes the tiles of `octavo/kernels/tuning.py` as they are.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.kernels import few_tokens as kernels
from octavo.kernels.tiles import multiprocessors
from octavo.kernels.tuning import HOPPER, FewTokenTiles, ProductTile, Tile
from octavo.numerics import Quantized
from octavo.numerics.few_tokens import Low
from octavo.numerics.norm import Norm

BF16, DEVICE = torch.bfloat16, "cuda"
HIDDEN, FEATURES, RANK = 4096, 14336, 32
SHAPES = {"qkv": (6144, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * FEATURES, HIDDEN), "down": (HIDDEN, FEATURES)}
OUTPUTS = {"qkv": (4096, 1024, 1024), "o": (HIDDEN,), "gate_up": (FEATURES, FEATURES), "down": (HIDDEN,)}
DISTINCT = 2**28  # bytes of weights that a graph goes through; an H200 has 50 MB of L2
# Outputs, warps, stages and programs for a multiprocessor, by tokens of a tile; those that spill are not here.
_TILES = {
    16: ((64, 4, 4, 4), (64, 4, 6, 3), (64, 4, 8, 2), (128, 4, 4, 2), (128, 4, 6, 2)),
    32: ((64, 4, 4, 4), (64, 4, 6, 3), (64, 4, 8, 2), (128, 4, 4, 2), (128, 8, 5, 2)),
    64: ((64, 4, 3, 3), (64, 4, 4, 2), (128, 4, 3, 2), (128, 4, 4, 2), (128, 8, 6, 1), (256, 8, 3, 1), (256, 8, 4, 1)),
    128: ((64, 4, 3, 2), (64, 4, 4, 1), (128, 8, 3, 1), (128, 8, 4, 1)),
}
CANDIDATES = {tokens: [ProductTile(*fields) for fields in tiles] for tokens, tiles in _TILES.items()}
FINISHES = (Tile(16, 64, 4), Tile(16, 128, 4), Tile(16, 32, 2))
ADAPTER_PARTS = (2, 4, 16)


class Config(NamedTuple):
    tile: ProductTile
    parts: int
    finish: Tile = FINISHES[0]
    adapter_parts: int = 8
    overlaps: bool = True


class Case(NamedTuple):
    """A linear with its adapters, and copies of its weight."""

    name: str
    weights: list[Quantized]
    adapters: list[Low]

    @property
    def bytes(self) -> int:
        return self.weights[0].data.numel()


def set_config(config: Config | None) -> None:
    """Have the kernels use this in place of what `tuning.py` has; None: that again."""
    kernels._LAUNCHES.clear()
    kernels.tuning_for, kernels.parts_of, kernels.may_overlap = HONEST  # type: ignore[assignment]
    if config is None:
        return
    every = dict.fromkeys(CANDIDATES, config.tile)
    parts = dict.fromkeys(CANDIDATES, config.adapter_parts)
    tiles = HOPPER.few_tokens._replace(products=every, adapter_parts=parts, finish=config.finish)
    kernels.tuning_for = lambda _: HOPPER._replace(few_tokens=tiles)  # type: ignore[assignment]
    kernels.may_overlap = lambda _: config.overlaps  # type: ignore[assignment]
    kernels.parts_of = lambda *_: config.parts  # type: ignore[assignment]


HONEST = kernels.tuning_for, kernels.parts_of, kernels.may_overlap


def make_case(name: str, granularity: str, copies: int | None = None, *, values: bool = True) -> Case:
    n, k = SHAPES[name]
    count = -(-DISTINCT // (n * k)) if copies is None else copies
    shape = {"tensor": (), "channel": (n, 1), "block": (-(-n // 128), -(-k // 128))}[granularity]
    draw = partial(torch.randn if values else torch.empty, device=DEVICE)
    weights = []
    for _ in range(count):
        data = draw(n, k).clamp_(-4, 4).to(torch.float8_e4m3fn)
        weights.append(Quantized(data, (draw(shape).abs() + 0.5) / k**0.5))
    adapters, first = [], 0
    for size in OUTPUTS[name]:
        adapters.append(Low(first, first + size, 0.5, (draw(RANK, k) / k**0.5).to(BF16), draw(size, RANK).to(BF16)))
        first += size
    return Case(name, weights, adapters)


def inputs(case: Case, tokens: int) -> tuple[Tensor, Tensor]:
    n, k = case.weights[0].data.shape
    return torch.randn(tokens, k, device=DEVICE).to(BF16), torch.randn(tokens, n, device=DEVICE).to(BF16)


def excess(case: Case, x: Tensor, residual: Tensor, y: Tensor) -> float:
    """How far y is from the exact result, in bounds of `numerics/few_tokens.py`."""
    w = case.weights[0].dequantize(torch.float32).double()
    exact, added, high, high_added = x.double() @ w.t(), 0 * y.double(), x.double().abs() @ w.abs().t(), 0 * y.double()
    for low in case.adapters:
        a, b, where = low.down.double(), low.up.double(), slice(low.first, low.last)
        added[:, where] += low.scaling * (x.double() @ a.t()) @ b.t()
        high_added[:, where] += low.scaling * (x.double().abs() @ a.abs().t()) @ b.abs().t()
    sizes = exact.abs() + added.abs() + residual.double().abs()
    bound = x.shape[1] * 2.0**-23 * (high + high_added) + 2.0**-9 * (high_added + 3 * sizes)
    return float(((y.double() - exact - added - residual.double()).abs() / bound).max())


def check(what: tuple[str, str]) -> list[str]:
    """Compare with exact results, with the same twice, and with NaN among the weights; return what is wrong."""
    name, granularity = what
    torch.manual_seed(0)
    set_config(None)
    wrong, case = [], make_case(name, granularity, copies=1)
    for tokens in (1, 5, 33, 64, 128):
        x, residual = inputs(case, tokens)
        y = kernels.linear(x, case.weights[0], case.adapters, residual=residual)
        if not torch.equal(y, kernels.linear(x, case.weights[0], case.adapters, residual=residual)):
            wrong.append(f"{name} {granularity} {tokens}: twice, and not the same bits")
        over = excess(case, x, residual, y)
        if not over <= 1:
            wrong.append(f"{name} {granularity} {tokens}: {over:.2f} times the bound")
    bits = case.weights[0].data.view(torch.uint8)
    bits[7, 1000], bits[8, 1001] = 0x7F, 0xFF
    y = kernels.linear(x, case.weights[0], case.adapters, residual=residual)
    if not y[:, 7:9].isnan().all() or int(y.isnan().sum()) != 2 * len(y):
        wrong.append(f"{name} {granularity}: NaN of a weight is lost, or spreads")
    return wrong


def time_graph(run: Callable[[int], Any], count: int, budget: float = 3e-3) -> float:
    """Return the median seconds of a call, where call i is one of `count` in a graph."""
    for i in range(min(2, count)):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run(i) for i in range(count)]
    times = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    while len(times) < 5 or (sum(times) * count < budget and len(times) < 40):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / count)
    del kept, graph
    return statistics.median(times)


def time_linear(case: Case, tokens: int) -> float:
    x, residual = inputs(case, tokens)
    return time_graph(lambda i: kernels.linear(x, case.weights[i], case.adapters, residual=residual), len(case.weights))


def products_alone(case: Case, tokens: int) -> Callable[[int], Any]:
    """The launch that reads the weights, alone; what it returns is not to be looked at."""
    x, residual = inputs(case, tokens)
    launches, given = kernels.linear_launches(x, case.weights[0], case.adapters, None, residual, None)
    alone = replace(launches, _launches=launches._launches[1:2])

    def run(i: int) -> Any:
        data, scale = case.weights[i]
        return alone.run(x, data.view(torch.int16), scale, *given[3:])

    return run


def choices(name: str, tokens: int) -> Iterator[Config]:
    """The candidates, each with the parts that are best if starting a program costs little, or much."""
    n, k = SHAPES[name]
    rows, steps = kernels.tile_of_tokens(tokens), -(-k // 128)
    for tile in CANDIDATES[rows]:
        slots = tile.programs * multiprocessors(torch.device(DEVICE))
        tunings = (FewTokenTiles(start=start, part=part) for start, part in ((0.5, 0.05), (3.0, 0.25), (8.0, 1.0)))
        for parts in sorted({HONEST[1](-(-n // tile.n), steps, tokens, slots, tuning) for tuning in tunings}):
            yield Config(tile, parts)


class Job(NamedTuple):
    """What a process compiles, without a launch: it goes to Triton's cache on disk."""

    what: str  # the products alone, a whole "linear", or all products of a "layer"
    name: str
    tokens: int
    config: Config | None
    granularity: str = "block"


def compile_one(job: Job) -> float:
    import triton

    began = time.perf_counter()
    honest: Any = triton.runtime.jit.JITFunction.run
    launch: Any = triton.runtime.jit.JITFunction
    launch.run = lambda self, *args, grid, warmup, **how: honest(self, *args, grid=grid, warmup=True, **how)  # noqa: ARG005
    set_config(job.config)
    try:
        if job.what == "layer":
            for _, run, _ in layer(job.tokens, copies=1):
                run(0)
            return time.perf_counter() - began
        case = make_case(job.name, job.granularity, copies=1, values=False)
        if job.what == "products":
            products_alone(case, job.tokens)(0)
        else:
            x, residual = inputs(case, job.tokens)
            kernels.linear(x, case.weights[0], case.adapters, residual=residual)
    finally:
        launch.run = honest
    return time.perf_counter() - began


def compile_all(pool: ProcessPoolExecutor, jobs: Sequence[Job]) -> None:
    began = time.perf_counter()
    taken = list(pool.map(compile_one, jobs))
    print(f"compiled {len(jobs)} in {time.perf_counter() - began:.0f} s (one by one: {sum(taken):.0f} s)", flush=True)


def distinct(jobs: Sequence[Job]) -> list[Job]:
    """Return those jobs of which the products are not compiled to the same code."""
    by_code = {}
    for job in jobs:
        assert job.config is not None
        parts = job.config.parts
        by_code[len(OUTPUTS[job.name]), job.tokens, job.config.tile, min(parts, 2), parts % 16 == 0] = job
    return list(by_code.values())


def copy_rate() -> float:
    """Bytes read and written by a copy, per second."""
    a = torch.empty(2**29, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    return 2 * a.numel() / time_graph(lambda _: b.copy_(a), 4, budget=2e-2)


def time_bf16(case: Case, tokens: int) -> float:
    """`torch.mm` alone, by weights in BF16."""
    x, _ = inputs(case, tokens)
    weights = [torch.randn(case.weights[0].data.shape, device=DEVICE, dtype=BF16) for _ in case.weights]
    return time_graph(lambda i: torch.mm(x, weights[i].t()), len(weights))


def time_dequantized(case: Case, tokens: int) -> float:
    """What a product in high precision did before: the weight dequantised, two products for adapters, their sum."""
    from octavo.ops.adapters import Adapter, Adapters, add_to, project_down
    from octavo.ops.quantize import dequantize

    x, residual = inputs(case, tokens)
    positions = tuple(Adapter(low.first, low.last, low.scaling) for low in case.adapters)
    adapters = Adapters(positions, tuple(low.down for low in case.adapters), tuple(low.up for low in case.adapters))

    def run(i: int) -> Tensor:
        y = torch.mm(x, dequantize(case.weights[i], BF16).t())
        add_to(y, project_down(x, adapters, BF16), adapters, residual)
        return y

    return time_graph(run, len(case.weights))


Times = list[tuple[float, Config]]


def sweep_products(case: Case, tokens: int, rate: float) -> Times:
    """Times of the launch that reads weights, best first."""
    found: Times = []
    for config in choices(case.name, tokens):
        set_config(config)
        found.append((time_graph(products_alone(case, tokens), len(case.weights)), config))
    found.sort()
    for taken, config in found[:4]:
        print(f"  {case.name:8} M={tokens:3} {tuple(config.tile)!s:18} parts {config.parts:2}: {1e6 * taken:6.1f} µs "
              f"{case.bytes / taken / rate:6.1%}", flush=True)  # fmt: skip
    return found


def around(found: Times) -> list[Config]:
    """The two best, and the best with each of the other things changed."""
    best = found[0][1]
    return [
        *(config for _, config in found[:2]),
        *(best._replace(finish=finish) for finish in FINISHES[1:]),
        *(best._replace(adapter_parts=parts) for parts in ADAPTER_PARTS),
        best._replace(overlaps=False),
    ]


def sweep_whole(case: Case, tokens: int, configs: Sequence[Config]) -> tuple[Times, Config]:
    """Times of whole linears, and a configuration with the best of each choice."""
    times: Times = []
    for config in configs:
        set_config(config)
        times.append((time_linear(case, tokens), config))
    base, first = times[0]
    best = min(times[:2])[1]
    for taken, config in times[2:]:
        if taken < 0.99 * base:
            changed = {name: value for name, value in config._asdict().items() if value != getattr(first, name)}
            best = best._replace(**changed)
            base = taken if "adapter_parts" in changed else base
    return times, best


def layer(tokens: int, copies: int | None = None) -> list[tuple[str, Callable[[int], Tensor], int]]:
    """What a decoder layer multiplies, with norms and residuals: its name, call i, and how many there are."""
    qkv, o, gate_up, down = (make_case(name, "block", copies) for name in SHAPES)
    x = torch.randn(tokens, HIDDEN, device=DEVICE).to(BF16)
    norm = Norm((torch.rand(HIDDEN, device=DEVICE) + 0.5).to(BF16), 1e-5)

    def mlp(i: int) -> Tensor:
        adapters = (gate_up.adapters, down.adapters)
        return kernels.gated_mlp(x, gate_up.weights[i], down.weights[i], "silu", *adapters, residual=x, norm=norm)

    return [
        ("norm, qkv", lambda i: kernels.linear(x, qkv.weights[i], qkv.adapters, norm=norm), len(qkv.weights)),
        ("o", lambda i: kernels.linear(x, o.weights[i], o.adapters, residual=x), len(o.weights)),
        ("norm, MLP", mlp, len(gate_up.weights)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all times there, as JSON")
    parser.add_argument("--tokens", default="1,4,16,32,64,128")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--quick", action="store_true", help="no sweep: by the tiles of tuning.py")
    options = parser.parse_args()
    began = time.perf_counter()
    tokens, shapes = [int(m) for m in options.tokens.split(",")], options.shapes.split(",")
    pool = ProcessPoolExecutor(min(14, os.cpu_count() or 1), multiprocessing.get_context("spawn"))
    rows = sorted({kernels.tile_of_tokens(m) for m in tokens})
    if not options.quick:
        compile_all(pool, distinct([Job("products", s, m, c) for s in shapes for m in rows for c in choices(s, m)]))
    pairs = [(name, granularity) for granularity in ("block", "channel", "tensor") for name in SHAPES]
    wrong = [line for lines in pool.map(check, pairs) for line in lines]
    print("\n".join(wrong) or "checked: within the bound, the same bits twice, NaN stays", flush=True)
    rate = copy_rate()
    print(f"copy: {rate / 1e12:.2f} TB/s; {time.perf_counter() - began:.0f} s so far", flush=True)
    result: dict[str, Any] = {"wrong": wrong, "copy": rate, "sweep": {}, "tokens": {}, "layer": {}}
    best: dict[tuple[str, int], Config] = {}
    cases = {name: make_case(name, "block") for name in shapes}
    if not options.quick:
        found = {(s, m): sweep_products(cases[s], m, rate) for s in shapes for m in rows}
        print(f"{time.perf_counter() - began:.0f} s so far", flush=True)
        compile_all(pool, [Job("linear", *key, config) for key, times in found.items() for config in around(times)])
        for (s, m), times in found.items():
            whole, best[s, m] = sweep_whole(cases[s], m, around(times))
            every = {"products": times, "whole": whole, "best": [(0.0, best[s, m])]}
            lists = {k: [{"us": 1e6 * t, **c._asdict()} for t, c in each] for k, each in every.items()}
            result["sweep"][f"{s} {m}"] = lists
            tile, *others = best[s, m]
            print(f"  {s:8} M={m:3} best {tuple(tile)}, parts, finish, adapter parts, overlaps: {others}", flush=True)
    todo = [(s, m, best.get((s, kernels.tile_of_tokens(m)))) for s in shapes for m in tokens]
    last = [Job("linear", *each, granularity) for each in todo for granularity in ("block", "channel")]
    compile_all(pool, [*last, *(Job("layer", "", m, None) for m in tokens)])
    pool.shutdown()
    print("linear     M      µs   GB/s  share  BF16 mm  ratio  dequantised", flush=True)
    for name in shapes:
        channel = make_case(name, "channel")
        for m in tokens:
            set_config(best.get((name, kernels.tile_of_tokens(m))))
            taken, other = time_linear(cases[name], m), time_linear(channel, m)
            bf16, before = time_bf16(cases[name], m), time_dequantized(cases[name], m)
            size = cases[name].bytes
            print(f"{name:8} {m:3} {1e6 * taken:7.1f} {size / taken / 1e9:6.0f} {size / taken / rate:6.1%} "
                  f"{1e6 * bf16:7.1f} {bf16 / taken:5.2f} {1e6 * before:9.1f}   channel {size / other / rate:6.1%}",
                  flush=True)  # fmt: skip
            result["tokens"][f"{name} {m}"] = {"us": 1e6 * taken, "share": size / taken / rate, "bf16_us": 1e6 * bf16,
                "before_us": 1e6 * before, "channel_share": size / other / rate}  # fmt: skip
        del channel
    set_config(None)
    for m in tokens:
        times = {name: time_graph(run, count) for name, run, count in layer(m)}
        total = sum(n * k for n, k in SHAPES.values()) / sum(times.values()) / rate
        each = ", ".join(f"{name} {1e6 * taken:.1f} µs" for name, taken in times.items())
        print(f"a layer by tuning.py, M={m:3}: {each}; {total:.1%}", flush=True)
        result["layer"][str(m)] = times
    print(f"{time.perf_counter() - began:.0f} s in all")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
