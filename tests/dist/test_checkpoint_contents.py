"""Contents of a checkpoint of shards: optimiser states by name, buffers of each rank, plain values."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_cases import build, train
from ranks import on_ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from octavo import convert_to_fp8, fp8_autocast
from octavo.dist.checkpoint import load, read_extra, save
from octavo.dist.export import export
from octavo.dist.rank_files import read_state
from octavo.models.bdh import BDH, BDHConfig, fuse
from octavo.optim import build_optimizer


def in_groups(model, names_by_rate):
    """AdamW with a group of parameters for each learning rate."""
    parameters = dict(model.named_parameters())
    return torch.optim.AdamW(
        [{"params": [(n, parameters[n]) for n in names], "lr": rate} for rate, names in names_by_rate.items()]
    )


def by_name(model, optimizer):
    """Mean and learning rate of each parameter."""
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    return {n: (optimizer.state[p]["exp_avg"].full_tensor(), rates[p]) for n, p in model.named_parameters()}


def groups_in_other_orders(rank, folder):
    model, _ = build()
    optimizer = in_groups(model, {1e-2: ["0.weight", "0.bias"], 1e-3: ["2.weight"]})
    train(model, optimizer, 0)
    save(Path(folder) / "groups", model, optimizer)
    expected = by_name(model, optimizer)
    again, _ = build()
    swapped = in_groups(again, {1e-4: ["2.weight"], 1e-5: ["0.bias", "0.weight"]})
    load(Path(folder) / "groups", again, swapped)
    for name, (mean, rate) in by_name(again, swapped).items():
        assert torch.equal(mean, expected[name][0]) and rate == expected[name][1], name
    assert [group["param_names"] for group in swapped.param_groups] == [["2.weight"], ["0.bias", "0.weight"]]
    other = in_groups(again, {1e-2: ["0.bias"], 1e-3: ["0.weight", "2.weight"]})
    with pytest.raises(ValueError, match=r"has no parameter group of 0.bias: build the same groups, in any order"):
        load(Path(folder) / "groups", again, other)
    with pytest.raises(ValueError, match="has 2 parameter groups, this one 1"):
        load(Path(folder) / "groups", again, torch.optim.AdamW(again.parameters()))
    return train(model, optimizer, 3) == train(again, swapped, 3)


def optimizers_of_other_kinds(rank, folder):
    """AdamW's variants read each other's states; SGD would ignore them."""
    model, _ = build()
    for name in ("adamw", "adamw8bit"):
        optimizer = build_optimizer(name, model.parameters(), lr=1e-3)
        train(model, optimizer, 0)
        save(Path(folder) / name, model, optimizer)
    class_names = {"adamw": "AdamW", "adamw8bit": "AdamW8bit"}
    for name, saved in class_names.items():
        with pytest.raises(ValueError, match=f"the saved optimiser is {saved}, this one SGD: build the same, or load"):
            load(Path(folder) / name, model, torch.optim.SGD(model.parameters(), lr=1e-3))
    load(Path(folder) / "adamw", model, build_optimizer("adamw", model.parameters(), lr=1e-3, stochastic_rounding=True))


def optimizer_cases(rank, folder):
    optimizers_of_other_kinds(rank, folder)
    return groups_in_other_orders(rank, folder)


def test_states_go_to_the_parameters_of_their_names(tmp_path):
    assert on_ranks(2, optimizer_cases, str(tmp_path)) == [True, True]


@dataclasses.dataclass
class Position:
    batch: int


NOT_PLAIN = {
    "data['rng'][1] is of type numpy.ndarray": {"data": {"rng": np.random.RandomState(0).get_state()}},
    "data is of type test_checkpoint_contents.Position": {"data": Position(3)},
    "extra['loss'] is of type numpy.float64": {"extra": {"step": 3, "loss": np.float64(1.5)}},
    "extra['files'][0] is of type pathlib": {"extra": {"files": [Path("text")]}},
    "extra['schedule'] is of type function": {"extra": {"schedule": test_states_go_to_the_parameters_of_their_names}},
}
PLAIN = {"a": [1, 2.5, "text", None, True, (b"bytes", torch.arange(3))], 4: {"set"}}


def values_that_are_not_plain(rank, folder):
    """On one rank only, so that the others would wait for it."""
    model, optimizer = build()
    for words, given in NOT_PLAIN.items():
        for culprit in (0,) if "extra" in given else (0, 1):  # `extra` of other ranks is not kept
            mine = given if rank == culprit else {}
            words_here = words if rank == culprit else f"rank {culprit}: {words}"
            with pytest.raises(TypeError if rank == culprit else OSError, match=f"^{re.escape(words_here)}"):
                save(Path(folder) / "c", model, optimizer, **mine)
    assert not list(Path(folder).iterdir())
    torch.distributed.barrier()
    save(Path(folder) / "c", model, optimizer, data=PLAIN, extra={"plain": PLAIN})
    loaded = load(Path(folder) / "c", model, optimizer)
    return [str(value) == str(PLAIN) for value in (*loaded.data, loaded.extra["plain"])]


def test_values_that_could_not_be_read_are_refused_on_every_rank(tmp_path):
    assert on_ranks(2, values_that_are_not_plain, str(tmp_path), limit=120) == [[True] * 3] * 2


def paths(rank, folder):
    folder = Path(folder)
    model, optimizer = build()
    with pytest.raises(ValueError, match=f"rank 0 has the path {folder}/c0, and rank 1 {folder}/c1: give all ranks"):
        save(folder / f"c{rank}", model, optimizer)
    assert not list(folder.iterdir())
    torch.distributed.barrier()
    save(folder / "c0", model, optimizer)
    with pytest.raises(ValueError, match=f"rank 0 has the path {folder}/c0, and rank 1 {folder}/c1: give all ranks"):
        load(folder / f"c{rank}", model, optimizer)
    with pytest.raises(OSError, match="c2 is no checkpoint of several ranks: there is no such folder"):
        load(folder / "c2", model, optimizer)
    with pytest.raises(FileNotFoundError, match=r"it has neither manifest.json nor .metadata"):
        read_extra(folder)
    mine = folder / "c3.tmp" / "notes.txt"
    if rank == 0:
        mine.parent.mkdir()
        mine.write_text("kept")
        (mine.parent / "rank-0.pt").write_text("of a save that was killed")
    with pytest.raises(OSError, match=r"c3.tmp exists and holds notes.txt, which is of no checkpoint: move it"):
        save(folder / "c3", model, optimizer)
    assert mine.read_text() == "kept"
    torch.distributed.barrier()
    if rank == 0:
        mine.unlink()
    save(folder / "c3", model, optimizer)
    assert not mine.parent.exists()


def test_ranks_agree_on_a_path_and_what_is_not_a_checkpoint_stays(tmp_path):
    on_ranks(2, paths, str(tmp_path))


def normed(wrap):
    """A model whose running statistics follow the batches of its own rank."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.Linear(96, 32))
    convert_to_fp8(model)
    model.register_buffer("same", torch.arange(3.0))
    if wrap == "fsdp2":
        return fully_shard(model)
    return DistributedDataParallel(model, broadcast_buffers=False)


def statistics(model):
    return {name.removeprefix("module."): buffer.tolist() for name, buffer in model.named_buffers()}


def saved_statistics(rank, folder):
    kept = {}
    for wrap in ("fsdp2", "ddp"):
        model = normed(wrap)
        train(model, torch.optim.AdamW(model.parameters()), 0, rank)
        save(Path(folder) / wrap, model)
        kept[wrap] = statistics(model)
    buffers = read_state(Path(folder) / "fsdp2", rank)["buffers"]
    assert buffers.keys() == {"1.running_mean", "1.running_var"}  # the others are equal
    return kept


def loaded_statistics(rank, folder):
    kept = {}
    for wrap in ("fsdp2", "ddp"):
        model = normed(wrap)
        load(Path(folder) / wrap, model)
        kept[wrap] = statistics(model)
    return kept


def test_each_rank_has_its_own_buffers(tmp_path):
    kept = on_ranks(2, saved_statistics, str(tmp_path))
    assert kept[0] != kept[1]
    assert on_ranks(2, loaded_statistics, str(tmp_path)) == kept
    assert on_ranks(1, loaded_statistics, str(tmp_path)) == kept[:1]
    [file] = export(tmp_path / "ddp", tmp_path / "weights")
    assert load_file(file)["1.running_mean"].tolist() == kept[0]["ddp"]["1.running_mean"]


def under_autocast(wrap):
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    called = DistributedDataParallel(model) if wrap == "ddp" else fully_shard(model)
    return called, fp8_autocast("delayed", model=called), torch.optim.SGD(called.parameters(), lr=1e-2)


def scales_of_autocasts(rank, folder):
    for wrap in ("fsdp2", "ddp"):
        model, context, optimizer = under_autocast(wrap)
        with context:
            train(model, optimizer, 0, rank)
        save(Path(folder) / wrap, model, optimizer)
        again, fresh, other = under_autocast(wrap)
        load(Path(folder) / wrap, again, other)
        states = [each.scaling.state_dict() for each in (context, fresh)]
        assert states[0]["names"] and str(states[0]) == str(states[1])
    second = fp8_autocast(model=model)
    with pytest.raises(ValueError, match=r"2 contexts of fp8_autocast were made for this Sequential: say which"):
        save(Path(folder) / "both", model)
    save(Path(folder) / "both", model, scaling=[context.scaling, second.scaling])


def test_scales_of_an_autocast_are_found_by_its_model(tmp_path):
    on_ranks(2, scales_of_autocasts, str(tmp_path))


def test_scales_of_an_autocast_without_a_model_have_to_be_named(tmp_path):
    model = nn.Sequential(nn.Linear(64, 32))
    save(tmp_path / "none", model)
    context = fp8_autocast("current")
    with context:
        model(torch.randn(16, 64)).sum().backward()
    save(tmp_path / "without histories", model)
    context = fp8_autocast("delayed")
    save(tmp_path / "not used yet", model)
    with context:
        model(torch.randn(16, 64)).sum().backward()
    with pytest.raises(ValueError, match=r"no scales of this Sequential were found, and an fp8_autocast\(\) was made"):
        save(tmp_path / "c", model)
    assert not (tmp_path / "c").exists()
    save(tmp_path / "no scales", model, scaling=[])
    save(tmp_path / "c", model, scaling=context.scaling)
    assert read_state(tmp_path / "c", 0)["scaling"][0]["names"] == context.scaling.names


def test_scales_of_a_fused_bdh_are_found(tmp_path):
    def fused():
        torch.manual_seed(0)
        model = BDH(BDHConfig(dim=32, heads=2, neurons=64, layers=1))
        return model, fuse(model)

    model, layers = fused()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(256, (2, 16))
    for _ in range(2):
        model(tokens, tokens)[1].backward()
        optimizer.step()
    save(tmp_path / "c", model, optimizer)
    again, other = fused()
    load(tmp_path / "c", again, torch.optim.SGD(again.parameters(), lr=0.1))
    states = [str(each.scaling.state_dict()) for each in (layers, other)]
    assert states[0] == states[1] != str(fused()[1].scaling.state_dict())
    assert again(tokens, tokens)[1].equal(model(tokens, tokens)[1])


def in_wrappers(_rank, folder):
    def built():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32))
        convert_to_fp8(model)
        return model, torch.optim.AdamW(model.parameters())

    def compiled(model):
        return torch.compile(model, backend="eager")

    wraps = (compiled, lambda m: compiled(DistributedDataParallel(m)), lambda m: DistributedDataParallel(compiled(m)))
    for i, wrap in enumerate(wraps):
        model, optimizer = built()
        train(wrap(model), optimizer, 0)  # the same batches on both ranks
        save(Path(folder) / str(i), wrap(model), optimizer)
        for other_wrap in (lambda m: m, wrap):
            again, other = built()
            load(Path(folder) / str(i), other_wrap(again), other)
            assert all(map(torch.equal, again.parameters(), model.parameters()))
            means = [next(iter(each.state.values()))["exp_avg"] for each in (optimizer, other)]
            assert torch.equal(*means)


def test_wrappers_leave_names_alone(tmp_path):
    on_ranks(2, in_wrappers, str(tmp_path))
