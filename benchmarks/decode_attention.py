"""Attention of tokens that are being generated, as a share of a copy's bandwidth: which tiles and parts are fastest.

    python benchmarks/decode_attention.py --out FILE    # on a GPU; `kernels/tuning.py` has its tiles from this
    python benchmarks/decode_attention.py --slots 64    # less of it

Compiled in many processes, checked against the specification, then timed in CUDA graphs over the caches of several
layers, so that none is in L2: heads of an 8B (32 of q, 8 of k and v, 128 wide), a prompt of 128 tokens for each eight
slots, suffixes of 1 to 512. Bytes are those of keys and values that are seen, and their scales, each once. The exit
status is 1 where a result is wrong.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from octavo.kernels import decode, decode_store
from octavo.kernels.decode_tiles import tile_for
from octavo.kernels.tuning import DecodeTile, may_overlap
from octavo.numerics import decode as spec
from octavo.numerics.decode import KVCache
from octavo.numerics.rotary import Heads
from octavo.tools.bench.kernels import copy_bandwidth

HEADS = Heads(32, 8, 128)
PROMPT, LONGEST, GROUP = 128, 512, 8
SCALING = HEADS.width**-0.5
# Keys of a tile, warps and stages, by whether the cache holds bytes; tried at 64 slots. Then rows of a product for a
# group, and registers: with 32 rows of four heads for eight slots, those of a group take so many (254 in bytes) that
# four programs fit a multiprocessor; with 16, five or six do, and a prompt is read twice, the second time from L2.
TILES: dict[bool, list[tuple[int, ...]]] = {
    False: [(32, 2, 4), (32, 2, 3), (32, 2, 6), (32, 4, 4), (64, 2, 3), (64, 4, 3), (128, 4, 2), (16, 1, 6),
            (32, 2, 4, 16), (32, 2, 3, 16), (32, 2, 3, 16, 128), (64, 2, 2, 16),
            (16, 1, 6, 16)],
    True: [(64, 2, 3), (64, 2, 2), (64, 2, 4), (64, 4, 3), (128, 4, 2), (128, 4, 3), (32, 2, 4), (32, 1, 4),
           (64, 2, 3, 16), (64, 2, 3, 16, 168), (64, 2, 2, 16, 168), (32, 2, 4, 16), (32, 2, 3, 16), (64, 4, 3, 16),
           (32, 1, 4, 16, 200), (16, 1, 6, 16)],
}  # fmt: skip
# Programs of a multiprocessor and the fewest keys of a part, for the best of them.
PARTS = [(2, 512), (4, 256), (5, 128), (6, 128), (8, 128), (10, 128), (16, 128), (8, 64)]
LAYERS = {1: 32, 64: 6}  # of which a graph reads the caches; 3 for more slots


class Step(NamedTuple):
    """Bytes that one step of so many layers reads."""

    q: Tensor
    caches: list[tuple[KVCache, KVCache]]
    prefix_lengths: Tensor
    group_of: Tensor
    suffix_lengths: Tensor
    table: Tensor
    qkv: Tensor
    angles: Tensor  # cosines and sines
    places: Tensor
    newest: Tensor  # its position

    def given(self, layer: int) -> tuple[Any, ...]:
        prefix, suffix = self.caches[layer]
        return self.q, prefix, self.prefix_lengths, self.group_of, suffix, self.suffix_lengths, SCALING

    def attend(self, layer: int, tile: DecodeTile, *, shared: bool) -> Tensor:
        table = self.table if shared else None
        return decode.decode_attention(*self.given(layer), None, None, table, tile)

    def store(self, layer: int) -> Tensor:
        """Rotate and store the newest token of each slot; the same one for all layers."""
        suffix, (cos, sin) = self.caches[layer][1], self.angles
        return decode_store.rotary_and_store(self.qkv, cos, sin, HEADS, None, suffix, self.places, self.newest)

    def bytes(self) -> int:
        """Bytes of keys and values in one layer."""
        tokens = int(self.suffix_lengths.sum()) + int(self.prefix_lengths.sum())
        keys = self.caches[0][1].keys
        scale = 0 if self.caches[0][1].key_scales is None else 4
        return tokens * HEADS.kv * 2 * (HEADS.width * keys.element_size() + scale)


def new_cache(places: int, positions: int, *, as_bytes: bool) -> KVCache:
    shape = (places, positions, HEADS.kv, HEADS.width)
    made = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    if not as_bytes:
        return KVCache(*made)
    scales = [torch.rand(shape[:3], device="cuda") * 0.02 + 0.01 for _ in range(2)]
    data = [(x / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8) for x in made]
    return KVCache(*data, *scales)


def new_step(slots: int, layers: int, *, as_bytes: bool) -> Step:
    groups = -(-slots // GROUP)
    group_of = torch.randperm(slots) % groups  # scattered, as refilled slots are
    table = torch.full((groups, GROUP), -1, dtype=torch.int32)
    for group in range(groups):
        mine = (group_of == group).nonzero().flatten().int()
        table[group, : len(mine)] = mine
    lengths = torch.randint(1, LONGEST + 1, (slots,), dtype=torch.int32)
    caches = [
        (new_cache(groups, PROMPT, as_bytes=as_bytes), new_cache(slots, LONGEST, as_bytes=as_bytes))
        for _ in range(layers)
    ]
    q = torch.randn(slots, HEADS.q, HEADS.width, dtype=torch.bfloat16, device="cuda")
    prompts = torch.full((groups,), PROMPT, dtype=torch.int32, device="cuda")
    qkv = torch.randn(slots, HEADS.features, dtype=torch.bfloat16, device="cuda")
    angles = torch.randn(2, slots, HEADS.width, dtype=torch.bfloat16, device="cuda")
    places = torch.arange(slots, dtype=torch.int32, device="cuda")
    indices = (group_of.int().cuda(), lengths.cuda(), table.cuda())
    return Step(q, caches, prompts, *indices, qkv, angles, places, lengths.cuda() - 1)


def time_graph(run: Callable[[], object], calls: int, repeats: int = 15) -> float:
    """Microseconds of one of `calls` calls, the median of replays."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    taken = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(taken) / calls


class Case(NamedTuple):
    """A case to time; `table`: groups read their prompt, otherwise slots do. `overlaps`: launches begin early."""

    slots: int
    as_bytes: bool
    tile: DecodeTile
    table: bool
    overlaps: bool = True

    def __str__(self) -> str:
        tile = self.tile
        how = f"keys {tile.keys:3} warps {tile.warps} stages {tile.stages} parts {tile.programs:2}, {tile.least:3}"
        how += f" rows {tile.rows}" if tile.rows != DecodeTile._field_defaults["rows"] else ""
        how += f" registers {tile.registers}" if tile.registers else ""
        other = "" if self.overlaps else " one after another"
        return f"{name_of(self.slots, self.as_bytes)}  {how} {'shared' if self.table else 'alone '}{other}"


def name_of(slots: int, as_bytes: bool) -> str:
    return f"{slots:3} slots, {'FP8 ' if as_bytes else 'BF16'}"


def set_overlaps(overlaps: bool) -> None:
    decode._LAUNCHES.clear()
    decode_store._LAUNCHES.clear()
    decode.may_overlap = decode_store.may_overlap = may_overlap if overlaps else lambda _: False  # type: ignore[assignment]


def cases_of(slots: int, as_bytes: bool, best: DecodeTile | None) -> list[Case]:
    """Cases to time for so many slots: tiles at 64, where `best` is not known yet; then parts, for that tile."""
    usual = tile_for(slots, HEADS.kv, as_bytes=as_bytes, device=torch.device("cuda"))
    table = slots > 1
    if best is None:
        names = ("keys", "warps", "stages", "rows", "registers")
        tiles = [usual._replace(**dict(zip(names, tile, strict=False))) for tile in TILES[as_bytes]]
        return [Case(slots, as_bytes, t._replace(least=max(t.least, t.keys)), table) for t in tiles]
    parts = [best._replace(programs=n, least=least) for n, least in PARTS if least >= best.keys]
    found = [Case(slots, as_bytes, tile, table) for tile in parts]
    others = [Case(slots, as_bytes, usual, False), Case(slots, as_bytes, usual, table, overlaps=False)]
    return list(dict.fromkeys([*found, *others]))


def compile_one(case: Case) -> float:
    """Compile what a case launches, to Triton's cache on disk."""
    began = time.perf_counter()
    launch: Any = triton.runtime.jit.JITFunction
    honest = launch.run
    launch.run = lambda self, *args, grid, warmup, **how: honest(self, *args, grid=grid, warmup=True, **how)  # noqa: ARG005
    try:
        set_overlaps(case.overlaps)
        step = new_step(case.slots, layers=1, as_bytes=case.as_bytes)
        step.attend(0, case.tile, shared=case.table)
        step.store(0)
    finally:
        launch.run = honest
    return time.perf_counter() - began


class Compiler:
    """Compiles cases in many processes, each once: first those that differ in attention, then what merges its parts."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self.pool = pool
        self.done: set[Case] = set()

    def __call__(self, cases: list[Case]) -> None:
        began = time.perf_counter()
        cases = [case for case in cases if case not in self.done]
        first = {
            (case.as_bytes, case.tile._replace(programs=0, least=0), case.table, case.overlaps, case.slots > 64): case
            for case in cases
        }
        rest = [case for case in cases if case not in first.values()]
        taken = [*self.pool.map(compile_one, first.values()), *self.pool.map(compile_one, rest)]
        self.done.update(cases)
        if cases:
            seconds = time.perf_counter() - began
            print(f"compiled {len(cases)} in {seconds:.0f} s (one by one: {sum(taken):.0f} s)", flush=True)


def difference(step: Step, case: Case, expected: Tensor) -> str:
    """The error of the output, beyond the rounding of probabilities and of the output to BF16; empty if nothing.

    Computed twice: the second run is launched directly.
    """
    actual, again = (step.attend(0, case.tile, shared=case.table).float() for _ in range(2))
    of_shares = 2.0**-11 if case.as_bytes else 2.0**-8
    if not ((actual - expected).abs() <= of_shares * 8.0 + 2.0**-7 * expected.abs()).all():
        return f"DIFFERS from the specification by {(actual - expected).abs().max().item():.3g}"
    return "" if torch.equal(actual, again) else "DIFFERS from one run to the next"


class Sweep:
    """Times of cases, and what is wrong."""

    def __init__(self, copy: float) -> None:
        self.copy = copy  # TB/s
        self.rows: list[dict[str, Any]] = []
        self.wrong: list[str] = []

    def measure(self, step: Step, case: Case, expected: Tensor) -> float:
        """Print and return the microseconds of one layer; infinity if a tile is wrong."""
        set_overlaps(case.overlaps)
        if wrong := difference(step, case, expected):
            self.wrong.append(f"{case}  {wrong}")
            print(self.wrong[-1], flush=True)
            return float("inf")
        layers = range(len(step.caches))
        alone = time_graph(lambda: [step.attend(i, case.tile, shared=case.table) for i in layers], len(layers))
        both = time_graph(lambda: [(step.store(i), step.attend(i, case.tile, shared=case.table)) for i in layers],
                          len(layers))  # fmt: skip
        rate = step.bytes() / (1e-6 * alone) / 1e12
        print(f"{case}  {alone:6.1f} µs  {rate:.2f} TB/s  {rate / self.copy:.0%} of a copy; with rotary and store "
              f"{both:.1f}", flush=True)  # fmt: skip
        self.rows.append(case._asdict() | {"tile": case.tile._asdict(), "us": alone, "share": rate / self.copy,
                         "with_store_us": both})  # fmt: skip
        return alone

    def run(self, slots: int, as_bytes: bool, best: dict[bool, DecodeTile], prepare: Compiler) -> None:
        """All cases of so many slots; leaves the best tile of 64 in `best`."""
        step = new_step(slots, LAYERS.get(slots, 3), as_bytes=as_bytes)
        for layer in range(len(step.caches)):
            step.store(layer)  # what it stores again when it is timed
        expected = spec.decode_attention(*step.given(0)).float()
        times: dict[Case, float] = {}
        if slots == 64:
            times = {case: self.measure(step, case, expected) for case in cases_of(slots, as_bytes, None)}
            best[as_bytes] = min(times, key=lambda case: times[case]).tile
        usual = tile_for(slots, HEADS.kv, as_bytes=as_bytes, device=torch.device("cuda"))
        more = [case for case in cases_of(slots, as_bytes, best.get(as_bytes, usual)) if case not in times]
        prepare(more)
        times |= {case: self.measure(step, case, expected) for case in more}
        fastest = min(times, key=lambda case: times[case])
        print(f"best: {fastest}  {times[fastest]:.1f} µs\n", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", default="64,1,256", help="how many at a time; tiles are chosen at 64")
    parser.add_argument("--out", type=Path, help="write all times there, as JSON")
    options = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(0)
    sweep = Sweep(copy_bandwidth("cuda"))
    best: dict[bool, DecodeTile] = {}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: a copy {sweep.copy:.2f} TB/s", flush=True)
    slots = [int(each) for each in options.slots.split(",")]
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        prepare, known = Compiler(pool), []
        for each in slots:
            for as_bytes in (False, True):
                usual = tile_for(each, HEADS.kv, as_bytes=as_bytes, device=torch.device("cuda"))
                known += [*(cases_of(each, as_bytes, None) if each == 64 else []), *cases_of(each, as_bytes, usual)]
        prepare(known)
        for each in slots:
            for as_bytes in (False, True):
                sweep.run(each, as_bytes, best, prepare)
    print("\n".join(sweep.wrong) or "nothing is wrong", f"{time.perf_counter() - began:.0f} s in all", sep="\n")
    if options.out is not None:
        result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "copy": sweep.copy,
                  "wrong": sweep.wrong, "cases": sweep.rows}  # fmt: skip
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(sweep.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
