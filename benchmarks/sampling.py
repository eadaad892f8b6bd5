"""A token for each row of logits: two launches against operations of torch, and which tiles are fastest.

    python benchmarks/sampling.py --out FILE      # on a GPU; `kernels/tuning.py` has its tile from this
    python benchmarks/sampling.py --rows 64 --vocabulary 128256

Each is checked against the specification, then timed in a CUDA graph with other logits beside, so that none are in L2
(`--warm`: the same ones again and again, as right after the product that makes them). With the seed that the engine
draws for every step. The exit status is 1 where a token is wrong.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import sampling as kernels
from octavo.kernels.tuning import SamplingTile, tuning_for
from octavo.numerics import sampling as spec
from octavo.rl import sampling as engine
from octavo.rl.completions import Sampling
from octavo.tools.bench.kernels import copy_bandwidth

LANES, WARPS, PROGRAMS = (128, 256, 512, 1024), (2, 4, 8), (4, 6, 8, 10, 16)
L2 = 200 * 2**20  # bytes that certainly do not fit


def time_graph(run: Callable[[int], object], calls: int, generator: torch.Generator, repeats: int = 15) -> float:
    """Microseconds of one of `calls` calls, the median of replays."""
    for call in range(calls):
        run(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        for call in range(calls):
            run(call)
    taken = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(taken) / calls


def set_tile(device: torch.device, tile: SamplingTile) -> None:
    tuning = tuning_for(device)._replace(sampling=tile)
    kernels.tuning_for = lambda _: tuning  # type: ignore[assignment]
    kernels._LAUNCHES.clear()


def wrong(logits: Tensor, one: Tensor) -> str:
    """Compare with the specification: tokens of 99 % of rows at least, log-probabilities to 1e-4."""
    seed = torch.tensor([7], device="cuda")
    token, logprob = kernels.sample(logits, one, seed, False)
    expected, _ = spec.sample(logits, one, seed, False)
    of_token = logits.log_softmax(-1).gather(1, token[:, None])[:, 0]
    if (token == expected).double().mean() < 0.99 - 1 / len(token):
        return f"{int((token != expected).sum())} of {len(token)} tokens differ"
    return "" if (logprob - of_token).abs().max() < 1e-4 else "log-probabilities differ"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="64,1,256")
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--warm", action="store_true", help="the same logits in every call")
    parser.add_argument("--out", type=Path, help="write all times there, as JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    device, one = torch.device("cuda", torch.cuda.current_device()), torch.ones((), device="cuda")
    usual, generator, copy = tuning_for(device).sampling, torch.Generator("cuda"), copy_bandwidth("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: a copy {copy:.2f} TB/s", flush=True)
    rows: list[dict[str, Any]] = []
    for count in (int(each) for each in options.rows.split(",")):
        nbytes = 4 * count * options.vocabulary
        calls = 1 if options.warm else min(max(L2 // nbytes, 2), 64)
        logits = [3 * torch.randn(count, options.vocabulary, device="cuda") for _ in range(calls)]

        def measure(name: str, run: Callable[[int], object], fault: str = "") -> None:
            us = time_graph(run, calls, generator)  # noqa: B023
            share = nbytes / (1e-6 * us) / 1e12 / copy  # noqa: B023
            print(f"{count:3} rows, {name}: {us:6.1f} µs, {share:.0%} of a copy's bytes {fault}", flush=True)  # noqa: B023
            rows.append({"rows": count, "name": name, "us": us, "share": share, "wrong": fault})  # noqa: B023

        for name, sampling in (("sampled", Sampling()), ("greedy", Sampling(temperature=0))):
            run = lambda i, how=sampling: engine.choose(logits[i], how, one, generator)  # noqa: B023, E731
            honest = engine.ops.has_kernel
            engine.ops.has_kernel = lambda _: False
            measure(f"torch, {name}", run)
            engine.ops.has_kernel = honest
            set_tile(device, usual)
            measure(f"two launches, {name}", run, wrong(logits[0], one))
        sampled = lambda i: engine.choose(logits[i], Sampling(), one, generator)  # noqa: B023, E731
        for lanes in LANES:
            for warps in WARPS:
                if not 1 <= lanes // (32 * warps) <= 4:
                    continue
                for programs in PROGRAMS:
                    set_tile(device, SamplingTile(lanes, warps, programs))
                    name = f"lanes {lanes:4}, warps {warps}, programs {programs:2}"
                    measure(name, sampled, wrong(logits[0], one))
        mine = [row for row in rows if row["rows"] == count and row["name"].startswith("lanes") and not row["wrong"]]
        best = min(mine, key=lambda row: row["us"])
        print(f"best: {best['name']}  {best['us']:.1f} µs\n", flush=True)
    faults = [row for row in rows if row["wrong"]]
    if options.out is not None:
        result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "copy": copy, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
