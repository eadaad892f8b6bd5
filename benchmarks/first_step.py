"""Seconds of the first step after loading, nothing compiled by torch: with a cold kernel cache, and with a warm one.

    python benchmarks/first_step.py --preset 8b --out first-step.json

Each way (`full` with delayed scaling, `lora` on a base frozen per channel) runs in two processes, one after the other,
with caches of its own for Triton and for the driver: empty for the first process, as the first one left them for the
second. Random weights are made on the device and converted as when a model is loaded, which is timed as `loading` and
compiles the kernels that it needs itself. A step is forward and backward of 4 rows of 2,048 tokens, until the device is
done; the ones after it show what a step takes. The ways load side by side, but their steps run alone.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from octavo.tools.bench.contenders import Contender
from octavo.tools.bench.prepared_model import PreparedModel
from octavo.tools.bench.result import device_name, versions, without_folders
from octavo.tools.shapes import LLAMAS, make_case
from octavo.training.files import write_json

WAYS = {"full": "delayed", "lora": "channel"}  # and the recipe of each
STATES = ("cold", "warm")
STEPS = 4


def measure(way: str, preset: str, layers: int | None, device: str) -> None:
    """Load, say so, wait for a line, and time the steps."""
    case = make_case(
        preset=preset, config=None, layers=layers, tokens=None, seq=None, seed=0, device=device, force=True, mode=way
    )
    start = time.perf_counter()
    prepared = PreparedModel(case, Contender(f"octavo {WAYS[way]}", "octavo", compile=False, recipe=WAYS[way]))
    synchronize(device)
    loading = time.perf_counter() - start
    print(json.dumps({"loaded": way}), flush=True)
    sys.stdin.readline()
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = prepared.step().item()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        prepared.forget_gradients()
    row = {"way": way, "recipe": WAYS[way], "loading": loading, "first": seconds[0], "later": seconds[1:], "loss": loss}
    print(json.dumps(row), flush=True)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Process:
    """A process that has been told to load."""

    def __init__(self, way: str, caches: Path, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--one", way, "--preset", options.preset, "--device", options.device]
        command += ["--layers", str(options.layers)] if options.layers else []
        folder = caches / way
        environment = {"TRITON_CACHE_DIR": str(folder / "triton"), "CUDA_CACHE_PATH": str(folder / "driver")}
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        self._way = way
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )

    def answer(self) -> dict[str, Any]:
        """Return the next line of JSON; other libraries may print lines of their own."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        sys.exit(f"first_step.py: {self._way}: exit code {self._process.wait()}")

    def take_steps(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def run(ways: Sequence[str], state: str, caches: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each way. All load at once, and then take their steps one after the other."""
    processes: list[Process] = []
    try:
        processes = [Process(way, caches, options) for way in ways]
        for process in processes:
            process.answer()
        rows = []
        for process in processes:
            rows.append({"cache": state, **process.take_steps()})
            process.end()
            print(line(rows[-1]), flush=True)
        return rows
    finally:
        for process in processes:
            process.end()


def line(row: dict[str, Any]) -> str:
    later = ", ".join(f"{seconds:.3f}" for seconds in row["later"])
    return (
        f"{row['way']} ({row['recipe']}), {row['cache']} cache: first step {row['first']:.2f} s, later {later} s; "
        f"loading {row['loading']:.1f} s; loss {row['loss']:.4f}"
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="8b", choices=list(LLAMAS))
    parser.add_argument("--layers", type=int, help="instead of the preset's")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}: several by commas")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=list(WAYS), help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args(arguments)
    if options.one:
        measure(options.one, options.preset, options.layers, options.device)
        return
    ways = options.ways.split(",")
    for way in ways:
        if way not in WAYS:
            parser.error(f"--ways: {way!r} is none of {', '.join(WAYS)}")
    with tempfile.TemporaryDirectory() as name:
        rows = [row for state in STATES for row in run(ways, state, Path(name), options)]
    if options.out:
        result = {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "command": without_folders(" ".join(["python", "benchmarks/first_step.py", *arguments])),
            "device": device_name(options.device),
            "versions": versions(),
            "preset": options.preset,
            "rows": rows,
        }
        write_json(options.out, result)


if __name__ == "__main__":
    main(sys.argv[1:])
