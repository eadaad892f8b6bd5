"""Attention of tokens that are being generated, as a share of a copy's bandwidth: which tiles and parts are fastest.

    python benchmarks/decode_attention.py              # on a GPU; `kernels/tuning.py` has its tiles from this
    python benchmarks/decode_attention.py --tiles all  # more tiles, each of which is compiled first

Checked against the specification, then timed in CUDA graphs over the caches of several layers, so that none is in L2:
heads of an 8B (32 of q, 8 of k and v, 128 wide), a prompt of 128 tokens for each eight slots, suffixes of 1 to 512.
Bytes are those of keys and values that are seen, and their scales, each once.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from octavo.kernels import decode, decode_store
from octavo.kernels.tuning import DecodeTile, tuning_for
from octavo.numerics import decode as spec
from octavo.numerics.decode import KVCache
from octavo.numerics.rotary import Heads

HEADS = Heads(32, 8, 128)
PROMPT, LONGEST, GROUP = 128, 512, 8
SCALING = HEADS.width**-0.5
# Keys of a tile, warps and stages; then programs of a multiprocessor and the fewest keys of a part.
TILES = [(64, 4, 3), (64, 4, 2), (32, 4, 4), (128, 4, 2), (64, 2, 3), (32, 2, 4)]
MORE_TILES = [(32, 1, 4), (64, 1, 3), (128, 8, 2), (64, 8, 3), (16, 1, 6), (128, 4, 3)]
PARTS = [(2, 512), (4, 256), (6, 128), (8, 128), (8, 64), (16, 64)]


class Step(NamedTuple):
    """What one step of so many layers reads."""

    q: Tensor
    caches: list[tuple[KVCache, KVCache]]
    prefix_lengths: Tensor
    group_of: Tensor
    suffix_lengths: Tensor
    table: Tensor

    def attend(self, layer: int, tile: DecodeTile, *, shared: bool) -> Tensor:
        prefix, suffix = self.caches[layer]
        return decode.decode_attention(
            self.q, prefix, self.prefix_lengths, self.group_of, suffix, self.suffix_lengths, SCALING,
            slots_of_group=self.table if shared else None, tile=tile,
        )  # fmt: skip

    def bytes(self) -> int:
        """Of keys and values in one layer."""
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
    return Step(q, caches, prompts, group_of.int().cuda(), lengths.cuda(), table.cuda())


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


def copy_rate() -> float:
    """Bytes a second of a copy, counted both ways."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (1e-6 * time_graph(lambda: target.copy_(source), 1))


def difference(step: Step, tile: DecodeTile, *, shared: bool) -> str:
    """What is wrong with the output, beyond the rounding of probabilities and of the output to BF16; empty if nothing.

    Computed twice: the second run is launched directly.
    """
    prefix, suffix = step.caches[0]
    given = (step.q, prefix, step.prefix_lengths, step.group_of, suffix, step.suffix_lengths, SCALING)
    actual, expected = step.attend(0, tile, shared=shared).float(), spec.decode_attention(*given).float()
    again = step.attend(0, tile, shared=shared).float()
    bound = 2.0**-8 * 6.0 + 2.0**-7 * expected.abs()
    if not ((actual - expected).abs() <= bound).all():
        return f"DIFFERS from the specification by {(actual - expected).abs().max().item():.3g}"
    return "" if torch.equal(actual, again) else "DIFFERS from one run to the next"


def measure(step: Step, tile: DecodeTile, rate: float, what: str, *, shared: bool) -> float:
    """Print and return the microseconds of one layer; infinity if a tile does not fit, or is wrong."""
    how = f"keys {tile.keys:3} warps {tile.warps} stages {tile.stages} programs {tile.programs:2} least {tile.least:3}"
    what = f"{what}  {how} {'shared' if shared else 'alone ':6}"
    try:
        wrong = difference(step, tile, shared=shared)
    except triton.runtime.errors.OutOfResources as error:
        wrong = str(error)
    if wrong:
        print(f"{what}  {wrong}", flush=True)
        return float("inf")
    layers = len(step.caches)
    taken = time_graph(lambda: [step.attend(i, tile, shared=shared) for i in range(layers)], layers)
    per_second = step.bytes() / (1e-6 * taken)
    print(f"{what}  {taken:7.1f} µs  {per_second / 1e9:5.0f} GB/s  {per_second / rate:.0%} of a copy", flush=True)
    return taken


def time_store(step: Step, rate: float, what: str) -> None:
    slots = len(step.q)
    qkv = torch.randn(slots, HEADS.features, dtype=torch.bfloat16, device="cuda")
    cos, sin = torch.randn(2, slots, HEADS.width, dtype=torch.bfloat16, device="cuda")
    places, positions = torch.arange(slots, dtype=torch.int32, device="cuda"), step.suffix_lengths - 1

    def run() -> None:
        for _, suffix in step.caches:
            decode_store.rotary_and_store(qkv, cos, sin, HEADS, None, suffix, places, positions)

    taken = time_graph(run, len(step.caches))
    print(f"{what}  rotary and store {taken:.1f} µs; a copy of qkv {2e6 * qkv.nbytes / rate:.1f} µs", flush=True)


def sweep(slots: int, as_bytes: bool, rate: float, tiles: Sequence[tuple[int, int, int]]) -> None:
    what = f"{slots:3} slots, {'FP8 ' if as_bytes else 'BF16'}"
    step = new_step(slots, layers=32 if slots == 1 else 6 if slots <= 64 else 3, as_bytes=as_bytes)
    tuning = tuning_for(step.q.device)
    usual = tuning.decode_bytes if as_bytes else tuning.decode
    shared = slots > 1
    results = {}
    if slots == 64:
        for keys, warps, stages in tiles:
            tile = usual._replace(keys=keys, warps=warps, stages=stages)
            results[tile, shared] = measure(step, tile, rate, what, shared=shared)
        BEST[as_bytes] = min(results, key=lambda case: results[case])[0]
    best = BEST.get(as_bytes, usual)
    for programs, least in PARTS:
        tile = best._replace(programs=programs, least=least)
        for together in (True, False) if shared and least in (512, 128) else (shared,):
            if (tile, together) not in results:
                results[tile, together] = measure(step, tile, rate, what, shared=together)
    time_store(step, rate, what)
    tile, together = min(results, key=lambda case: results[case])
    print(f"{what}  best: {tile}, {'shared' if together else 'alone'}: {results[tile, together]:.1f} µs\n", flush=True)


BEST: dict[bool, DecodeTile] = {}  # of 64 slots, by whether the cache holds bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", default="64,1,256", help="how many at a time; tiles are chosen at 64")
    parser.add_argument("--tiles", choices=("few", "all"), default="few", help="how many tiles to try")
    options = parser.parse_args()
    torch.manual_seed(0)
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: a copy {rate / 1e12:.2f} TB/s\n", flush=True)
    tiles = TILES if options.tiles == "few" else [*TILES, *MORE_TILES]
    for slots in map(int, options.slots.split(",")):
        for as_bytes in (False, True):
            sweep(slots, as_bytes, rate, tiles)


if __name__ == "__main__":
    main()
