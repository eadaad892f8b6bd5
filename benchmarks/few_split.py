"""Few-token products with x in two FP8 halves: which tiles are best, where the time goes, and the way before beside it.

    python benchmarks/few_split.py --out few_split.json    # on a GPU, about a minute and a half; checks what it times

Linears of an 8B with adapters of rank 32, as `few_tokens.py` times them. For each shape and number of tokens:

    old      the FP16 kernels, by `tuning.py`
    tiles    the FP8 kernels: n rows of a tile, k columns of a step, w warps, s stages, p programs of a multiprocessor,
             parts of K; with the best of them, steps that are prefetched, and t parts of x · Aᵀ
    apart    the best without adapters, without parts, and the launch that makes halves alone
    reading  a launch that only reads a weight

`off`: the distance from the specification in FP32, over its norm; rounding a result to BF16 alone gives some 0.0017.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from few_tokens import BF16, DEVICE, HIDDEN, HONEST, KINDS, SHAPES, Linears, time_graph, tokens_of
from torch import Tensor

from octavo.kernels import few_tokens as kernels
from octavo.kernels.few_tokens import halves, sides
from octavo.kernels.tuning import HOPPER, HalvesTile
from octavo.numerics import few_tokens as spec
from octavo.tools.bench.kernels import copy_bandwidth

TAKES = halves.takes
PROCESSORS = 132
LIMIT = 0.004  # of `off`


class Config(NamedTuple):
    """Choices for one linear. `parts` of K."""

    tile: HalvesTile
    parts: int

    def __str__(self) -> str:
        n, step, warps, stages, programs, registers, prefetch, adapter_parts, early = self.tile
        tile = f"n{n} k{step} w{warps} s{stages} p{programs}" + (f" r{registers}" if registers else "")
        return f"{tile} parts{self.parts} pre{prefetch} t{adapter_parts} e{early}"


Configs = dict[str, Config]


def set_configs(configs: Configs, *, old: bool = False, overlaps: bool = True, begins_early: bool = False) -> None:
    """Have the kernels use these for their linears; others take what `tuning.py` has."""
    kernels._LAUNCHES.clear()
    kernels.may_overlap = lambda _: overlaps  # type: ignore[assignment]
    halves.takes = (lambda *_: False) if old else TAKES
    tiles: dict[str, Any] = dict(HOPPER.few_tokens.halves)
    for name, config in configs.items():
        tiles[KINDS[name]] = dict.fromkeys((8, 16, 32, 64), config.tile)
    every = HOPPER.few_tokens._replace(halves=tiles, begins_early=begins_early)
    parts = {SHAPES[name][1] // 128: config.parts for name, config in configs.items()}

    def parts_of(count: int, steps: int, *rest: Any) -> int:
        return parts.get(steps) or HONEST[1](count, steps, *rest)

    sides.tuning_for = lambda _: HOPPER._replace(few_tokens=every)
    sides.parts_of = parts_of


def parts_for(tiles: int, programs: int, steps: int) -> int:
    """As many parts as programs fit at once; one at least."""
    return max(1, min(steps, programs * PROCESSORS // tiles, 16))


_SMALL = ((64, 128, 4, 4, 4), (64, 128, 4, 5, 4), (64, 128, 4, 6, 3), (64, 128, 4, 8, 2))
_PRODUCTS = {
    8: (*_SMALL, (128, 128, 4, 5, 2)),
    16: (*_SMALL, (128, 128, 4, 5, 2)),
    64: ((64, 128, 4, 4, 2), (64, 128, 4, 3, 3), (128, 128, 4, 3, 2), (128, 128, 8, 3, 2), (256, 128, 16, 4, 1)),
}
_GATED = {
    8: ((128, 128, 4, 4, 3), (128, 128, 4, 5, 2), (128, 128, 4, 6, 2), (256, 128, 8, 3, 2), (256, 128, 4, 3, 2)),
    16: ((128, 128, 4, 4, 2), (128, 128, 4, 5, 2), (128, 128, 8, 5, 2), (256, 128, 8, 5, 1)),
    64: ((128, 128, 4, 3, 2), (128, 128, 8, 3, 2), (256, 128, 16, 4, 1), (256, 128, 16, 3, 1)),
}
_DOWN = {
    8: (*_SMALL, (128, 128, 4, 4, 3), (128, 128, 4, 5, 2)),
    16: (*_SMALL, (128, 128, 4, 5, 2)),
    64: ((64, 128, 4, 4, 2), (64, 128, 4, 3, 3), (128, 128, 4, 3, 2), (128, 128, 8, 3, 2), (256, 128, 16, 4, 1)),
}
_TILES: dict[str, Any] = {"qkv": _PRODUCTS, "o": _PRODUCTS, "gate_up": _GATED, "down": _DOWN}


def choices(name: str, tokens: int) -> Iterator[Config]:
    """Tiles to try, with as many parts as fit at once, and fewer."""
    rows, k = SHAPES[name]
    for n, step, warps, stages, programs in _TILES[name][halves.tile_of_tokens(tokens)]:
        full = parts_for(-(-rows // n), programs, k // step)
        for parts in sorted({full, max(1, full // 2)} | ({max(1, full // 4)} if name in ("qkv", "o") else set())):
            yield Config(HalvesTile(n, step, warps, stages, programs), parts)


class Job(NamedTuple):
    """A linear to compile in a process, without a launch: it goes to Triton's cache on disk."""

    name: str
    tokens: int
    configs: Configs
    old: bool = False
    adapted: bool = True
    overlaps: bool = True


def calls_of(linears: Linears, name: str, x: Tensor) -> Callable[[int], Any]:
    return linears.run("mlp" if name == "down" else name, x)


def compile_one(job: Job) -> str:
    """Return what is wrong, or nothing."""
    launch: Any = triton.runtime.jit.JITFunction
    honest = launch.run
    launch.run = lambda self, *args, grid, warmup, **how: honest(self, *args, grid=grid, warmup=True, **how)  # noqa: ARG005
    set_configs(job.configs, old=job.old, overlaps=job.overlaps)
    linears = Linears(copies=1, values=False)
    if not job.adapted:
        linears.cases = {name: case._replace(adapters=[]) for name, case in linears.cases.items()}
    try:
        calls_of(linears, job.name, torch.empty(job.tokens, HIDDEN, dtype=BF16, device=DEVICE))(0)
    except Exception as error:  # a tile that does not compile is reported, and left out
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"
    finally:
        launch.run = honest
    return ""


def key_of(name: str, tokens: int, config: Config) -> tuple[Any, ...]:
    return name, halves.tile_of_tokens(tokens), config.tile[:6], config.parts > 1


class Sweep:
    """Times of all that is tried."""

    def __init__(self, rate: float, bad: dict[tuple[Any, ...], str]) -> None:
        self.linears, self.rate, self.bad, self.rows = Linears(), rate, bad, []  # type: ignore[var-annotated]
        self.plain = Linears(copies=0)
        self.plain.cases = {name: case._replace(adapters=[]) for name, case in self.linears.cases.items()}
        self.plain.norm = self.linears.norm
        self.expected: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def expect(self, name: str, tokens: int) -> tuple[Tensor, Tensor]:
        """The tokens, and the specification's result."""
        if (name, tokens) not in self.expected:
            torch.manual_seed(tokens)
            x, cases, norm = tokens_of(tokens, HIDDEN), self.linears.cases, self.linears.norm
            if name in ("qkv", "o"):
                how: dict[str, Any] = {"norm": norm} if name == "qkv" else {"residual": x}
                y = spec.linear(x, cases[name].weights[0], cases[name].adapters, **how)
            else:
                two = cases["gate_up"], cases["down"]
                pair, lows = (case.weights[0] for case in two), (case.adapters for case in two)
                y = spec.gated_mlp(x, *pair, "silu", *lows, residual=x, norm=norm)
            self.expected[name, tokens] = x, y
        return self.expected[name, tokens]

    def off(self, name: str, tokens: int) -> float:
        """How far from the specification, by the tiles of now."""
        name = "mlp" if name in ("gate_up", "down") else name
        x, y = self.expect(name, tokens)
        (actual,) = self.linears.run(name, x)(0)
        return float((actual.double() - y.double()).norm() / y.double().norm())

    def time(
        self, name: str, tokens: int, configs: Configs, what: str, *, old: bool = False, plain: bool = False
    ) -> float:
        """Seconds of a linear (down: of the whole MLP), noted. What fails is reported."""
        row = {"name": name, "tokens": tokens, "what": what, "config": str(configs.get(name, "")), "us": None}
        self.rows.append(row)
        try:
            set_configs(configs, old=old)
            x = self.expect("mlp" if name in ("gate_up", "down") else name, tokens)[0]
            linears = self.plain if plain else self.linears
            if not plain:
                row["off"] = self.off(name, tokens)
            run = self._lay_out(name, x) if what == "lay out alone" else calls_of(linears, name, x)
            taken = time_graph(run, linears.count("mlp" if name == "down" else name), budget=2e-3)
        except Exception as error:  # reported, and left out
            row["error"] = f"{type(error).__name__}: {str(error)[:150]}"
            print(f"  {name} M={tokens} {what} {row['config']}: {row['error']}", flush=True)
            return float("inf")
        row["us"] = 1e6 * taken
        if not row.get("off", 0.0) <= LIMIT:
            row["error"] = f"off {row['off']:.4f}"
            print(f"  {name} M={tokens} {what} {row['config']}: WRONG, {row['error']}", flush=True)
            return float("inf")
        return taken

    def _lay_out(self, name: str, x: Tensor) -> Callable[[int], Any]:
        """Calls of the first launch of a linear, alone."""
        case = self.linears.cases[name if name in ("qkv", "o") else "gate_up"]
        norm = None if name == "o" else self.linears.norm
        launches, given = kernels.linear_launches(x, case.weights[0], case.adapters, None, None, norm)
        first = replace(launches, _launches=launches._launches[:1])
        return lambda _: first.run(*given)

    def best(self, name: str, tokens: int, beside: Configs) -> Config | None:
        """Try all tiles, and what surrounds the best of them."""
        say = partial(self._say, name, tokens)
        say(self.time(name, tokens, {}, "old", old=True), "old")
        found = []
        for config in choices(name, tokens):
            if key_of(name, tokens, config) not in self.bad:
                found.append((self.time(name, tokens, beside | {name: config}, "tiles"), config))
        found.sort(key=lambda each: each[0])
        for taken, config in found[:3]:
            say(taken, str(config))
        if not found or found[0][0] == float("inf"):
            return None
        best = found[0]
        changes = [("adapter_parts", (4, 8, 32)), ("prefetch", (2, 4, 8)), ("early", (2, 4, 8, 32))]
        for field, values in changes[: 2 if name == "down" else 3]:
            for value in values:
                config = best[1]._replace(tile=best[1].tile._replace(**{field: value}))
                taken = self.time(name, tokens, beside | {name: config}, f"{field} {value}")
                best = min(best, (taken, config), key=lambda each: each[0])
        say(best[0], f"best: {best[1]}")
        return best[1]

    def apart(self, name: str, tokens: int, configs: Configs) -> None:
        """What a linear takes without adapters, without parts of K, and before its products."""
        say = partial(self._say, name, tokens)
        for config, parts in ((configs[name], ""), (configs[name]._replace(parts=1), ", one part")):
            what = f"without adapters{parts}"
            say(self.time(name, tokens, configs | {name: config}, what, plain=True), what)
        if name != "down":
            say(self.time(name, tokens, configs, "lay out alone"), "lay out alone")

    def _say(self, name: str, tokens: int, taken: float, what: str) -> None:
        size = sum(SHAPES[each][0] * SHAPES[each][1] for each in (("gate_up", "down") if name == "down" else (name,)))
        whole = " (whole MLP)" if name == "down" else ""
        print(f"{name:8} M={tokens:3} {1e6 * taken:6.1f} µs {size / taken / self.rate:6.1%} {what}{whole}", flush=True)

    def layer(self, tokens: int, configs: Configs, **how: bool) -> float:
        """Seconds of all linears of a layer in a row."""
        x, calls = tokens_of(tokens, HIDDEN), []
        for names in (("qkv",), ("o",), ("gate_up", "down")):
            set_configs({each: configs[each] for each in names if each in configs}, **how)
            calls.append(self.linears.run("mlp" if "down" in names else names[0], x))
        return time_graph(lambda i: [call(i) for call in calls], self.linears.count("mlp"))


@triton.jit
def read_kernel(w_ptr, out_ptr, share, SIZE: tl.constexpr):
    """Read a share of a weight, in 16 bytes for a thread, and nothing else."""
    begin, i = tl.program_id(0).to(tl.int64) * share, tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.int32)
    for at in tl.range(0, share, SIZE, num_stages=1, loop_unroll_factor=4):
        total += tl.load(w_ptr + begin + at + i, eviction_policy="evict_first")
    if tl.sum(total, axis=0) == 12345:
        tl.store(out_ptr, 1)


def _read(weights: Sequence[Tensor], programs: int, share: int, i: int) -> None:
    read_kernel[(programs,)](weights[i], weights[i], share, SIZE=2048, num_warps=4)


def time_reading(rate: float) -> dict[str, float]:
    """Times of launches that only read a weight: what a launch of a product could take at best, x being there."""
    times = {}
    for name, (n, k) in SHAPES.items():
        count = -(-(2**28) // (n * k))
        weights = [torch.zeros(n * k // 4, dtype=torch.int32, device=DEVICE) for _ in range(count)]
        for programs in (132, 264, 528, 1056):
            share = n * k // 4 // programs // 2048 * 2048
            times[f"{name} {programs}"] = 1e6 * time_graph(partial(_read, weights, programs, share), count)
        best = min(times[f"{name} {p}"] for p in (132, 264, 528, 1056))
        print(f"reading {name:8} {best:6.1f} µs {1e6 * n * k / best / rate:6.1%}", flush=True)
    return times


def compile_all(pool: ProcessPoolExecutor, jobs: dict[tuple[Any, ...], Job]) -> dict[tuple[Any, ...], str]:
    """Compile, and return what is wrong."""
    began = time.perf_counter()
    wrong = dict(zip(jobs, pool.map(compile_one, jobs.values()), strict=True))
    bad = {key: error for key, error in wrong.items() if error}
    for key, error in bad.items():
        print(f"does not compile: {key}: {error}", flush=True)
    print(f"compiled {len(jobs)} in {time.perf_counter() - began:.0f} s", flush=True)
    return bad


def first_jobs(tokens: Sequence[int]) -> dict[tuple[Any, ...], Job]:
    jobs: dict[tuple[Any, ...], Job] = {}
    for m in tokens:
        jobs |= {(name, m, "old"): Job(name, m, {}, old=True) for name in ("qkv", "o", "down")}
        for name in ("qkv", "o", "gate_up"):
            jobs |= {key_of(name, m, config): Job(name, m, {name: config}) for config in choices(name, m)}
    return jobs


def second_jobs(best: dict[int, Configs]) -> dict[tuple[Any, ...], Job]:
    """What follows from the best: tiles of down, and all without adapters."""
    jobs: dict[tuple[Any, ...], Job] = {}
    for m, configs in best.items():
        first = {"gate_up": configs["gate_up"]} if "gate_up" in configs else {}
        for config in choices("down", m):
            jobs[key_of("down", m, config)] = Job("down", m, first | {"down": config})
        for name, config in configs.items():
            jobs[(*key_of(name, m, config), "alone")] = Job(name, m, {name: config}, overlaps=False)
            for each in (config, config._replace(parts=1)):
                jobs[(*key_of(name, m, each), "plain")] = Job(name, m, {name: each}, adapted=False)
    return jobs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all times there, as JSON")
    parser.add_argument("--tokens", default="1,16,64")
    options = parser.parse_args()
    began, tokens = time.perf_counter(), [int(m) for m in options.tokens.split(",")]
    torch.backends.cuda.matmul.allow_tf32 = False
    pool = ProcessPoolExecutor(min(15, os.cpu_count() or 1), multiprocessing.get_context("spawn"))
    bad = compile_all(pool, first_jobs(tokens))
    rate = 1e12 * copy_bandwidth(DEVICE)
    print(f"copy: {rate / 1e12:.2f} TB/s", flush=True)
    sweep, best = Sweep(rate, bad), {m: {} for m in tokens}
    result: dict[str, Any] = {"copy": rate, "rows": sweep.rows}

    def note() -> None:
        print(f"{time.perf_counter() - began:.0f} s so far", flush=True)
        result["best"] = {str(m): {name: str(each) for name, each in found.items()} for m, found in best.items()}
        result["bad"] = {str(key): error for key, error in bad.items()}
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n")

    for m in tokens:
        for name in ("qkv", "o", "gate_up"):
            config = sweep.best(name, m, {})
            if config is not None:
                best[m][name] = config
        note()
    bad |= compile_all(pool, second_jobs(best))
    pool.shutdown()
    total = sum(n * k for n, k in SHAPES.values())
    for m in tokens:
        config = sweep.best("down", m, {"gate_up": best[m]["gate_up"]} if "gate_up" in best[m] else {})
        if config is not None:
            best[m]["down"] = config
        ahead = {
            name: each._replace(tile=each.tile._replace(early={"gate_up": 4, "down": 0}.get(name, 32), prefetch=4))
            for name, each in best[m].items()
        }
        ways: list[tuple[str, Configs, dict[str, bool]]] = [
            ("old", {}, {"old": True}),
            ("the best", best[m], {}),
            ("the best, begun early", best[m], {"begins_early": True}),
            ("weights asked for by the launch before", ahead, {}),
            ("weights asked for by the launch before, begun early", ahead, {"begins_early": True}),
            ("the best, one launch after another", best[m], {"overlaps": False}),
        ]
        for what, configs, how in ways:
            taken = sweep.layer(m, configs, **how)
            print(f"a layer, {what}, M={m}: {1e6 * taken:.1f} µs, {total / taken / rate:.1%}", flush=True)
            result[f"layer {m} {what}"] = 1e6 * taken
        note()
    for m in tokens:
        for name in best[m]:
            beside = {"gate_up": best[m]["gate_up"]} if name == "down" else {}
            sweep.apart(name, m, beside | {name: best[m][name]})
    result["reading"] = time_reading(rate)
    note()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
