"""Checks, on one GPU, of all that several ranks need of each: NCCL, DDP and FSDP2 with a single rank.

    python benchmarks/one_rank.py --out one-rank.json           # all seven checks, 8B shapes; --quick for fewer steps
    python benchmarks/one_rank.py --preset tiny --device cpu    # a smoke test: gloo, FP8 emulated, no times that count

    bits       losses of plain Octavo, DDP, FSDP2 and FSDP2 with FP8 gather: equal to the bit; time and memory of each,
               and of BF16 with and without FSDP2, since with one rank that copies all weights and gradients
    streams    FSDP2 with FP8 gather against the same with CUDA_LAUNCH_BLOCKING=1: equal to the bit
    shards     quantising 1/8, 1/64 and 1/512 of a weight, against a copy that moves as many bytes
    amax       the all-reduce of all block scales of an 8B: time on the host and on the device, nothing waits
    lora       LoRA on a frozen FP8 base under FSDP2, against the same without; with a BF16 policy, too
    graphs     CUDA graphs under DDP while NCCL is up: recorded and replayed, losses equal to those without
    float8     NCCL broadcasts and gathers float8

With one rank FSDP2 gathers nothing, but copies in and out, quantises shards and runs every hook. What has to be equal
is computed with `torch.use_deterministic_algorithms(True)`: cuDNN's attention adds up the gradient of q in any order,
and two runs of anything then part sooner or later. What is timed is computed without. A check that fails says why, the
others still run, and the exit code is 1.
"""

import argparse
import datetime
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import octavo
from octavo.dist.amax import AmaxExchange
from octavo.dist.collectives import all_gather
from octavo.numerics import FP8ScalingManager, FP8TrainingConfig
from octavo.numerics.scaling import new_states
from octavo.ops.quantize import matrix_amax, quantize_group
from octavo.tools.bench.contenders import Contender
from octavo.tools.bench.kernels import copy_bandwidth
from octavo.tools.bench.prepared_model import PreparedModel
from octavo.tools.bench.random_model import decoder_layers
from octavo.tools.bench.result import device_name, versions, without_folders
from octavo.tools.bench.timing import device_time
from octavo.tools.shapes import LLAMAS, make_case
from octavo.training.files import write_json

WAYS = ("plain", "ddp", "fsdp2", "fsdp2, FP8 gather")
BF16_WAYS = ("bf16", "bf16, fsdp2")
Options = argparse.Namespace
Row = dict[str, Any]


def prepared(
    options: Options, recipe: str | None, layers: int, *, mode: str = "full", tokens: int | None = None
) -> PreparedModel:
    """Return a model in FP8, or without a recipe in BF16, with Octavo's chunked loss."""
    case = make_case(
        preset=options.preset, config=None, layers=layers, tokens=tokens, seq=None, seed=0, device=options.device,
        force=True, mode=mode,
    )  # fmt: skip
    kind = "octavo-bf16" if recipe is None else "octavo"
    return PreparedModel(case, Contender(f"{kind} {recipe}", kind, compile=False, recipe=recipe))


@contextmanager
def same_bits() -> Iterator[None]:
    """Have torch and Octavo choose deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def shard(model: nn.Module, layers: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in layers.children():
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def wrapped(model: nn.Module, way: str) -> nn.Module:
    if "ddp" in way:
        return nn.parallel.DistributedDataParallel(model)
    if "fsdp2" in way:
        shard(model, decoder_layers(model))
    if way == WAYS[3]:
        octavo.fp8_all_gather(model)
    return model


def train(
    model: nn.Module, inputs: dict[str, Tensor], steps: int, device: str, optimizer: torch.optim.Optimizer
) -> tuple[list[float], list[float]]:
    """Losses, and the seconds of each step."""
    losses, marks = [], [_mark(device)]
    for _ in range(steps):
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        marks.append(_mark(device))
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = [_between(a, b) for a, b in pairwise(marks)]
    return torch.stack(losses).float().tolist(), seconds


def _mark(device: str) -> Any:
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(a: Any, b: Any) -> float:
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: str) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None


def bits(options: Options) -> Row:
    ways: dict[str, Row] = {}
    losses = {}
    for way in (*WAYS, *BF16_WAYS):
        model_of = prepared(options, None if way in BF16_WAYS else options.recipe, options.layers)
        model = wrapped(model_of.model, way)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=options.device == "cuda")
        if way in WAYS:
            with same_bits():
                losses[way] = train(model, model_of.inputs, options.steps, options.device, optimizer)[0]
        _, seconds = train(model, model_of.inputs, options.timed_steps, options.device, optimizer)
        peak = peak_gib(options.device)
        ways[way] = {"ms": 1e3 * statistics.median(seconds[options.timed_steps // 2 :]), "peak_gib": peak}
        last = f", last loss {losses[way][-1]:.6f}" if way in losses else ""
        print(f"  {way}: {ways[way]['ms']:.1f} ms{last}", flush=True)
        del model_of, model, optimizer
        free(options.device)
    equal = all(losses[way] == losses["plain"] for way in WAYS)
    over = ways["fsdp2"]["ms"] / ways["plain"]["ms"] - 1
    gathered = ways[WAYS[3]]["ms"] / ways["fsdp2"]["ms"]
    row = {"equal": equal, "steps": options.steps, "layers": options.layers, "ways": ways, "last": losses["plain"][-1]}
    row |= {"fsdp2_over_plain": over, "fsdp2_over_plain_bf16": ways[BF16_WAYS[1]]["ms"] / ways[BF16_WAYS[0]]["ms"] - 1}
    fast = over <= 0.03 and gathered <= 1.0
    return row | {"gather_of_fsdp2": gathered, "ok": equal and (fast or not options.timed)}


def stream_losses(options: Options) -> None:
    """In a process of its own: train under FSDP2 with FP8 gather, and print a hash of all losses and weights."""
    model_of = prepared(options, options.recipe, options.small_layers, tokens=options.small_tokens)
    model = wrapped(model_of.model, WAYS[3])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=options.device == "cuda")
    with same_bits():
        losses, _ = train(model, model_of.inputs, options.stream_steps, options.device, optimizer)
    digest = hashlib.sha256(json.dumps(losses).encode())
    for parameter in model.parameters():
        digest.update(parameter.full_tensor().detach().cpu().view(torch.uint8).numpy().tobytes())  # type: ignore[attr-defined]
    print(json.dumps({"hash": digest.hexdigest(), "last": losses[-1]}), flush=True)


def streams(options: Options) -> Row:
    command = [sys.executable, __file__, *options.given, "--one", "streams"]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **extra})
        for extra in ({}, {"CUDA_LAUNCH_BLOCKING": "1"})
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a process ended with {[process.returncode for process in processes]}")
    answers = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    return {"ok": answers[0] == answers[1], "steps": options.stream_steps, "last": [a["last"] for a in answers]}


def shards(options: Options) -> Row:
    """Rows and scales of shards as `octavo.dist` quantises them, for the largest weight of a layer."""
    shape = LLAMAS[options.preset]
    rows, columns = shape["intermediate_size"], shape["hidden_size"]
    figures, ok = [], True
    for recipe in ("current", "block", "mx"):
        operand = FP8TrainingConfig.from_recipe(recipe).recipe.w
        state, scale = new_states(device=options.device), torch.ones((), device=options.device)
        for parts in (8, 64, 512):
            height = max(1, rows // parts)
            count = max(1, min(48, 2**28 // (2 * height * columns))) if options.device == "cuda" else 1
            xs = [torch.randn(height, columns, device=options.device, dtype=torch.bfloat16) for _ in range(count)]
            given = scale if operand.granularity == "tensor" else None
            calls = [partial(quantize_group, [x], state, operand, False, "rows", scale=given) for x in xs]
            seconds = device_time(calls, options.device)
            written = sum(t.nbytes for q in calls[0]() for t in q)
            copied = (xs[0].nbytes + written) / copy_bandwidth(options.device, xs[0].nbytes + written) / 1e12
            amax = device_time([partial(matrix_amax, x, by_column=False) for x in xs], options.device)
            share = copied / seconds
            row = {
                "recipe": recipe,
                "part": f"1/{parts}",
                "us": seconds * 1e6,
                "of_a_copy": share,
                "amax_us": amax * 1e6,
            }
            figures.append(row)
            ok &= share >= 0.8 or parts > 64
            print(f"  {recipe}, 1/{parts}: {row['us']:.1f} µs, {share:.0%} of a copy", flush=True)
    return {"ok": ok or not options.timed, "rows": figures}


class _Numbers:
    """A source of the exchange: as many maxima as an 8B has blocks."""

    label = "numbers"

    def __init__(self, count: int, device: str) -> None:
        self.maxima = torch.rand(count, device=device)

    def measure(self) -> Tensor:
        return self.maxima

    def take(self, maxima: Tensor) -> None:
        self.maxima = maxima

    def settle(self) -> None:
        pass


def amax(options: Options) -> Row:
    count = 426_000
    manager = FP8ScalingManager(device=options.device)
    for i in range(3 * 128):
        manager.register(f"layer.{i}")
    exchange = AmaxExchange(manager)
    exchange.shares_states = True
    exchange.sources.append(_Numbers(count, options.device))
    manager.exchange = exchange
    for _ in range(3):
        manager.step()
    reduced = partial(exchange.reduce, torch.stack(manager.states))
    if options.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        host, marks = [], []
        for _ in range(20):
            marks.append(_mark(options.device))
            start = time.perf_counter()
            reduced()
            host.append(time.perf_counter() - start)
            marks.append(_mark(options.device))
    finally:
        if options.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    device = statistics.median(_between(a, b) for a, b in zip(marks[::2], marks[1::2], strict=True))
    row = {"bytes": 4 * count, "host_ms": 1e3 * statistics.median(host), "device_ms": 1e3 * device}
    return row | {"ok": max(row["host_ms"], row["device_ms"]) < 0.2 or not options.timed}


def lora(options: Options) -> Row:
    """Steps of forward and backward, as the README times them: without an optimiser."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    ways: dict[str, Row] = {}
    for way in ("plain", "fsdp2", "fsdp2, BF16 policy"):
        model_of = prepared(options, "channel", options.lora_layers, mode="lora")
        if way != "plain":
            policy = {} if way == "fsdp2" else {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
            shard(model_of.model, decoder_layers(model_of.model.get_base_model()), **policy)
        try:
            marks, losses = [_mark(options.device)], []
            for _ in range(options.lora_steps):
                losses.append(model_of.step())
                model_of.forget_gradients()
                marks.append(_mark(options.device))
            last = losses[-1].item()
            seconds = [_between(a, b) for a, b in pairwise(marks)]
            middle = statistics.median(seconds[options.lora_steps // 2 :])
            ways[way] = {"ms": 1e3 * middle, "peak_gib": peak_gib(options.device), "last": last}
        except RuntimeError as error:
            ways[way] = {"error": str(error).strip().splitlines()[0][:300]}
        print(f"  {way}: {ways[way]}", flush=True)
        del model_of
        free(options.device)
    failed = [way for way, row in ways.items() if "error" in row]
    row = {"ways": ways, "layers": options.lora_layers, "failed": failed}
    if "plain" in failed or "fsdp2" in failed:
        return row | {"ok": False}
    speed = ways["plain"]["ms"] / ways["fsdp2"]["ms"]
    equal = ways["plain"]["last"] == ways["fsdp2"]["last"]
    return row | {"speed": speed, "equal": equal, "ok": not failed and (speed >= 0.97 or not options.timed)}


def graphs(options: Options) -> Row:
    """Adapters on a frozen base: losses from graphs against losses without, under DDP and without it."""
    if options.device != "cuda":
        return {"ok": True, "left_out": "CUDA graphs need a GPU"}
    from octavo.decoders.graphs import recordings

    losses, recorded = {}, []
    for name in ("plain", "ddp", "graphs", "graphs, ddp"):
        model_of = prepared(options, "channel", options.small_layers, mode="lora", tokens=options.small_tokens)
        if "graphs" in name:
            octavo.use_cuda_graphs(model_of.model)
        model = wrapped(model_of.model, name)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        with same_bits():
            losses[name] = train(model, model_of.inputs, options.graph_steps, options.device, optimizer)[0]
        if "graphs" in name:
            recorded.append(recordings(model_of.model))
        del model_of, model, optimizer
        free(options.device)
    apart = {name: max(abs(x - y) for x, y in zip(losses["plain"], each, strict=True)) for name, each in losses.items()}
    print(f"  {apart}", flush=True)
    row = {"apart": apart, "recordings": recorded, "steps": options.graph_steps}
    return {"ok": all(recorded) and not any(apart.values()), **row}


def float8(options: Options) -> Row:
    """Values must come back; gloo refuses float8, NCCL takes it as bytes."""
    found: dict[str, str] = {}
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu):
        sent = torch.arange(256, dtype=torch.uint8, device=options.device).view(dtype)
        received = torch.zeros(256, dtype=torch.uint8, device=options.device).view(dtype)
        for name, call in {
            "broadcast": lambda sent=sent, received=received: distributed.broadcast(received.copy_(sent), 0),
            "all_gather": partial(all_gather, received, sent),
        }.items():
            try:
                call()
                same = torch.equal(received.view(torch.uint8), sent.view(torch.uint8))
                found[f"{name} {dtype}"] = "equal" if same else "other values"
            except (RuntimeError, TypeError, ValueError) as error:
                found[f"{name} {dtype}"] = str(error).strip().splitlines()[0][:200]
    needed = [text for name, text in found.items() if "e8m0" not in name]  # scales of mx travel as bytes
    return {"ok": set(needed) == {"equal"} or options.device == "cpu", "found": found}


CHECKS: dict[str, Callable[[Options], Row]] = {
    "bits": bits,
    "streams": streams,
    "shards": shards,
    "amax": amax,
    "lora": lora,
    "graphs": graphs,
    "float8": float8,
}


def run(names: Sequence[str], options: Options) -> list[Row]:
    rows = []
    for name in names:
        start = time.perf_counter()
        print(f"{name} …", flush=True)
        try:
            row = CHECKS[name](options)
        except Exception as error:  # a check that cannot run has failed, and says so in its row
            traceback.print_exc()
            row = {"ok": False, "error": f"{type(error).__name__}: {str(error).strip()[:500]}"}
        free(options.device)
        rows.append({"check": name, "seconds": time.perf_counter() - start, **row})
        print(f"{name}: {'ok' if row['ok'] else 'FAILED'}, {rows[-1]['seconds']:.0f} s", flush=True)
    return rows


def read_options(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="8b", choices=list(LLAMAS))
    parser.add_argument("--recipe", default="delayed", help="of bits and streams")
    parser.add_argument("--checks", default=",".join(CHECKS), help=f"of {', '.join(CHECKS)}: several by commas")
    parser.add_argument("--quick", action="store_true", help="fewer steps and layers; times do not count")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=["streams"], help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args(arguments)
    unknown = [name for name in options.checks.split(",") if name not in CHECKS]
    if unknown:
        parser.error(f"--checks: {unknown[0]!r} is none of {', '.join(CHECKS)}")
    tiny, quick = options.preset == "tiny", options.quick or options.device == "cpu"
    options.timed = not quick
    options.steps, options.layers = (4, 1) if tiny else (10, 2) if quick else (50, 8)
    options.timed_steps = 4 if tiny else 16
    options.small_layers, options.small_tokens = (1, 64) if tiny else (2, 2048)
    options.stream_steps = 3 if tiny else 20 if quick else 200
    options.lora_layers, options.lora_steps = (1, 2) if tiny else (4, 6) if quick else (32, 12)
    options.graph_steps = 10 if quick else 100
    options.given = [a for a in arguments if a != "--one"]
    return options


def main(arguments: Sequence[str]) -> int:
    options = read_options(arguments)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which deterministic algorithms ask for
    with tempfile.TemporaryDirectory() as folder:
        if options.device == "cuda":
            torch.cuda.set_device(0)
        distributed.init_process_group(
            "nccl" if options.device == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        try:
            if options.one:
                stream_losses(options)
                return 0
            rows = run(options.checks.split(","), options)
        finally:
            distributed.destroy_process_group()
    if options.out:
        result = {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "command": without_folders(" ".join(["python", "benchmarks/one_rank.py", *arguments])),
            "device": device_name(options.device),
            "versions": versions(),
            "preset": options.preset,
            "quick": options.quick,
            "rows": rows,
        }
        write_json(options.out, result)
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
