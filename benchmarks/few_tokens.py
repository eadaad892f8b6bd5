"""Products of few tokens by frozen FP8 weights, as decoding computes them: which tiles are best, and how fast they are.

    python benchmarks/few_tokens.py --out few_tokens.json    # on a GPU; checks first, then times; about a minute

For the products of an 8B with adapters of rank 32 on all of them: tiles and parts, then how much of a weight is asked
for early and the parts of `x · Aᵀ`, then each linear and a layer, with the best of these, by tokens. Everything that a
linear launches is timed, in CUDA graphs that go through copies of a weight, together larger than L2. `share` is that of
a copy, which reads and writes (`octavo bench --kernels` measures the same); of FP8 bytes alone.

`--tokens` chooses some, `--quick` takes the tiles of `octavo/kernels/few_token_tiles.py` as they are. One token has
kernels of its own, whose tiles `one_token.py` compares.
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
from octavo.kernels.few_token_tiles import FewTokenTiles, ProductTile
from octavo.kernels.tiles import multiprocessors
from octavo.kernels.tuning import HOPPER
from octavo.numerics import Quantized
from octavo.numerics.few_tokens import Low
from octavo.numerics.norm import Norm
from octavo.tools.bench.kernels import copy_bandwidth

BF16, DEVICE = torch.bfloat16, "cuda"
HIDDEN, FEATURES, RANK = 4096, 14336, 32
SHAPES = {"qkv": (6144, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * FEATURES, HIDDEN), "down": (HIDDEN, FEATURES)}
OUTPUTS = {"qkv": (4096, 1024, 1024), "o": (HIDDEN,), "gate_up": (FEATURES, FEATURES), "down": (HIDDEN,)}
KINDS = {"qkv": kernels.PRODUCT, "o": kernels.PRODUCT, "gate_up": kernels.GATED, "down": kernels.DOWN}
DISTINCT = 2**28  # bytes of weights that a graph goes through; an H200 has 50 MB of L2
FEWEST_CALLS = 12  # in a graph, whose own launch takes some µs
# Outputs, warps, stages, programs for a multiprocessor, registers, prefetch, parts of x · Aᵀ, tokens of a tile; by
# tokens. Those that spill are not here.
_SMALL = ((64, 4, 5, 4), (64, 4, 6, 3), (128, 4, 5, 2), (128, 8, 4, 2))
_TILES: dict[str, dict[int, tuple[tuple[int, ...], ...]]] = {
    kernels.PRODUCT: {
        16: _SMALL,
        64: ((128, 8, 4, 2, 128), (128, 4, 4, 2), (64, 4, 5, 2), (64, 4, 3, 3)),
        128: ((64, 4, 3, 2), (64, 4, 3, 3, None, 0, 16, 64), (64, 4, 4, 2, None, 0, 16, 64)),
    },
    kernels.GATED: {
        16: ((64, 4, 4, 3), (64, 4, 5, 2), (64, 4, 6, 2)),
        64: ((64, 4, 4, 2), (64, 4, 3, 2), (64, 8, 4, 1)),
        128: (
            (64, 8, 3, 1),
            (64, 4, 4, 2, None, 0, 4, 64),
            (64, 4, 3, 2, None, 0, 4, 64),
            (64, 4, 5, 2, None, 0, 4, 64),
        ),
    },
    kernels.DOWN: {
        16: _SMALL,
        64: ((64, 4, 5, 2), (64, 4, 3, 2), (128, 8, 4, 1)),
        128: ((64, 4, 3, 2), (64, 4, 3, 2, None, 8, 8, 64), (64, 4, 4, 2, None, 8, 8, 64)),
    },
}
PREFETCHED = (0, 2, 8, 16)
ADAPTER_PARTS = (4, 8, 32)


class Config(NamedTuple):
    """Choices for one linear."""

    tile: ProductTile
    parts: int


Configs = dict[str, Config]  # by linear
HONEST = kernels.tuning_for, kernels.parts_of


def set_configs(configs: Configs, *, begins_early: bool = False) -> None:
    """Have the kernels use these in place of what `tuning.py` has; what is not among them stays."""
    kernels._LAUNCHES.clear()
    tiles = HOPPER.few_tokens._replace(begins_early=begins_early)
    for name, config in configs.items():
        every: Any = {KINDS[name]: dict.fromkeys((16, 32, 64, 128), config.tile)}
        tiles = tiles._replace(**every)
    parts = {SHAPES[name][1] // 128: config.parts for name, config in configs.items()}  # down has other steps

    def parts_of(count: int, steps: int, *rest: Any) -> int:
        return parts.get(steps) or HONEST[1](count, steps, *rest)

    kernels.tuning_for = lambda _: HOPPER._replace(few_tokens=tiles)  # type: ignore[assignment]
    kernels.parts_of = parts_of  # type: ignore[assignment]


class Case(NamedTuple):
    """A linear with its adapters, and copies of its weight."""

    name: str
    weights: list[Quantized]
    adapters: list[Low]


def make_case(name: str, granularity: str = "block", copies: int | None = None, *, values: bool = True) -> Case:
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


def tokens_of(tokens: int, columns: int) -> Tensor:
    return torch.randn(tokens, columns, device=DEVICE).to(BF16)


def excess(case: Case, x: Tensor, residual: Tensor, y: Tensor) -> float:
    """How far y is from the exact result, in bounds of `numerics/few_tokens.py`."""
    w = case.weights[0].dequantize(torch.float32).double()
    exact, added, high, high_added = x.double() @ w.t(), 0 * y.double(), x.double().abs() @ w.abs().t(), 0 * y.double()
    for low in case.adapters:
        a, b, where = low.down.double(), low.up.double(), slice(low.first, low.last)
        added[:, where] += low.scaling * (x.double() @ a.t()) @ b.t()
        high_added[:, where] += low.scaling * (x.double().abs() @ a.abs().t()) @ b.abs().t()
    sizes = exact.abs() + added.abs() + residual.double().abs()
    bound = x.shape[1] * 2.0**-23 * (high + high_added) + 2.0**-8 * (high_added + sizes)
    return float(((y.double() - exact - added - residual.double()).abs() / bound).max())


def check(what: tuple[str, str]) -> list[str]:
    """Compare with exact results, with the same twice, and with NaN among the weights; return what is wrong."""
    name, granularity = what
    torch.manual_seed(0)
    set_configs({})  # this process may have compiled others
    wrong, case = [], make_case(name, granularity, copies=1)
    for tokens in (1, 5, 33, 64, 128):
        x, residual = tokens_of(tokens, SHAPES[name][1]), tokens_of(tokens, SHAPES[name][0])
        y = kernels.linear(x, case.weights[0], case.adapters, residual=residual)
        for _ in range(20):
            if not torch.equal(y, kernels.linear(x, case.weights[0], case.adapters, residual=residual)):
                wrong.append(f"{name} {granularity} {tokens}: again, and not the same bits")
                break
        over = excess(case, x, residual, y)
        if not over <= 1:
            wrong.append(f"{name} {granularity} {tokens}: {over:.2f} times the bound")
    bits = case.weights[0].data.view(torch.uint8)
    bits[7, 1000], bits[8, 1001] = 0x7F, 0xFF
    y = kernels.linear(x, case.weights[0], case.adapters, residual=residual)
    if not y[:, 7:9].isnan().all() or int(y.isnan().sum()) != 2 * len(y):
        wrong.append(f"{name} {granularity}: NaN of a weight is lost, or spreads")
    return wrong


def check_mlp(tokens: int) -> list[str]:
    """Compare an MLP with its specification in FP32."""
    from octavo.numerics import few_tokens as spec

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    set_configs({})
    gate_up, down = make_case("gate_up", copies=1), make_case("down", copies=1)
    x, adapters = tokens_of(tokens, HIDDEN), (gate_up.adapters, down.adapters)
    y, expected = (
        each.gated_mlp(x, gate_up.weights[0], down.weights[0], "silu", *adapters, residual=x)
        for each in (kernels, spec)
    )
    off = float((y.double() - expected.double()).norm() / expected.double().norm())
    return [] if off < 2.0**-7 else [f"MLP of {tokens}: {off:.2e} off"]


def time_graph(run: Callable[[int], Any], count: int, budget: float = 3e-3) -> float:
    """Return the median seconds of a call, of several in a graph; call i takes the i-th of `count` weights."""
    for i in range(min(2, count)):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    calls = max(count, FEWEST_CALLS)
    with torch.cuda.graph(graph):
        kept = [run(i % count) for i in range(calls)]
    times: list[float] = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    while len(times) < 5 or (sum(times) * calls < budget and len(times) < 40):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / calls)
    del kept, graph
    return statistics.median(times)


class Linears:
    """The four linears of a layer, as a decoder calls them."""

    def __init__(self, copies: int | None = None, *, values: bool = True) -> None:
        self.cases = {name: make_case(name, copies=copies, values=values) for name in SHAPES}
        self.norm = Norm((torch.rand(HIDDEN, device=DEVICE) + 0.5).to(BF16), 1e-5)

    def run(self, name: str, x: Tensor) -> Callable[[int], Any]:
        """Return call i of a linear: "qkv" after a norm, "o", "gate_up" after a norm, or all of the "mlp".

        The tiles are those of now, whatever is set later.
        """
        if name in ("qkv", "o"):
            case, beside = self.cases[name], (None, self.norm) if name == "qkv" else (x, None)
            every = [kernels.linear_launches(x, weight, case.adapters, None, *beside) for weight in case.weights]
        else:
            first, second = self.cases["gate_up"], self.cases["down"]
            pairs, lows = zip(first.weights, second.weights, strict=False), (first.adapters, second.adapters)
            every = [kernels.mlp_launches(x, *pair, "silu", *lows, x, self.norm) for pair in pairs]
            if name == "gate_up":
                some = replace(every[0][0], _launches=every[0][0]._launches[:2])
                every = [(some, given) for _, given in every]
        return lambda i: every[i][0].run(*every[i][1])

    def count(self, name: str) -> int:
        return len(self.cases["gate_up" if name == "mlp" else name].weights)

    def time(self, name: str, x: Tensor) -> float:
        """Seconds of a linear; of `down`, those of the MLP without gate and up."""
        if name == "down":
            return self.time("mlp", x) - self.time("gate_up", x)
        return time_graph(self.run(name, x), self.count(name))


def choices(name: str, rows: int) -> Iterator[Config]:
    """The candidates, each with the parts that are best if starting a program costs little, or much."""
    n, k = SHAPES[name]
    for fields in _TILES[KINDS[name]][rows]:
        tile = ProductTile(*fields)
        tiles = -(-n // 128) if name == "gate_up" else -(-n // tile.n)
        slots = tile.programs * multiprocessors(torch.device(DEVICE))
        tunings = (FewTokenTiles(start=start, part=part) for start, part in ((0.5, 0.05), (3.0, 0.25), (8.0, 1.0)))
        for parts in sorted({HONEST[1](tiles, k // 128, rows, slots, tuning) for tuning in tunings}):
            yield Config(tile, parts)


class Job(NamedTuple):
    """Compile in a process, without a launch: it goes to Triton's cache on disk."""

    name: str
    tokens: int
    configs: Configs


def compile_one(job: Job) -> float:
    import triton

    began = time.perf_counter()
    launch: Any = triton.runtime.jit.JITFunction
    honest = launch.run
    launch.run = lambda self, *args, grid, warmup, **how: honest(self, *args, grid=grid, warmup=True, **how)  # noqa: ARG005
    set_configs(job.configs)
    linears = Linears(copies=1, values=False)
    try:
        linears.run(
            "mlp" if job.name == "down" else job.name, torch.empty(job.tokens, HIDDEN, dtype=BF16, device=DEVICE)
        )(0)
    finally:
        launch.run = honest
    return time.perf_counter() - began


def compile_all(pool: ProcessPoolExecutor, jobs: Sequence[Job]) -> None:
    """Compile those jobs that are not compiled to the same code: parts count only if there are several."""
    by_code = {
        (job.name, job.tokens, tuple((config.tile, config.parts > 1) for config in job.configs.values())): job
        for job in jobs
    }
    began = time.perf_counter()
    taken = list(pool.map(compile_one, by_code.values()))
    print(f"compiled {len(taken)} in {time.perf_counter() - began:.0f} s (one by one: {sum(taken):.0f} s)", flush=True)


def sweep(linears: Linears, name: str, rows: int, others: Configs, rate: float) -> tuple[Config, list[Any]]:
    """Return the best configuration of a linear, and all times; the other linears have theirs."""
    x, found = tokens_of(rows, HIDDEN), []

    def timed(config: Config) -> tuple[float, Config]:
        set_configs(others | {name: config})
        taken = linears.time("mlp" if name == "down" else name, x), config
        found.append(taken)
        return taken

    def improve(best: tuple[float, Config], **changed: int) -> tuple[float, Config]:
        config = best[1]
        return min(best, timed(config._replace(tile=config.tile._replace(**changed))), key=lambda each: each[0])

    best = min((timed(config) for config in choices(name, rows)), key=lambda each: each[0])
    for prefetch in PREFETCHED:
        best = improve(best, prefetch=prefetch)
    for parts in ADAPTER_PARTS:
        best = improve(best, adapter_parts=parts)
    size = sum(SHAPES[each][0] * SHAPES[each][1] for each in ((name, "gate_up") if name == "down" else (name,)))
    for taken, config in sorted(found, key=lambda each: each[0])[:4]:
        print(f"  {name:8} M={rows:3} {tuple(config.tile)!s:32} parts {config.parts:2}: {1e6 * taken:6.1f} µs "
              f"{size / taken / rate:6.1%}{' (whole MLP)' * (name == 'down')}", flush=True)  # fmt: skip
    return best[1], [{"us": 1e6 * taken, **config._asdict()} for taken, config in found]


def time_bf16(name: str, x: Tensor) -> float:
    """`torch.mm` alone, by weights in BF16."""
    (n, k), count = SHAPES[name], max(2, DISTINCT // (2 * SHAPES[name][0] * SHAPES[name][1]))
    weights = [torch.randn(n, k, device=DEVICE, dtype=BF16) for _ in range(count)]
    wide = tokens_of(len(x), k)
    return time_graph(lambda i: torch.mm(wide, weights[i].t()), count)


def _call_all(calls: Sequence[Callable[[int], Any]], i: int) -> list[Any]:
    return [call(i) for call in calls]


def table(linears: Linears, tokens: Sequence[int], best: dict[int, Configs], rate: float) -> dict[str, Any]:
    """Print and return times of all linears, and of layers."""
    result: dict[str, Any] = {}
    print("linear     M      µs   GB/s  share  BF16 mm  ratio", flush=True)
    for m in tokens:
        configs, x = best.get(kernels.tile_of_tokens(m), {}), tokens_of(m, HIDDEN)
        times = {}
        for name, (n, k) in SHAPES.items():
            shared = ("gate_up", "down") if KINDS[name] != kernels.PRODUCT else (name,)
            set_configs({each: configs[each] for each in shared if each in configs})
            taken, bf16 = linears.time(name, x), time_bf16(name, x)
            print(f"{name:8} {m:3} {1e6 * taken:7.1f} {n * k / taken / 1e9:6.0f} {n * k / taken / rate:6.1%} "
                  f"{1e6 * bf16:7.1f} {bf16 / taken:5.2f}", flush=True)  # fmt: skip
            times[name] = {"us": 1e6 * taken, "share": n * k / taken / rate, "bf16_us": 1e6 * bf16}
        result[str(m)] = times
    total = sum(n * k for n, k in SHAPES.values())
    for which in ("tuning.py", "the best", "the best, first launches early"):
        for m in tokens:
            configs, x, early = best.get(kernels.tile_of_tokens(m), {}), tokens_of(m, HIDDEN), "early" in which
            chosen = {} if which == "tuning.py" else configs
            calls = []
            for names in (("qkv",), ("o",), ("gate_up", "down")):
                set_configs({each: chosen[each] for each in names if each in chosen}, begins_early=early)
                calls.append(linears.run("mlp" if "down" in names else names[0], x))
            taken = time_graph(partial(_call_all, calls), linears.count("mlp"))
            print(f"a layer by {which}, M={m:3}: {1e6 * taken:6.1f} µs, {total / taken / rate:.1%}", flush=True)
            result[f"layer {m} by {which}"] = 1e6 * taken
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all times there, as JSON")
    parser.add_argument("--tokens", default="1,16,64,128")
    parser.add_argument("--quick", action="store_true", help="no sweep: by the tiles of tuning.py")
    options = parser.parse_args()
    began, tokens = time.perf_counter(), [int(m) for m in options.tokens.split(",")]
    rows = sorted({kernels.tile_of_tokens(m) for m in tokens} & {16, 64, 128})
    pool = ProcessPoolExecutor(min(14, os.cpu_count() or 1), multiprocessing.get_context("spawn"))
    jobs = [Job(name, m, {}) for m in tokens for name in ("qkv", "o", "down")]
    if not options.quick:
        jobs += [Job(s, m, {s: config}) for s in SHAPES for m in rows for config in choices(s, m)]
    compile_all(pool, jobs)
    pairs = [*((name, "block") for name in SHAPES), ("qkv", "channel"), ("down", "channel"), ("o", "tensor")]
    checks = [*pool.map(check, pairs), *pool.map(check_mlp, (1, 33, 64, 128))]
    wrong = [line for lines in checks for line in lines]
    print("\n".join(wrong) or "checked: within the bound, the same bits again, NaN stays", flush=True)
    pool.shutdown()
    rate = 1e12 * copy_bandwidth(DEVICE)
    print(f"copy: {rate / 1e12:.2f} TB/s; {time.perf_counter() - began:.0f} s so far", flush=True)
    best: dict[int, Configs] = {}
    linears = Linears()
    result: dict[str, Any] = {"wrong": wrong, "copy": rate, "sweep": {}}
    for m in rows if not options.quick else ():
        best[m] = {}
        for name in SHAPES:
            others = {"gate_up": best[m]["gate_up"]} if name == "down" else {}
            best[m][name], result["sweep"][f"{name} {m}"] = sweep(linears, name, m, others, rate)
    print(f"{time.perf_counter() - began:.0f} s so far", flush=True)
    result["tokens"] = table(linears, tokens, best, rate)
    result["best"] = {str(m): {name: config._asdict() for name, config in each.items()} for m, each in best.items()}
    print(f"{time.perf_counter() - began:.0f} s in all")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
