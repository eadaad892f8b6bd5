"""Figures of a run through a workload. Speed is real tokens a second over all steps, also those with new lengths."""

import statistics
from collections.abc import Sequence
from typing import Any

from octavo.tools.bench.contenders import BASELINE, OWN_BASELINE
from octavo.tools.bench.result import TIMED, baseline_of, model_title
from octavo.tools.bench.workload import TRAINERS, Batch

GIB = 2**30
HUGGING_FACE = ("bf16-eager", BASELINE)
BASELINES = (*HUGGING_FACE, OWN_BASELINE, "peft")
FASTER = "bf16"  # the faster of Hugging Face's two
SETTLED = 3  # steps after which the slowest is looked for


def describe_batches(batches: Sequence[Batch], warmup: int) -> dict[str, Any]:
    """Return the real tokens, the share of padding and the number of new lengths in the timed steps."""
    shapes = [tuple(batch.inputs["input_ids"].shape) for batch in batches]
    timed = batches[warmup:]
    tokens, size = sum(batch.tokens for batch in timed), sum(batch.size for batch in timed)
    return {
        "tokens": tokens,
        "padding": 1 - tokens / size,
        "batches": [list(shape) for shape in shapes[warmup:]],
        "real_tokens": [batch.tokens for batch in timed],
        "new_lengths": len(set(shapes)) - len(set(shapes[:warmup])),
    }


def add_workload_figures(rows: Sequence[dict[str, Any]], tokens: Sequence[int]) -> None:
    """Add the figures of every row that was timed. `tokens`: the real ones of each step.

    `slowest_per_token`: the largest time for a token among the steps of `slowest_s`, over the median of all steps; one
    that is slow for another reason than its length stands out here.
    """
    timed = [row for row in rows if row["status"] == TIMED]
    for row in timed:
        (turn,) = row["turns"]
        times = turn["times"]
        per_token = [seconds / count for seconds, count in zip(times, tokens, strict=True)]
        row["figures"] = {
            "tokens_per_s": sum(tokens) / sum(times),
            "total_s": sum(times),
            "whole_s": turn["whole_s"],  # with the warm-up
            "step_s": statistics.median(times),
            "slowest_s": max(times[SETTLED:] or times),
            "slowest_per_token": max(per_token[SETTLED:] or per_token) / statistics.median(per_token),
            "peak_gib": None if turn["peak_bytes"] is None else turn["peak_bytes"] / GIB,
            "loss": turn["loss"],
        }
    for row in timed:
        bases = {name: baseline_of(timed, name, row) for name in BASELINES}
        best = [base for name in HUGGING_FACE if (base := bases[name])]
        bases[FASTER] = max(best, key=lambda base: float(base["tokens_per_s"])) if best else None
        mine = row["figures"]
        for name, base in bases.items():
            mine[f"speedup_{name}"] = base and mine["tokens_per_s"] / base["tokens_per_s"]
            mine[f"memory_{name}"] = base and base["peak_gib"] and mine["peak_gib"] / base["peak_gib"]


def workload_title(result: dict[str, Any]) -> str:
    """Return a title for the result of a workload."""
    case, workload = result["case"], result["workload"]
    rows = case["tokens"] // case["seq"]
    batches = {
        "padded": f"{rows} rows padded to the longest",
        "packed": f"{rows} rows of {case['seq']:,} packed into one",
        "trainer": f"stock Trainer, {rows} rows padded to the longest",
        "sft": f"TRL's SFTTrainer, {rows} rows padded to the longest",
    }[workload["name"]]
    return (
        f"{model_title(case)}, {batches}, {workload['lengths']} lengths up to {case['seq']:,}, "
        f"{workload['padding']:.0%} padding, {workload['new_lengths']} new shapes in {result['steps']} steps"
    )


def steps_title(result: dict[str, Any]) -> str:
    """Return what a step of the result consists of."""
    if result["kind"] in TRAINERS or any(row.get("optimizer") for row in result["rows"]):
        return "forward + backward + optimiser"
    return "forward + backward"
