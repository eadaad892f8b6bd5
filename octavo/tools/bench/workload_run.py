"""A contender's run through the batches of a workload: forward and backward by hand, or by the stock Trainer.

The first few steps are a warm-up: code is compiled, kernels are chosen. Then every step counts, whatever its length.
"""

import math
import time
from typing import Any

import torch

from octavo.tools.bench.contenders import Contender
from octavo.tools.bench.prepared_model import PreparedModel
from octavo.tools.bench.timing import StepClock
from octavo.tools.bench.workload import TRAINERS, Batch, Workload, make_batches
from octavo.tools.shapes import Case

LAST = 3  # steps whose mean loss is reported


def run_workload(case: Case, contender: Contender, workload: Workload, *, warmup: int, steps: int) -> dict[str, Any]:
    """Return the seconds of each step after the warm-up, memory and the loss of the last steps, ready for JSON."""
    prepared = PreparedModel(case, contender, workload=workload)
    clock = StepClock(case.device)
    start = time.perf_counter()
    if workload.name in TRAINERS:
        from octavo.tools.bench.trainer_run import train

        loss = train(prepared, contender, workload, clock, warmup=warmup, steps=steps, last=LAST)
    else:
        loss = _run_by_hand(prepared, make_batches(case, workload, warmup + steps), clock, warmup)
    if not math.isfinite(loss):
        raise FloatingPointError(f"loss {loss} in the last steps: they are not correct ones")
    times = clock.seconds()
    return {
        "summary": prepared.summary,
        "times": times,
        "whole_s": time.perf_counter() - start,
        "peak_bytes": clock.peak_bytes(),
        "loss": loss,
        "padded_calls": prepared.padded_calls,
    }


def _run_by_hand(prepared: PreparedModel, batches: list[Batch], clock: StepClock, warmup: int) -> float:
    """Run forward and backward for each batch; return the mean loss of the last ones."""
    device = prepared.case.device
    if device == "cuda":
        batches = [batch.pinned() for batch in batches]
    for batch in batches[:warmup]:
        prepared.step(batch.to(device))
        prepared.forget_gradients()
    clock.start()
    losses = []
    for batch in batches[warmup:]:
        losses.append(prepared.step(batch.to(device)))
        prepared.forget_gradients()
        clock.mark()
    return torch.stack(losses[-LAST:]).mean().item()
