"""kill -9 at random moments of a run through the real command: resumed each time, its curve is that of one left alone.

Three kills in the suite; more with `OCTAVO_KILLS=10 pytest tests/training/test_kill_and_resume.py`. Dropout, stochastic
rounding and micro-batches are on, so that every random state and every history matters.
"""

import json
import os
import random
import signal
import time
from pathlib import Path

from commands import Command

KILLS = int(os.environ.get("OCTAVO_KILLS", "3"))
STEPS = 12 * (KILLS + 1)
OPTIONS = [
    *("--dim", "16", "--heads", "2", "--neurons", "32", "--layers", "2", "--dropout", "0.2"),
    *("--batch", "2", "--seq", "24", "--micro-batches", "2", "--steps", str(STEPS), "--warmup", "5"),
    *("--rounding", "nearest,nearest,stochastic", "--save-interval", "4", "--log-interval", "5", "--device", "cpu"),
    *("--evaluation-batches", "1", "--sample-bytes", "3"),
]


def start(folder: Path, *options: str) -> Command:
    return Command("train", "--out", str(folder), *options)


def finish(process: Command) -> None:
    _, error = process.communicate()
    assert process.returncode == 0, error


def lines(folder: Path) -> list[bytes]:
    path = folder / "metrics.jsonl"
    return path.read_bytes().splitlines() if path.exists() else []


def curve(folder: Path) -> list[tuple[float, ...]]:
    return [(row["step"], row["loss"], row["lr"], row["grad_norm"]) for row in map(json.loads, lines(folder))]


def kill_after(process: Command, folder: Path, rows: int, delay: float) -> None:
    """kill -9 once `rows` rows are there, and a moment later: within a step, or within a save."""
    while len(lines(folder)) < rows and process.poll() is None:
        time.sleep(0.001)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_killed_again_and_again(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"It was a bright cold day in April, and the clocks were striking thirteen.\n" * 60)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finish(start(whole, "--data", str(text), *OPTIONS))

    choose = random.Random(time.time_ns())
    for kill in range(KILLS):
        process = start(parts, "--data", str(text), *OPTIONS) if kill == 0 else start(parts, "--resume")
        reached, delay = 12 * kill + choose.randint(6, 12), choose.uniform(0, 0.05)
        kill_after(process, parts, reached, delay)
        print(f"kill {kill + 1}: asked for row {reached}, found {len(lines(parts))}, {delay * 1000:.0f} ms later")
    finish(start(parts, "--resume"))

    assert curve(parts) == curve(whole) and len(curve(whole)) == STEPS
    assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
