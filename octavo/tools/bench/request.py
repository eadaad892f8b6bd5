"""A checked request for a benchmark, and its run: measure, show, write, plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from octavo.numerics.checks import check_positive_int
from octavo.tools.bench.contenders import Contender
from octavo.tools.bench.gemm import bench_gemms
from octavo.tools.bench.kernels import bench_kernels
from octavo.tools.bench.plot import write_plot
from octavo.tools.bench.result import TIMED, check_out, describe, write_result
from octavo.tools.bench.rollout.runner import RolloutBench, run_rollout_bench
from octavo.tools.bench.runner import run_bench, run_workload_bench
from octavo.tools.bench.show import show
from octavo.tools.bench.workload import Workload
from octavo.tools.shapes import Case
from octavo.training.errors import RunError
from octavo.training.files import disk_errors

RESULTS = Path("benchmarks/results")
PARTS = ("gemm", "kernels")  # kinds without contenders


@dataclass(frozen=True)
class BenchRequest:
    """Request for a benchmark. `kind`: the whole `step`, or only `gemm` or `kernels`; other fields are for the step.

    `workload`: its batches; None if all have one length. It is run once, so it has no rounds.
    """

    kind: str
    case: Case
    contenders: Sequence[Contender]
    reasons: dict[str, str]
    rounds: int
    steps: int
    warmup: int
    workload: Workload | None = None

    def __post_init__(self) -> None:
        for name in ("rounds", "steps", "warmup"):
            check_positive_int(name, getattr(self, name))


def run_request(
    request: BenchRequest | RolloutBench, *, out: Path | None, command: Sequence[str], console: Console
) -> Path:
    """Measure, show and write; return the path of the result file.

    The file is `out`, or lies in the folder `out`; by default in a checkout's results, or in the current folder.
    """
    if out is None:
        out = RESULTS if RESULTS.is_dir() else Path()
    check_out(out)

    def say(text: str) -> None:
        console.print(Text(text, style="dim"), soft_wrap=True)

    result = describe(request.case, command, _measure(request, say))
    show(console, result)
    path = write_result(result, out)
    console.print(Text(f"Result: {path}", style="bold"), soft_wrap=True)
    if result["kind"] not in PARTS and not any(row["status"] == TIMED for row in result["rows"]):
        raise RunError(f"no contender was timed; {path} says why")
    if result["kind"] == "step":
        with disk_errors(path):
            console.print(Text(write_plot(result, path.with_suffix(".png"))), soft_wrap=True)
    return path


def _measure(request: BenchRequest | RolloutBench, say: Any) -> dict[str, Any]:
    if isinstance(request, RolloutBench):
        return run_rollout_bench(request, say)
    if request.kind == "gemm":
        return bench_gemms(request.case)
    if request.kind == "kernels":
        return bench_kernels(request.case)
    if request.workload is not None:
        return run_workload_bench(
            request.case,
            request.workload,
            request.contenders,
            request.reasons,
            steps=request.steps,
            warmup=request.warmup,
            say=say,
        )
    return run_bench(
        request.case,
        request.contenders,
        request.reasons,
        rounds=request.rounds,
        steps=request.steps,
        warmup=request.warmup,
        say=say,
    )
