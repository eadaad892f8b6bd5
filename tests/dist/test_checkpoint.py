"""Checkpoints of shards: bit for bit on as many ranks, the same weights and states on any number; whole, or not there.

The batch is the same on every rank, so that a run on 1, 2 or 4 ranks computes the same numbers: sums of two or four
equal gradients, divided by their number, are exact. What differs after a load was lost by the checkpoint.
"""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from checkpoint_cases import STEPS, build, train
from ranks import NoAnswer, RankFailed, on_ranks
from safetensors.torch import load_file

from octavo.dist import checkpoint
from octavo.dist.checkpoint import DamagedCheckpoint, load, merged, save
from octavo.dist.export import export
from octavo.dist.optimizer_states import cut_states
from octavo.nn.sharded import local
from octavo.numerics import FP8ScalingManager
from octavo.optim import build_optimizer


def saved(rank, path, own=False, **how):
    """Train, save, and go on."""
    model, optimizer = build(**how)
    if own:
        torch.manual_seed(rank)  # dropout of its own
    own_rank = rank if own else None
    train(model, optimizer, 0, own_rank)
    save(path, model, optimizer, data={"position": 7 + rank}, extra={"step": STEPS})
    return train(model, optimizer, STEPS, own_rank)


def resumed(rank, path, own=False, **how):
    model, optimizer = build(**how)
    loaded = load(path, model, optimizer)
    assert loaded.extra == {"step": STEPS}
    assert loaded.data[min(rank, loaded.ranks - 1)] == {"position": 7 + min(rank, loaded.ranks - 1)}
    return train(model, optimizer, STEPS, rank if own else None)


def everything(rank, folder):
    """Several cases in one start of the ranks: losses had each gone on."""
    return {name: saved(rank, Path(folder) / name, **how) for name, how in CASES.items()}


def all_resumed(rank, folder):
    return {name: resumed(rank, Path(folder) / name, **how) for name, how in CASES.items()}


CASES = {
    "delayed": {},
    "block": {"recipe": "block", "gather": True},
    "gathered": {"gather": True},
    "8bit": {"optimizer": "adamw8bit"},
    "4bit": {"optimizer": "adamw4bit"},
    "fp8": {"optimizer": "adamwfp8", "recipe": "current"},
}


def test_continues_bit_for_bit_on_1_2_and_4_ranks(tmp_path):
    went_on = on_ranks(2, everything, str(tmp_path))
    for world in (1, 2, 4):
        for answer in on_ranks(world, all_resumed, str(tmp_path)):
            assert answer == went_on[0], world


def own_cases(rank, folder):
    return [saved(rank, Path(folder) / wrap, own=True, wrap=wrap) for wrap in ("fsdp2", "ddp")]


def own_resumed(rank, folder):
    torch.manual_seed(99)
    return [resumed(rank, Path(folder) / wrap, own=True, wrap=wrap) for wrap in ("fsdp2", "ddp")]


def test_each_rank_has_its_own_scales_and_random_numbers(tmp_path):
    went_on = on_ranks(2, own_cases, str(tmp_path))
    assert went_on[0] != went_on[1]
    assert on_ranks(2, own_resumed, str(tmp_path)) == went_on


def states_of(_rank, path, wrap):
    """This rank's part of the first weight's mean, in FP32, and whether it is kept in few bits."""
    model, optimizer = build(optimizer="adamw8bit", wrap=wrap)
    load(path, model, optimizer)
    part = local(optimizer.state[model[0].weight]["exp_avg"])
    low_bit = hasattr(part, "dequantize") and type(part) is not torch.Tensor
    return (part.dequantize() if low_bit else part).tolist(), low_bit


def joined(parts, dim=0):
    return torch.cat([torch.tensor(part) for part, _ in parts], dim)


def test_blocks_that_new_shards_cut_are_rounded_again(tmp_path):
    on_ranks(2, saved, tmp_path / "c", optimizer="adamw8bit")
    whole = joined(on_ranks(1, states_of, tmp_path / "c", ""))
    thirds = on_ranks(3, states_of, tmp_path / "c", "fsdp2")
    assert joined(thirds).shape == whole.shape == (320, 64)
    # Half the largest gap between two of the 256 levels, which is that below 1: of the largest magnitude.
    bound = 0.5 * 0.0151 * whole.abs().max()
    assert whole.abs().max() > 0 and (joined(thirds) - whole).abs().max() <= bound
    halves = on_ranks(2, states_of, tmp_path / "c", "fsdp2")
    assert all(low_bit for _, low_bit in halves) and torch.equal(joined(halves), whole)


def test_shards_of_other_columns_are_rounded_again(tmp_path):
    dims = {"fsdp2": 0, "columns": 1}
    for wrap, other in (("fsdp2", "columns"), ("columns", "fsdp2")):
        on_ranks(2, saved, tmp_path / wrap, optimizer="adamw8bit", wrap=wrap)
        before = joined(on_ranks(2, states_of, tmp_path / wrap, wrap), dims[wrap])
        parts = on_ranks(2, states_of, tmp_path / wrap, other)
        error = (joined(parts, dims[other]) - before).abs().max()
        assert all(low_bit for _, low_bit in parts) and 0 < error <= 0.5 * 0.0151 * before.abs().max(), other


def cut_of_whole(rank, wrap):
    """Means of a rank's shards, cut from those of a model that each rank has trained alone; on rank 0, those, too."""
    states = []
    plain, whole = build(optimizer="adamw8bit", wrap="")
    train(plain, whole, 0)
    model, optimizer = build(optimizer="adamw8bit", wrap=wrap)
    optimizer.load_state_dict(cut_states(optimizer, whole.state_dict()))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        mine, all_of_it = local(optimizer.state[p]["exp_avg"]), whole.state[q]["exp_avg"] if rank == 0 else None
        states.append(mine.dequantize().tolist() if type(mine) is not torch.Tensor else mine.tolist())
        if rank == 0:
            states[-1] = states[-1], (all_of_it.dequantize() if all_of_it.dim() > 1 else all_of_it).tolist()
    assert int(optimizer.state[next(model.parameters())]["step"]) == STEPS
    return states


@pytest.mark.parametrize(("world", "wrap"), [(2, "fsdp2"), (3, "fsdp2"), (2, "columns")])
def test_states_of_one_process_are_cut_for_shards(world, wrap):
    first, *others = on_ranks(world, cut_of_whole, wrap)
    for i, (mine, whole) in enumerate(first):
        parts = [torch.tensor(part) for part in (mine, *(other[i] for other in others))]
        shards = torch.cat(parts, dim=-1 if wrap == "columns" else 0)
        are_cut = world == 3 or wrap == "columns"
        bound = 0.5 * 0.0151 * torch.tensor(whole).abs().max() if are_cut else 0.0
        assert (shards - torch.tensor(whole)).abs().max() <= bound


def die_in(rank, folder, victim, where):
    """Save once; save again, with one rank killed at one place."""
    model, optimizer = build()
    train(model, optimizer, 0)
    save(Path(folder) / "first", model, optimizer, data={"position": 7 + rank}, extra={"step": STEPS})
    original = getattr(checkpoint, where)

    def fatal(*args):
        if rank == victim:
            if where == "write_durable":
                Path(args[0]).write_bytes(args[1][:100])  # half a file
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(checkpoint, where, fatal)
    save(Path(folder) / "second", model, optimizer, extra={"step": 2 * STEPS})


@pytest.mark.parametrize(
    ("victim", "where"), [(1, "_write"), (1, "write_durable"), (0, "write_durable"), (0, "sync_folder")]
)
def test_a_rank_killed_while_saving_leaves_the_previous_checkpoint(tmp_path, victim, where):
    with pytest.raises((RankFailed, NoAnswer), match="rank"):
        on_ranks(2, die_in, str(tmp_path), victim, where, limit=30)
    assert not (tmp_path / "second").exists() and (tmp_path / "second.tmp").exists()
    first, second = on_ranks(2, resumed, tmp_path / "first")
    assert first == second
    on_ranks(2, saved, tmp_path / "second")  # what was left is cleared away
    assert not (tmp_path / "second.tmp").exists()


def refusals(rank, folder):
    folder = Path(folder)
    model, optimizer = build()
    train(model, optimizer, 0)
    save(folder / "c", model, optimizer)
    save(folder / "weights", model)
    with pytest.raises(OSError, match="is not written over another"):
        save(folder / "c", model, optimizer)
    with pytest.raises(ValueError, match="holds no optimiser"):
        load(folder / "weights", model, optimizer)
    other, _ = build(features=96)
    with pytest.raises(ValueError, match=r"0.weight has shape \(320, 64\), the model's has \(96, 64\)"):
        load(folder / "c", other)
    with pytest.raises(ValueError, match="the optimiser holds a parameter that FSDPSequential has not"):
        save(folder / "d", model, torch.optim.AdamW(other.parameters()))
    low_bit = build_optimizer("adamw8bit", model.parameters(), lr=1e-3)
    load(folder / "c", model, low_bit)  # states in FP32 are read into what has few bits: torchao computes with either
    with pytest.raises(ValueError, match="holds 1 scaling states, and there are 0 here"):
        load(folder / "c", model, optimizer, scaling=[])
    if rank == 0:
        shard = folder / "c" / "__1_0.distcp"
        content = bytearray(shard.read_bytes())
        content[-9] ^= 1
        shard.write_bytes(content)
    torch.distributed.barrier()
    with pytest.raises(DamagedCheckpoint, match=r"__1_0\.distcp is not what was written"):
        load(folder / "c", model, optimizer)
    if rank == 0:
        shard.write_bytes(content[:-1])
        (folder / "weights" / "rank-1.pt").unlink()
    torch.distributed.barrier()
    with pytest.raises(DamagedCheckpoint, match=r"__1_0.distcp has [\d,]+ bytes instead of"):
        load(folder / "c", model, optimizer)
    with pytest.raises(DamagedCheckpoint, match=r"rank-1\.pt: No such file"):
        load(folder / "weights", model)
    if rank == 0:
        (folder / "c" / "manifest.json").write_text("[]")
    torch.distributed.barrier()
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json cannot be read"):
        load(folder / "c", model, optimizer)


def test_what_is_wrong_is_said_on_every_rank(tmp_path):
    on_ranks(2, refusals, str(tmp_path))
    assert json.loads((tmp_path / "weights" / "manifest.json").read_text())["ranks"] == 2


def test_scaling_states_of_ranks_become_one_by_their_maximum():
    managers = [FP8ScalingManager(4, 1.0) for _ in range(2)]
    for manager, values in zip(managers, ({"a": 1.0, "b": 8.0}, {"b": 2.0, "c": 3.0, "a": 4.0}), strict=True):
        for name, value in values.items():
            manager.update_amax(name, value)
    state = merged([manager.state_dict() for manager in managers])
    both = FP8ScalingManager(4, 1.0)
    both.load_state_dict(state)
    assert both.names == ["a", "b", "c"]
    assert [float(both.get_scale(name)) for name in both.names] == [448 / 4, 448 / 8, pytest.approx(448 / 3)]
    assert merged([managers[0].state_dict()] * 2)["rows"].equal(managers[0].state_dict()["rows"])


def test_weights_out_of_shards_in_one_folder(tmp_path):
    """One process writes them, in one file or in several with their index; no rank is needed."""
    on_ranks(2, saved, tmp_path / "c", recipe="block")
    model, _ = build(recipe="block", wrap="")
    expected = load(tmp_path / "c", model) and model.state_dict()
    [file] = export(tmp_path / "c", tmp_path / "one")
    assert file.name == "model.safetensors" and load_file(file).keys() == expected.keys()
    assert all(torch.equal(load_file(file)[name], expected[name]) for name in expected)
    files = export(tmp_path / "c", tmp_path / "many", dtype=torch.bfloat16, largest=100_000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())["weight_map"]
    assert [file.name for file in files] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, tensor in expected.items():
        assert torch.equal(load_file(tmp_path / "many" / index[name])[name], tensor.bfloat16())
    [named] = export(tmp_path / "c", tmp_path / "named", dtype="bf16")
    assert {tensor.dtype for tensor in load_file(named).values()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="dtype='half': choose one of bf16, fp16, fp32"):
        export(tmp_path / "c", tmp_path / "none", dtype="half")
    with pytest.raises(ValueError, match="is no checkpoint of several ranks"):
        export(tmp_path, tmp_path / "none")
