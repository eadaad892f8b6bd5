"""Does FP8 train as well as BF16? The same runs in both, on real text, and their held-out losses side by side.

    python benchmarks/corpus.py                                          # once: the text
    python benchmarks/parity.py --budget-seconds 480 --out parity.json   # on the GPU
    python benchmarks/parity_summary.py parity.json --png parity.png     # the table and the curves

Two tasks: BDH 25M on bytes, every recipe, 1,000 steps; a Llama of the 1B shape (the layers of Llama 3.2 1B; the
vocabulary is that of the corpus's own tokenizer) with delayed, block and channel, 300 steps. `parity_runs.py` says what
one run is. Runs go in order of importance, and the file is written anew after each, so a machine that is taken away
costs one run. With `--budget-seconds` no run starts that would take longer than is left, judging by the last one of its
task, and one that turns out slower (an emulated recipe) is stopped as soon as that is known.
"""

import argparse
import datetime
import gc
import json
import platform
import re
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import DEFAULT, Corpus, byte_corpus, load_corpus
from parity_runs import BF16, FP8, LLAMA_1B, LLAMA_TINY, VARIANTS, Data, Task, split_run, train

from octavo.models.bdh import PRESETS
from octavo.optim import OPTIMIZERS
from octavo.training.files import write_json

ORDER = ("bf16", "delayed", "block", "channel", "bf16-noise1", "bf16-noise2", "current", "mx", "e5m2", *VARIANTS)
LLAMA_RECIPES = ("delayed", "block", "channel")
TASKS = {
    "bdh": Task("bdh", "byte", PRESETS["25m"], 1000, 8, 512, lr=1e-3, warmup=50, held_out_tokens=2**20),
    "llama": Task("llama", "token", LLAMA_1B, 300, 4, 2048, lr=3e-4, warmup=30, held_out_tokens=2**20),
}
TINY_BDH = {"dim": 32, "heads": 2, "neurons": 64, "layers": 2}
TINY = {
    "bdh": Task("bdh", "byte", TINY_BDH, 30, 4, 32, lr=3e-3, warmup=3, held_out_tokens=2048),
    "llama": Task("llama", "token", LLAMA_TINY, 30, 4, 32, lr=3e-3, warmup=3, held_out_tokens=2048),
}


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<date>-<gpu>-parity.json")
    parser.add_argument("--corpus", type=Path, default=DEFAULT)
    parser.add_argument("--only", choices=tuple(TASKS), help="one of the two tasks")
    parser.add_argument(
        "--recipes",
        help=f"comma-separated, of {', '.join(('bf16', *FP8))}, with another optimiser as in bf16+adamw4bit, with "
        "another seed as in bf16-seed1; default: see above",
    )
    parser.add_argument("--size", choices=tuple(PRESETS), default="25m", help="of BDH (default: 25m)")
    parser.add_argument("--bf16-runs", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--steps", type=int, help="instead of the task's")
    parser.add_argument("--batch", type=int, help="sequences in a step, instead of the task's")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"))
    parser.add_argument("--resume", action="store_true", help="keep the complete runs that --out already holds")
    parser.add_argument("--shared-gpu", action="store_true", help="note that another process slows the steps down")
    parser.add_argument("--compile", dest="backend", help="torch.compile backend, or none; default: inductor on cuda")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes and text, to try the script itself")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device here; to try the script: --tiny --device cpu")
    options.recipes = options.recipes.split(",") if options.recipes else None
    for recipe in options.recipes or ():
        name, optimizer, _ = split_run(re.sub(r"-seed(?![1-9]$)", "-", recipe))
        if name not in ("bf16", *FP8):
            parser.error(f"--recipes: {recipe!r} is none of bf16, {', '.join(FP8)}")
        if optimizer not in OPTIMIZERS:
            parser.error(f"--recipes: {recipe!r}: its optimiser is none of {', '.join(OPTIMIZERS)}")
    if options.backend is None:
        options.backend = "inductor" if options.device.startswith("cuda") else "none"
    return options


def plan(options: argparse.Namespace) -> list[tuple[Task, str]]:
    """Return every run to do, the most important first."""
    tasks = []
    for task in (TINY if options.tiny else TASKS).values():
        if options.only in (None, task.name):
            changes: dict[str, Any] = {"steps": options.steps, "batch": options.batch}
            if task.name == "bdh" and not options.tiny:
                changes["shape"] = PRESETS[options.size]
            task = replace(task, **{name: value for name, value in changes.items() if value})
            tasks.append(replace(task, warmup=min(task.warmup, task.steps // 3)))

    def wanted(task: Task, run: str) -> bool:
        if run in BF16:
            return run in BF16[: options.bf16_runs] and (options.recipes is None or "bf16" in options.recipes)
        if options.recipes is not None:
            return run in options.recipes
        return run not in VARIANTS and (task.name == "bdh" or run in LLAMA_RECIPES)

    seeded = [run for run in options.recipes or () if "-seed" in run or "+" in run]
    return [(task, run) for run in ORDER for task in tasks if wanted(task, run)] + [
        (task, run) for run in seeded for task in tasks
    ]


def put_data(task: Task, corpus: Corpus, device: torch.device) -> tuple[Task, Data]:
    """Return the task and its text on the device; Llama's shape gets the vocabulary of the corpus."""
    if task.unit == "byte":
        return task, Data.put(corpus.as_bytes(corpus.train), corpus.as_bytes(corpus.held_out), device)
    shape = task.shape | {"vocab_size": len(corpus.spellings), "max_position_embeddings": task.sequence}
    return replace(task, shape=shape), Data.put(corpus.train, corpus.held_out, device)


def machine_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def read_earlier(path: Path, tasks: dict[str, Any], gpu: str, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the complete runs of an earlier session of the same experiment on the same kind of machine."""
    if not path.exists():
        return []
    earlier = json.loads(path.read_text())
    changed = [name for name, settings in tasks.items() if earlier["tasks"].get(name, settings) != settings]
    changed += [name for name, value in (("gpu", gpu), ("corpus", about)) if earlier[name] != value]
    if changed:
        raise SystemExit(f"--resume: {path} was made with another {' and '.join(changed)}; use another --out")
    tasks.update({name: settings for name, settings in earlier["tasks"].items() if name not in tasks})
    return [run for run in earlier["runs"] if run["status"] == "complete"]


def main(arguments: list[str] | None = None) -> Path:
    began = time.perf_counter()
    options = read_options(arguments)
    device = torch.device(options.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    # Sixteen layers may mean sixteen graphs; at the default limit of 8 dynamo quietly goes on uncompiled.
    torch._dynamo.config.recompile_limit = 64
    here = Path(__file__).parent
    corpus = byte_corpus(sorted(here.glob("*.py"))) if options.tiny else load_corpus(options.corpus)
    todo = plan(options)
    ready = {task.name: put_data(task, corpus, device) for task, _ in todo}

    gpu = machine_name(device)
    out = options.out or here / "results" / f"{datetime.date.today()}-{gpu.split()[-1].lower()}-parity.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    tasks = {name: asdict(task) for name, (task, _) in ready.items()}
    runs = read_earlier(out, tasks, gpu, corpus.about) if options.resume else []
    record: dict[str, Any] = {
        "date": str(datetime.date.today()),
        "gpu": gpu,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "command": ["parity.py", *(sys.argv[1:] if arguments is None else arguments)],
        "shared_gpu": options.shared_gpu,
        "corpus": corpus.about,
        "tasks": tasks,
        "runs": runs,
        "not_run": [],
    }
    print(f"{gpu}: {len(todo)} runs, set up in {time.perf_counter() - began:.0f} s → {out}", flush=True)

    done = {(run["task"], run["run"]) for run in runs}
    last = dict.fromkeys(ready, 0.0)
    for task, run in todo:
        if (task.name, run) in done:
            continue
        left = began + options.budget_seconds - time.perf_counter()
        if left < last[task.name] or left <= 0:
            record["not_run"].append(f"{task.name} {run}")
            print(f"{task.name} {run}: not started, {left:.0f} s left", flush=True)
        else:
            backend = None if options.backend == "none" else options.backend
            result = run_safely(*ready[task.name], run, device, backend, began + options.budget_seconds)
            runs.append(result)
            if result["status"] == "complete":
                last[task.name] = result["seconds"]
        write_json(out, record)
    print(f"{time.perf_counter() - began:.0f} s in all")
    return out


def run_safely(
    task: Task, data: Data, run: str, device: torch.device, backend: str | None, deadline: float
) -> dict[str, Any]:
    """Run once; an error is the result of its run, and the next run starts afresh."""
    began = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    counters = torch._dynamo.utils.counters
    counters.clear()
    try:
        result = train(task, run, data, device=device, compile_backend=backend, deadline=deadline)
    except Exception as error:
        traceback.print_exc(limit=-3)
        message = f"{type(error).__name__}: {str(error)[:500]}"
        result = {"task": task.name, "run": run, "status": "error", "error": message}
        result["seconds"] = time.perf_counter() - began
    result["graphs"] = counters["stats"].get("unique_graphs", 0)
    result["graph_breaks"] = sum(counters["graph_break"].values())
    torch.compiler.reset()  # graphs of one recipe must not serve the next
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    loss = result.get("held_out_loss")
    said = "" if loss is None else f", held-out loss {loss:.4f}, {result.get('ms_per_step', 0):.1f} ms a step"
    print(f"{task.name} {run}: {result['status']}{said}, {result['seconds']:.0f} s", flush=True)
    return result


if __name__ == "__main__":
    main()
