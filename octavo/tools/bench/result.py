"""Figures of a row from the workers' answers, and the dated file that keeps them.

The file names the device, the versions and the command, and neither the host nor any folder of it.
"""

import datetime
import re
import statistics
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from octavo.tools.bench.contenders import BASELINE, OWN_BASELINE, Contender
from octavo.tools.shapes import FLOPS_FORMULA, LORA_FLOPS_FORMULA, Case, usual_tokens
from octavo.training.errors import UserError
from octavo.training.files import disk_errors, write_json

# Status of a contender.
TIMED, WRONG, FAILED, NOT_RUN = "timed", "wrong", "failed", "not run"
VERSION = 1
_PACKAGES = ("triton", "transformers", "peft", "torchao", "transformer_engine", "unsloth")
_FOLDERS = re.compile(r"(?<![\w.])~?/(?:[^\s/'\",:=]+/)+")


def new_row(contender: Contender) -> dict[str, Any]:
    return {**contender.to_dict(), "status": TIMED, "reason": "", "check": None, "summary": "", "turns": []}


def missing_row(name: str, reason: str) -> dict[str, Any]:
    return {"name": name, "status": NOT_RUN, "reason": reason}


def fail_row(row: dict[str, Any], status: str, reason: str) -> None:
    """Drop the figures of a row that failed, even those timed before: half a measurement is none."""
    row.update(status=status, reason=without_folders(reason), turns=[])


def add_figures(rows: Sequence[dict[str, Any]], case: Case, ceilings: dict[str, Any]) -> None:
    """Add the figures of every row that was timed, from its turns."""
    timed = [row for row in rows if row["status"] == TIMED]
    for row in timed:
        times = [seconds for turn in row["turns"] for seconds in turn["times"]]
        median = statistics.median(times)
        peaks = [turn["peak_gib"] for turn in row["turns"]]
        floor = _floor_seconds(row, case, ceilings)
        row["figures"] = {
            "step_s": median,
            "fastest_s": min(times),
            "slowest_s": max(times),
            "quartiles_s": statistics.quantiles(times, n=4)[::2] if len(times) > 1 else [median, median],
            "tokens_per_s": case.tokens / median,
            "tflops": case.flops / median / 1e12,
            "peak_gib": None if None in peaks else max(peaks),
            "gemm_floor_s": floor,
            "gemm_floor_share": None if floor is None else floor / median,
            "scaling": row["turns"][-1]["scaling"],
        }
    for row in timed:
        for baseline in (BASELINE, OWN_BASELINE):
            base, mine = baseline_of(timed, baseline, row), row["figures"]
            mine[f"speedup_{baseline}"] = base and base["step_s"] / mine["step_s"]
            mine[f"memory_{baseline}"] = base and base["peak_gib"] and mine["peak_gib"] / base["peak_gib"]


def baseline_of(timed: Sequence[dict[str, Any]], baseline: str, row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the figures to compare with; of our own baseline, those with the same optimiser."""
    own = f"{OWN_BASELINE} {row['optimizer']}" if row["optimizer"] else OWN_BASELINE
    name = own if baseline == OWN_BASELINE else baseline
    return next((other["figures"] for other in timed if other["name"] == name), None)


def _floor_seconds(row: dict[str, Any], case: Case, ceilings: dict[str, Any]) -> float | None:
    """Return the time that the GEMMs alone would take at the ceilings of this run."""
    contender = Contender(**{name: row[name] for name in Contender.__dataclass_fields__})
    seconds = 0.0
    for precision, flops in case.gemm_flops(contender.fp8_products, contender.fp8_head).items():
        if flops and ceilings[precision] is None:
            return None
        seconds += flops / ceilings[precision] / 1e12 if flops else 0.0
    return seconds


def describe(case: Case, command: Sequence[str], measured: dict[str, Any]) -> dict[str, Any]:
    """Return `measured` (kind, rows, …) with everything a reader needs to judge and repeat it."""
    flops = {"flops": case.flops, "flops_formula": LORA_FLOPS_FORMULA if case.frozen else FLOPS_FORMULA}
    return {
        "octavo_bench": VERSION,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": without_folders(" ".join(command)),
        "device": device_name(case.device),
        "versions": versions(),
        "case": case.to_dict(),
        "parameters": case.parameters,
        "matmul_parameters": case.matmul_parameters,
        **({} if measured.keys() & {"workload", "rollout"} else flops),  # the formula is of steps with full batches
        **measured,
    }


def title(case: dict[str, Any]) -> str:
    """Return a title for the case."""
    return f"{model_title(case)}, {case['tokens']:,} tokens a step (seq {case['seq']:,})"


def model_title(case: dict[str, Any]) -> str:
    """Return a title for the model of the case."""
    lora = ""
    if case.get("frozen"):
        linears = {"all": "every linear", "attention": "q, k, v and o", "mlp": "gate, up and down"}[case["targets"]]
        lora = f", LoRA of rank {case['rank']} on {linears}" if case["rank"] else ", frozen, no adapters"
    return f"{case['name']}, {case['layers']} layers{lora}"


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def versions() -> dict[str, str]:
    packages = {"octavo": _octavo_version(), "torch": torch.__version__}
    if torch.version.cuda:
        packages["cuda"] = torch.version.cuda
    for package in _PACKAGES:
        try:
            packages[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # its row, if any, gives the reason
    return packages


def _octavo_version() -> str:
    """Return the version, and the commit if the package is used from a checkout."""
    try:
        version = metadata.version("octavo")
    except metadata.PackageNotFoundError:
        version = "not installed"
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return version
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return version
    return f"{version}+{described.stdout.strip()}" if described.returncode == 0 else version


def without_folders(text: str) -> str:
    """Shorten absolute paths to their last part."""
    return _FOLDERS.sub("", text)


def check_out(out: Path) -> None:
    """Check, before anything is measured, that `out` is a folder or the name of a new file."""
    if out.suffix == ".json" and not out.is_dir():
        if out.exists():
            raise UserError(f"--out {out}: that file exists; give another name, or a folder")
        return
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: neither a folder nor the name of a .json file")


def write_result(result: dict[str, Any], out: Path) -> Path:
    """Write the result to `out` if it names a `.json` file, else to a new file in the folder `out`.

    New files are named after date, device, model, LoRA, tokens if unusual, and workload; existing ones are kept.
    """
    check_out(out)
    if out.suffix == ".json" and not out.is_dir():
        with disk_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, result)
        return out
    case = result["case"]
    device = re.sub(r"[^a-z0-9]+", "-", result["device"].lower().removeprefix("nvidia ")).strip("-")
    words = [result["date"], device, case["name"], f"{case['layers']}l"]
    if case["frozen"]:
        words += [f"lora{case['rank']}", *([case["targets"]] if case["targets"] != "all" else [])]
    words += [f"{case['tokens']}t"] if case["tokens"] != usual_tokens(case["name"]) else []
    words += ["optimizer"] if any(row.get("optimizer") for row in result["rows"]) else []
    words += [result["kind"]] if result["kind"] != "step" else []
    words += [result["workload"]["lengths"]] if "workload" in result else []
    stem = "-".join(words)
    names = [stem, *(f"{stem}-{i}" for i in range(2, 1000))]
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    path = next(path for name in names if not (path := out / f"{name}.json").exists())
    write_json(path, result)
    return path
