"""`octavo train` and `octavo sft` on two ranks: one run, shared; files and words of rank 0 alone; stops and resumes."""

import json
import signal
import time
from contextlib import nullcontext

import pytest
import torch
from runs import OPTIONS, TEXT, Forked, curve, newest, rows

from octavo.training.data import get_batch, get_share
from octavo.training.settings import settings_from_options
from octavo.training.several_ranks import agree_on_stops
from octavo.training.shares import own_micro_batches
from octavo.training.signals import Interrupted, StopSignals


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return str(path)


def train(world, folder, *options):
    codes, outputs, errors = Forked(world, "--out", str(folder), *options).communicate()
    assert not any(codes), errors
    return outputs, errors


def losses(folder):
    return [row["loss"] for row in rows(folder)]


@pytest.mark.parametrize(("batch", "micro_batches", "ranks"), [(4, 2, 1), (4, 2, 2), (4, 2, 4), (3, 4, 6), (2, 3, 3)])
def test_ranks_share_the_sequences_of_a_step(batch, micro_batches, ranks):
    tokens = torch.arange(251, dtype=torch.uint8)
    how = {"seed": 3, "step": 5, "batch": batch, "sequence": 7}
    whole = [get_batch(tokens, micro_batch=i, **how) for i in range(micro_batches)]
    shares = [get_share(tokens, micro_batches=micro_batches, rank=r, ranks=ranks, **how) for r in range(ranks)]
    for part in range(2):
        assert torch.equal(torch.cat([half[part] for half in whole]), torch.cat([share[part] for share in shares]))
        assert len({len(share[part]) for share in shares}) == 1
    own = own_micro_batches(batch, micro_batches, ranks)
    assert len(shares[0][0]) % own == 0 and len(shares[0][0]) // own <= batch
    assert own == micro_batches if ranks == 1 else own <= micro_batches


def test_a_step_that_cannot_be_shared_is_refused():
    with pytest.raises(
        ValueError, match="batch=3: the 3 of a step cannot be shared equally by 2 ranks; give --batch a"
    ):
        settings_from_options({"device": "cpu", "batch": 3, "ranks": 2})
    assert settings_from_options({"device": "cpu", "batch": 3, "micro_batches": 2, "ranks": 2}).own_micro_batches == 1


def test_two_ranks_are_one_run(tmp_path, text):
    """DDP and FSDP2 agree to the bit; with FP32 products, so does one process, up to the order of sums."""
    options = ["--data", text, "--steps", "6", *OPTIONS]
    outputs, errors = train(2, tmp_path / "ddp", *options, "--compare")
    assert "Ranks: 2 by ddp, each with 1 × 4 × 24 bytes of a step" in outputs[0] and "step     6" in outputs[0]
    assert outputs[1] == "" and not any("octavo:" in error for error in errors)
    train(2, tmp_path / "fsdp2", *options, "--strategy", "fsdp2")
    assert losses(tmp_path / "ddp") == losses(tmp_path / "fsdp2")
    norms = [[row["grad_norm"] for row in rows(tmp_path / name)] for name in ("ddp", "fsdp2")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)  # the squares of shards are added in another order
    assert max(norms[0]) < 1  # and nothing is clipped by them
    model = (tmp_path / "ddp" / "model.safetensors").read_bytes()
    assert model == (tmp_path / "fsdp2" / "model.safetensors").read_bytes()
    summary = json.loads((tmp_path / "ddp" / "summary.json").read_text())
    assert set(summary) == {"fp8", "bf16"} and (tmp_path / "ddp" / "report.html").exists()
    assert len(list((tmp_path / "ddp" / "bf16").glob("checkpoint-*"))) == 2

    exact = [*options, "--precision", "fp32", "--dropout", "0"]
    exact = exact[: exact.index("--rounding")] + exact[exact.index("--rounding") + 2 :]
    train(2, tmp_path / "two", *exact)
    train(1, tmp_path / "one", *exact)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=2e-6)


def test_a_run_moves_between_numbers_of_ranks_and_strategies(tmp_path, text):
    """Three steps each on one process, on two by FSDP2, on two by DDP, on one, on four: the same curve."""
    options = ["--data", text, *OPTIONS, "--dropout", "0", "--schedule", "constant", "--recipe", "mx"]
    train(1, tmp_path / "whole", *options, "--steps", "15")
    folder = tmp_path / "parts"
    train(1, folder, *options, "--steps", "3")
    ways = [(2, "fsdp2"), (2, "ddp"), (1, "ddp"), (4, "fsdp2")]
    said = []
    for i, (world, strategy) in enumerate(ways):
        outputs, _ = train(world, folder, "--resume", "--steps", str(6 + 3 * i), "--strategy", strategy)
        said.append("bit for bit only on" in outputs[0])
    assert said == [True, False, True, True]
    # MX has blocks of 32 tokens, of 24 here: those of two sequences may share a block on one rank and not on two.
    assert losses(folder) == pytest.approx(losses(tmp_path / "whole"), rel=5e-3)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path, text):
    options = ["--data", text, "--steps", "12", *OPTIONS]
    train(2, tmp_path / "whole", *options)
    folder = tmp_path / "parts"
    ranks = Forked(2, "--out", str(folder), *options)
    while len(rows(folder)) < 2:
        time.sleep(0.002)
    ranks.send_signal(signal.SIGINT, 1)
    codes, outputs, _ = ranks.communicate()
    assert codes == [130, 130] and f"--resume --out {folder} --nproc 2" in outputs[0]
    assert newest(folder) == len(rows(folder)) >= 2
    train(2, folder, "--resume")
    assert curve(folder) == curve(tmp_path / "whole")


def test_a_signal_that_a_launcher_and_a_scheduler_pass_on_is_one(monkeypatch):
    for world, raises in (("2", False), ("1", True)):
        monkeypatch.setenv("WORLD_SIZE", world)
        stop = StopSignals()
        agree_on_stops(stop)
        stop.shared = lambda _: None  # nobody asks the other ranks here
        with stop.caught(), stop.deferred():
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(Interrupted) if raises else nullcontext():
                signal.raise_signal(signal.SIGTERM)
        assert stop.requested == signal.SIGTERM


def test_what_one_rank_cannot_do_ends_all(tmp_path, text):
    """A folder in use, and options that differ: the rank with the reason says it, the others have lost contact."""
    train(2, tmp_path / "run", "--data", text, "--steps", "2", *OPTIONS)
    codes, _, errors = Forked(2, "--out", str(tmp_path / "run"), "--data", text, *OPTIONS).communicate()
    assert codes == [2, 3] and "already holds a run: continue it with --resume" in errors[0]
    assert "rank 1 has lost contact with another rank" in errors[1] and "Traceback" not in errors[1]
    codes, _, errors = Forked(2, "--out", str(tmp_path / "new"), "--nproc", "2").communicate()
    assert codes == [2, 2] and "--nproc 2: a launcher has started 2 ranks already; leave it out" in errors[0]
    codes, _, errors = Forked(2, command="grpo").communicate()
    assert codes == [2, 2] and "octavo grpo runs in one process, and a launcher has started 2" in errors[0]
