"""`octavo train` on several ranks, as a launcher starts it: forked processes, or a real torchrun."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import commands
from commands import Command
from ranks import LIMIT, PRELOAD

commands._CONTEXT.set_forkserver_preload(PRELOAD)  # there is one such server, and `commands` has set its own list
TEXT = b"It was a bright cold day in April, and the clocks were striking thirteen.\n" * 60
# Dropout, stochastic rounding and micro-batches are on, so that every random state and every history matters.
OPTIONS = [
    *("--dim", "16", "--heads", "2", "--neurons", "32", "--layers", "2", "--dropout", "0.2", "--batch", "4"),
    *("--seq", "24", "--micro-batches", "2", "--warmup", "5", "--rounding", "nearest,nearest,stochastic"),
    *("--save-interval", "3", "--log-interval", "5", "--device", "cpu", "--evaluation-batches", "1"),
    *("--sample-bytes", "3"),
]


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


class Forked:
    """Ranks forked from a process that has imported torch: a fraction of a second each."""

    def __init__(self, world: int, *arguments: str, command: str = "train") -> None:
        common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        common["OMP_NUM_THREADS"] = "1"
        self._ranks = [
            Command(command, *arguments, environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(world)
        ]

    def running(self) -> bool:
        return all(rank.poll() is None for rank in self._ranks)

    def kill(self, rank: int) -> None:
        self._ranks[rank].kill()

    def send_signal(self, number: int, rank: int) -> None:
        self._ranks[rank].send_signal(number)

    def communicate(self, limit: float = LIMIT) -> tuple[list[int | None], list[str], list[str]]:
        """Wait for the end; exit codes, stdout and stderr of the ranks. Ranks that hang are killed, by SIGKILL."""
        deadline = time.monotonic() + limit
        while any(rank.poll() is None for rank in self._ranks) and deadline > time.monotonic():
            time.sleep(0.01)
        for rank in self._ranks:
            rank.kill()
        outputs = [rank.communicate() for rank in self._ranks]
        return [rank.returncode for rank in self._ranks], [out for out, _ in outputs], [err for _, err in outputs]


class TorchRun:
    """The ranks of a real `torchrun`, which stops the others where one has died."""

    def __init__(self, world: int, *arguments: str) -> None:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port", free_port()]
        self._process = subprocess.Popen(
            [sys.executable, *launcher, "-m", "octavo", "train", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self, rank: int) -> None:
        [child] = [c for c in self._children() if f"\0RANK={rank}\0" in Path(f"/proc/{c}/environ").read_text()]
        os.kill(child, signal.SIGKILL)

    def communicate(self) -> tuple[list[int | None], list[str], list[str]]:
        output, _ = self._process.communicate()
        return [self._process.returncode], [output], [output]

    def _children(self) -> list[int]:
        task = Path(f"/proc/{self._process.pid}/task")
        return [int(child) for thread in task.iterdir() for child in (thread / "children").read_text().split()]


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def curve(folder: Path) -> list[tuple[Any, ...]]:
    return [(row["step"], row["loss"], row["lr"], row["grad_norm"], row["skipped"]) for row in rows(folder)]


def newest(folder: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    steps = [int(path.name[11:]) for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()]
    return max(steps, default=0)


def kill_one(ranks: Any, folder: Path, moment: str, reached: int, choose: random.Random, world: int) -> dict[str, Any]:
    """kill -9 one rank: some milliseconds after row `reached` is there, or while a checkpoint is being written."""
    victim, delay = choose.randrange(world), choose.uniform(0, 0.03)
    reached, metrics = max(reached, newest(folder) + 1), folder / "metrics.jsonl"
    earlier = metrics.stat().st_ino if metrics.exists() else None  # a run that resumes replaces the file first
    while ranks.running():
        if metrics.exists() and metrics.stat().st_ino != earlier and len(rows(folder)) >= reached:
            break
        time.sleep(0.001)
    if moment == "saving":
        while not list(folder.glob("*.tmp")) and ranks.running():
            time.sleep(0.0002)
        delay /= 3  # a save of so small a model takes some ten milliseconds
    time.sleep(delay)
    before = newest(folder)
    ranks.kill(victim)
    codes, _, errors = ranks.communicate()
    left = [path.name for path in folder.glob("*.tmp")]
    return {"victim": victim, "moment": moment, "before": before, "codes": codes, "unfinished": left, "errors": errors}
