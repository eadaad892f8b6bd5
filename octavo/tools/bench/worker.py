"""A contender in its own process: `python -m octavo.tools.bench.worker`, driven by JSON lines.

The first line is `{"case": …, "contender": …, "workload": …}`, the last of them null for batches of one length; every
further line asks for something and gets one line back:

    {"do": "start"}                 import, and compile a decoder layer (all workers at once)
    {"do": "check"}                 loss and gradient against BF16
    {"do": "load", "warmup": 3}     the whole model, and its first steps
    {"do": "time", "steps": 5}      timed steps; before and after, the model's memory is freed
    {"do": "run", "warmup": 3, "steps": 24}   instead of the last two: the batches of a workload, once

An answer with `error` is the last: the worker then leaves. It also leaves when its input ends, so a parent that was
killed leaves nothing behind. What libraries print goes to stderr: the real stdout carries answers only.
"""

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

import torch

from octavo.numerics import FP8ScalingManager
from octavo.tools.bench.check import check
from octavo.tools.bench.contenders import Contender
from octavo.tools.bench.prepared_model import PreparedModel
from octavo.tools.bench.timing import time_each
from octavo.tools.bench.workload import Workload
from octavo.tools.bench.workload_run import run_workload
from octavo.tools.shapes import Case

GIB = 2**30


class Worker:
    """State of a worker between two requests."""

    def __init__(self, case: Case, contender: Contender, workload: Workload | None = None) -> None:
        self.case, self.contender, self.workload = case, contender, workload
        self.prepared: PreparedModel | None = None
        self._kept: list[PreparedModel] = []  # compiled code is dropped with the model it was first made for

    def start(self) -> dict[str, Any]:
        # One layer: all workers are on the GPU at once, and the other layers share its code. With adapters, two:
        # the first layer's input needs no gradient, so it has code of its own.
        contender = self.contender.without_optimizer
        layers = min(2 if self.case.rank else 1, self.case.layers)
        prepared = PreparedModel(self.case, contender, layers, self.workload)
        prepared.warm_layers()
        prepared.drop()
        self._kept.append(prepared)
        return {}

    def check(self) -> dict[str, Any]:
        comparison, prepared = check(self.case, self.contender.without_optimizer, self.workload)
        prepared.drop()
        self._kept.append(prepared)
        return comparison

    def load(self, warmup: int) -> dict[str, Any]:
        start = time.perf_counter()
        self.prepared = PreparedModel(self.case, self.contender)
        for _ in range(warmup):
            self.prepared.forget_gradients()
            self.prepared.step()
        self._synchronize()
        self.prepared.check_recorded()
        self.prepared.park()
        return {"summary": self.prepared.summary, "seconds": time.perf_counter() - start}

    def time(self, steps: int) -> dict[str, Any]:
        prepared = self.prepared
        assert prepared is not None
        prepared.unpark()
        for _ in range(prepared.untimed_steps):
            prepared.step()
            prepared.forget_gradients()
        prepared.check_recorded()
        losses: list[torch.Tensor] = []
        if self.case.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        times = time_each(
            lambda: losses.append(prepared.step()), steps, self.case.device, before=prepared.forget_gradients
        )
        loss = losses[-1].item()
        if not math.isfinite(loss):
            raise FloatingPointError(f"loss {loss} while timed: the step is not a correct one")
        on_gpu = self.case.device == "cuda"
        peak = (torch.cuda.max_memory_allocated() + prepared.reserved_bytes) / GIB if on_gpu else None
        answer = {
            "times": times,
            "peak_gib": peak,
            "loss": loss,
            "scaling": scaling_rates(prepared.scaling),
        }
        prepared.park()
        return answer

    def run(self, warmup: int, steps: int) -> dict[str, Any]:
        assert self.workload is not None
        return run_workload(self.case, self.contender, self.workload, warmup=warmup, steps=steps)

    def _synchronize(self) -> None:
        if self.case.device == "cuda":
            torch.cuda.synchronize()


def scaling_rates(scaling: FP8ScalingManager | None) -> dict[str, dict[str, float]]:
    """Return underflow and saturation, mean and maximum over tensors, by operand (the last part of a tensor's name)."""
    if scaling is None:
        return {}
    by_operand: dict[str, list[dict[str, float]]] = {}
    for name, row in scaling.statistics().items():
        by_operand.setdefault(name.rsplit(".", 1)[-1], []).append(row)
    shares = {}
    for operand, rows in by_operand.items():
        shares[operand] = {"tensors": float(len(rows))}
        for rate in ("underflow", "saturated"):
            values = [row[rate] for row in rows]
            shares[operand] |= {f"{rate}_mean": sum(values) / len(values), f"{rate}_max": max(values)}
    return shares


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests for a contender of a training step."""
    setup = json.loads(requests.readline())
    workload = Workload(**setup["workload"]) if setup.get("workload") else None
    worker = Worker(Case.from_dict(setup["case"]), Contender(**setup["contender"]), workload)
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "start": worker.start,
        "check": worker.check,
        "load": worker.load,
        "time": worker.time,
        "run": worker.run,
    }
    answer_requests(commands, requests, answers)


def answer_requests(commands: dict[str, Callable[..., dict[str, Any]]], requests: TextIO, answers: TextIO) -> None:
    """Answer requests until the input ends or something fails."""
    for line in iter(requests.readline, ""):
        request = json.loads(line)
        try:
            answer = commands[request.pop("do")](**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": in_one_line(error)}
        print(json.dumps(answer), file=answers, flush=True)
        if "error" in answer:
            return


def in_one_line(error: BaseException) -> str:
    """Return the root cause of an error, which compilers wrap in several of their own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[0][:300]


def serve_parent(serve: Callable[[TextIO, TextIO], None]) -> None:
    """Serve the process that has started this one."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, answers)


if __name__ == "__main__":
    serve_parent(serve)
