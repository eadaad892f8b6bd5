"""Optimisers on shards (FSDP2): low-bit states, stochastic rounding, offload, sums; against whole models."""

import logging
from contextlib import contextmanager

import pytest
import torch
from ranks import on_ranks
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from octavo.nn.sharded import first_index, local, place_of, placed_like, sizes_of_shards
from octavo.optim import build_optimizer, keep_masters, measure_memory, offload_states, step_in_backward
from octavo.optim.out_of_memory import explain, savings
from octavo.optim.split_masters import has_master
from octavo.training import trainer as trainer_module
from octavo.training.errors import RunError
from octavo.training.gradients import GradientSums
from octavo.training.trainer import FP8Trainer

LOW_BIT = ("adamw8bit", "adamwfp8", "adamw4bit")
STEPS = 4
WAYS = ("step", "offload", "in backward", "in backward, offload")


def build(dtype=torch.float32):
    """A model whose two large weights are in low-bit states, also by halves, and whose others are plain."""
    torch.manual_seed(1)
    layers = nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 256, bias=False), nn.LayerNorm(256)
    return nn.Sequential(*layers).to(dtype)


def shard(model, **options):
    for module in (model[0], model[2]):
        fully_shard(module, **options)
    return fully_shard(model, **options)


def part_of(whole, p):
    return placed_like(whole[place_of(p)].clone(), p) if isinstance(p, DTensor) else whole


def distance(mine, whole):
    """The largest distance of a shard from its part of a whole tensor."""
    mine, whole = mine.detach(), whole.detach()
    difference = values_of(local(mine)) - values_of(whole)[place_of(mine)]
    return difference.abs().max().item() if difference.numel() else 0.0


def values_of(x):
    return x.float() if type(x) is torch.Tensor else x.dequantize(torch.float32)


def batch_of(step, rank=None):
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(step))
    return x if rank is None else x.chunk(2)[rank]


def give_gradients(model, step):
    """Set the same gradients on a whole model and on shards, so that only the steps can differ."""
    for i, p in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * step + i)
        whole = torch.randn(p.shape, generator=generator) * torch.randn(p.shape, generator=generator).exp()
        p.grad = part_of(whole.to(p.dtype), p)


def backward(model, step):
    """Compute a loss that does not depend on the input's split, and whose gradient a rank computes as one process."""
    x = batch_of(step)
    model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()


def optimizer_of(model, name, way="step", stochastic=False):
    optimizer = build_optimizer(name, model.parameters(), lr=1e-2, stochastic_rounding=stochastic)
    if way == "offload":
        offload_states(optimizer)
    elif way != "step":
        step_in_backward(optimizer, offload=way.endswith("offload"))
    return optimizer


def compare(mine, optimizer, expected, reference):
    """The largest distance of weights and states, and the classes of states."""
    distances, kinds = [], []
    for p, q in zip(mine.parameters(), expected.parameters(), strict=True):
        distances.append(distance(p, q))
        for name in ("exp_avg", "exp_avg_sq"):
            distances.append(distance(optimizer.state[p][name], reference.state[q][name]))
        kinds.append(type(local(optimizer.state[p]["exp_avg"])).__name__.startswith("OptimState"))
    return max(distances), kinds


def step_by_given_gradients(rank, names, dtype, shard_by):
    """By the name of an optimiser: how far shards are from the whole, and which states are in few bits."""
    found = {}
    for name in names:
        models = shard_by(build(dtype)), build(dtype)
        optimizers = [optimizer_of(model, name, stochastic=dtype == torch.bfloat16) for model in models]
        for step in range(STEPS):
            for model, optimizer in zip(models, optimizers, strict=True):
                give_gradients(model, step)
                optimizer.step()
        found[name] = compare(models[0], optimizers[0], models[1], optimizers[1])
    return found


def test_low_bit_states_of_shards_equal_those_of_the_whole():
    for found in on_ranks(2, step_by_given_gradients, LOW_BIT, torch.float32, shard):
        assert found == dict.fromkeys(LOW_BIT, (0.0, [True, False, True, False, False]))


def test_bf16_shards_are_rounded_at_random_by_their_place_in_the_whole():
    names = ("adamw4bit", "adamw")
    for found in on_ranks(2, step_by_given_gradients, names, torch.bfloat16, shard):
        assert {name: far for name, (far, _) in found.items()} == dict.fromkeys(names, 0.0)


def shard_by_halves_twice(model):
    """HSDP: two groups of two ranks, whose shards are alike."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def test_replicas_of_shards_equal_the_whole():
    for found in on_ranks(4, step_by_given_gradients, ("adamw4bit",), torch.bfloat16, shard_by_halves_twice):
        assert found["adamw4bit"][0] == 0.0


def step_uneven_shards(rank):
    """Three ranks: 64 rows of 256 are 22, 22 and 20, all whole blocks; 256 rows of 64 are 86, 86 and 84: 84 alone."""
    models = shard(build()), build()
    optimizers = [optimizer_of(model, "adamw8bit") for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        give_gradients(model, 0)
        optimizer.step()
    first, second = (models[0][i].weight for i in (0, 2))
    kinds = [type(local(optimizers[0].state[p]["exp_avg"])) is torch.Tensor for p in (first, second)]
    return distance(first, models[1][0].weight), kinds, sizes_of_shards(first), first_index(second)


def test_uneven_shards_that_end_within_a_block_have_plain_states_on_all_ranks():
    results = on_ranks(3, step_uneven_shards)
    assert [far for far, *_ in results] == [0.0] * 3
    assert [kinds for _, kinds, *_ in results] == [[False, True]] * 3
    assert results[0][2] == {22 * 256, 20 * 256}
    assert [first for *_, first in results] == [0, 86 * 64, 172 * 64]


def step_in_every_way(rank, name):
    """Distances from the step of the whole model, by the way of stepping; both ranks see the whole batch."""
    expected = build()
    reference = optimizer_of(expected, name)
    for step in range(STEPS):
        backward(expected, step)
        reference.step()
        reference.zero_grad()
    found = {}
    for way in WAYS:
        mine = shard(build())
        optimizer = optimizer_of(mine, name, way)
        for step in range(STEPS):
            backward(mine, step)
            optimizer.step()
            optimizer.zero_grad()
        found[way] = compare(mine, optimizer, expected, reference)[0]
        if way == "offload":
            optimizer.load_state_dict(optimizer.state_dict())
            found["reloaded"] = compare(mine, optimizer, expected, reference)[0]
    return found


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "adamw4bit"])
def test_shards_are_stepped_in_backward_and_with_states_in_host_memory(name):
    for found in on_ranks(2, step_in_every_way, name):
        assert found == dict.fromkeys([*WAYS, "reloaded"], 0.0)


def sum_gradients(rank, kind):
    """Sums over three micro-batches on shards, against FP32 ones of one process; and the same again."""

    def summed(model, kind):
        sums = GradientSums(model, kind)
        for i in range(3):
            with sums.adding(i, is_last=i == 2):
                backward(model, i)
        return model

    mine, again, exact = summed(shard(build()), kind), summed(shard(build()), kind), summed(build(), "fp32")
    assert all(
        torch.equal(local(p.grad), local(q.grad)) for p, q in zip(mine.parameters(), again.parameters(), strict=True)
    )
    worst = 0.0
    for p, q in zip(mine.parameters(), exact.parameters(), strict=True):
        assert p.grad.placements == p.placements
        worst = max(worst, distance(p.grad, q.grad) / q.grad.abs().max().item())
    return worst


@pytest.mark.parametrize(("kind", "bound"), [("fp32", 0.0), ("bf16", 2 / 128), ("fp8", 2 / 8)])
def test_gradients_of_shards_are_summed(kind, bound):
    """Two of three additions are rounded, each by at most a 128th or an 8th of the sum so far."""
    for worst in on_ranks(2, sum_gradients, kind):
        assert worst <= bound and (worst > 0) == (bound > 0)


def norms_of(model, kind):
    trainer = FP8Trainer(
        model, optimizer_of(model, "adamw"), convert_model_to_fp8=False, gradient_accumulation_steps=2, gradients=kind,
        max_grad_norm=0.01, loss_fn=lambda y, target: (y - target).square().mean(),
    )  # fmt: skip
    norms = []
    for i in range(4):
        x = batch_of(i)
        trainer.training_step((x, x.roll(1, 0)))
        norms.append(trainer.last_step.grad_norm if trainer.last_step else 0.0)
    return norms, model


def train_with_sums(rank, kind):
    """Norms of the steps, and how far parameters are from those of one process with FP32 sums."""
    (norms, mine), (exact, expected) = norms_of(shard(build()), kind), norms_of(build(), "fp32")
    return norms, exact, max(map(distance, mine.parameters(), expected.parameters()))


@pytest.mark.parametrize(("kind", "bound"), [("fp32", 0.0), ("bf16", 1 / 128), ("fp8", 1 / 8)])
def test_a_trainer_sums_shards_and_all_ranks_agree_on_the_norm(kind, bound):
    one, other = on_ranks(2, train_with_sums, kind)
    assert one[0] == other[0]
    assert one[0] == pytest.approx(one[1], rel=bound + 1e-5)  # shards sum their squares in another order
    assert bound or one[2] <= 1e-6


def measure(rank):
    model = shard(build())
    optimizer = optimizer_of(model, "adamw8bit")
    backward(model, 0)
    optimizer.step()
    memory = measure_memory(model, optimizer)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert "what took it: weights 0.1 MiB" in explain(error, model, optimizer, {})
    return memory.weights, memory.gradients, memory.states, savings(model, optimizer, memory)["adamw4bit"]


def refuse_masters(rank):
    model = shard(build(torch.bfloat16))
    with pytest.raises(ValueError, match="in BF16 are not supported: shard the model in FP32"):
        keep_masters(model.parameters())
    keep_masters(shard(build()).parameters())  # in FP32 they are their own masters
    keep_masters(model.parameters(), None)
    return not any(has_master(optimizer_of(model, "adamw"), p) for p in model.parameters())


def test_masters_of_shards_in_bf16_are_refused():
    assert on_ranks(2, refuse_masters) == [True, True]


def trained_by_default(rank):
    """What FP8Trainer says of sharded weights in BF16, in FP32, rounded at random, and where masters are declined."""
    said = []
    for dtype, optimizer, options in (
        (torch.bfloat16, "adamw", {}),
        (torch.float32, "adamw", {}),
        (torch.bfloat16, "random", {}),
        (torch.bfloat16, "adamw", {"master_weights": False}),
    ):
        model = shard(build(dtype))
        random = {"stochastic_rounding": True} if optimizer == "random" else {}
        chosen = build_optimizer("adamw8bit" if random else "adamw", model.parameters(), lr=1e-3, **random)
        with warned() as records:
            FP8Trainer(model, chosen, convert_model_to_fp8=False, **options)
        said.append([record.getMessage() for record in records if record.levelno == logging.WARNING])
    return said


@contextmanager
def warned():
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("octavo").addHandler(handler)
    try:
        yield records
    finally:
        logging.getLogger("octavo").removeHandler(handler)


def test_the_trainer_says_that_shards_in_bf16_have_no_masters():
    first, second = on_ranks(2, trained_by_default)
    assert [len(said) for said in first] == [1, 0, 0, 0] and not any(second)
    assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16)" in first[0][0] and "updates are lost" in first[0][0]


def test_memory_of_shards_is_that_of_this_rank():
    large, small = 2 * 64 * 256, 64 + 2 * 256
    for weights, gradients, states, saved in on_ranks(2, measure):
        assert weights == gradients == 4 * (large + small) // 2
        blocks, levels = large // 2 // 256, 2 * 2 * 256 * 4
        assert states == 2 * (large // 2 + 4 * blocks + 4 * small // 2) + levels
        assert saved == round(states - (large + small) // 2 * 2 * (1 / 2 + 4 / 128))


class Tied(nn.Module):
    """An embedding and a head that are one Parameter, and rows that ranks do not divide."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.middle, self.head = nn.Embedding(33, 16), nn.Linear(16, 16), nn.Linear(16, 33, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.middle(self.embed(x)))


def save_and_load(rank, folder):
    """What shards read from the files that they wrote, and how many of these this rank has written."""
    equal, written, write = [], [], trainer_module.write_model
    trainer_module.write_model = lambda model, path: (written.append(path), write(model, path))
    for name in ("model.safetensors", "model.pt"):
        model, expected = fully_shard(Tied()), Tied()
        trainer = FP8Trainer(model, optimizer_of(model, "adamw"), convert_model_to_fp8=False)
        assert trainer.save_model(folder / "shards" / name).exists()
        other = fully_shard(Tied())
        for p in other.parameters():
            local(p.detach()).fill_(-1.0)
        loader = FP8Trainer(other, optimizer_of(other, "adamw"), convert_model_to_fp8=False)
        loader.load_model(folder / "shards" / name)
        equal.append(all(distance(p, q) == 0 for p, q in zip(other.parameters(), expected.parameters(), strict=True)))
    return equal, len(written)


def test_shards_are_saved_as_one_file_by_one_rank(tmp_path):
    assert on_ranks(2, save_and_load, tmp_path) == [([True, True], 2), ([True, True], 0)]
    whole = Tied()
    trainer = FP8Trainer(whole, optimizer_of(whole, "adamw"), convert_model_to_fp8=False)
    expected = trainer.save_model(tmp_path / "whole")
    assert expected.read_bytes() == (tmp_path / "shards" / "model.safetensors").read_bytes()
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == ["model.pt", "model.safetensors"]
    trainer.load_model(tmp_path / "shards" / "model.pt")


def save_where_there_is_a_file(rank, path):
    model = fully_shard(Tied())
    trainer = FP8Trainer(model, optimizer_of(model, "adamw"), convert_model_to_fp8=False)
    with pytest.raises(RunError, match="cannot write"):
        trainer.save_model(path / "model.safetensors")


def test_a_file_that_cannot_be_written_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "taken").write_text("")
    on_ranks(2, save_where_there_is_a_file, tmp_path / "taken", limit=60)


def save_alone(rank, path):
    """As scripts for DDP do: rank 0 saves, the others do not even ask. Then all do."""
    model = nn.parallel.DistributedDataParallel(Tied())
    trainer = FP8Trainer(model, optimizer_of(model, "adamw"), convert_model_to_fp8=False)
    if rank == 0:
        trainer.save_model(path / "one.safetensors")
    trainer.save_model(path / "all.safetensors")
    distributed.barrier()
    return sorted(file.name for file in path.iterdir())


def test_rank_0_may_save_alone_what_it_has_whole(tmp_path):
    assert on_ranks(2, save_alone, tmp_path, limit=100) == [["all.safetensors", "one.safetensors"]] * 2
