"""kill -9 of a rank, in training and in saving, then a new start: the run ends as one that was left alone, bit for bit.

Two kills in the suite, on forked ranks; twenty under a real torchrun: `pytest -m slow -s` on this file
(`OCTAVO_KILLS` has another number). A second torchrun takes the place of `--max-restarts`: gloo's ranks seldom meet
again after a restart.
"""

import os
import random
import re
import time

import pytest
from runs import OPTIONS, TEXT, Forked, TorchRun, curve, kill_one, newest

KILLS = int(os.environ.get("OCTAVO_KILLS", "20"))


def kill_and_resume(tmp_path, start, kills, strategy, per_kill=5, world=2):
    """Kill `kills` times, resume each time, and compare with a run that was left alone."""
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT)
    steps = str(per_kill * (kills + 1))
    options = ["--data", str(text), "--steps", steps, "--strategy", strategy, *OPTIONS]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    codes, _, errors = start(world, "--out", str(whole), *options).communicate()
    assert not any(codes), errors
    seed = time.time_ns()
    choose = random.Random(seed)
    resume, before = ["--out", str(parts), *options], 0
    for kill in range(kills):
        ranks = start(world, *resume)
        reached = per_kill * kill + choose.randint(1, per_kill)
        done = kill_one(ranks, parts, "saving" if kill % 2 else "training", reached, choose, world)
        print(f"kill {kill + 1}: {done | {'errors': None}}, newest now {newest(parts)}")
        assert any(done["codes"]), f"the run had ended before it could be killed (seed {seed})"
        assert newest(parts) >= done["before"] >= before, "a checkpoint was lost"
        before = newest(parts)
        resume = ["--resume", "--out", str(parts)]
    codes, outputs, errors = start(world, *resume).communicate()
    assert not any(codes), errors
    resumed = re.search(r"Resuming after step (\d+)", outputs[0])
    assert int(resumed.group(1)) == before if before else resumed is None
    assert curve(parts) == curve(whole) and len(curve(whole)) == int(steps), f"seed {seed}"
    assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert not list(parts.glob("*.tmp"))


def test_killed_in_training_and_in_saving(tmp_path):
    kill_and_resume(tmp_path, Forked, 2, "fsdp2")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_killed_again_and_again_under_torchrun(tmp_path, strategy):
    kill_and_resume(tmp_path, TorchRun, KILLS // 2, strategy)
