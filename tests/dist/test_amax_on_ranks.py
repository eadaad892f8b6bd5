"""One scaling state for all ranks: equal histories, one all-reduce a step, and no hang where ranks differ."""

import copy
import gc
import time
import weakref
from unittest.mock import Mock

import pytest
import torch
from dist_cases import adamw, batch, converted, loss_of, numbers, shard
from ranks import on_ranks
from torch import distributed, nn

import octavo
from octavo.dist import amax, together
from octavo.numerics.scaling import LAST_AMAX, NON_FINITE, SCALE

DDP = nn.parallel.DistributedDataParallel


class Counted:
    """Counts the all-reduces that begin while it is entered, and their bytes."""

    def __enter__(self):
        self.sizes, self._original = [], distributed.all_reduce
        distributed.all_reduce = self
        return self

    def __call__(self, tensor, *args, **kwargs):
        self.sizes.append(tensor.nbytes)
        return self._original(tensor, *args, **kwargs)

    def __exit__(self, *_):
        distributed.all_reduce = self._original


def manager_of(model):
    return amax.managers_of(model)[0]


def scales(manager):
    """What decides the next step: scales in force, newest amax and histories."""
    state = manager.state_dict()
    slots = state["rows"][:, [SCALE, LAST_AMAX, NON_FINITE]]
    return torch.cat([slots.flatten(), *(state[n].float().flatten() for n in ("_history", "_amax", "_ema", "_steps"))])


def histories(manager):
    return torch.cat([each.float().flatten() for each in manager.histories()])


def step(model, optimizer, inputs):
    loss_of(model, inputs).backward()
    optimizer.step()
    optimizer.zero_grad()


def share(rank):
    """Under DDP: histories local, then shared, then after a NaN on one rank, then local again."""
    model = DDP(converted("MLP", "delayed"))
    optimizer = adamw(model.parameters())
    seen = {}
    step(model, optimizer, batch("MLP", 0, rank))
    seen["local"] = scales(manager_of(model)).numpy()
    shared = octavo.share_amax(model)
    with Counted() as counted:
        for i in (1, 2):
            step(model, optimizer, batch("MLP", i, rank))
    seen["all-reduces"] = counted.sizes
    seen["shared"], before = scales(manager_of(model)).numpy(), histories(manager_of(model))
    bad = batch("MLP", 3, rank)
    if rank == 1:
        bad["x"][0, 0] = float("nan")
    loss_of(model, bad).backward()
    for p in model.parameters():
        p.grad = None  # as a loop that leaves out such gradients, on every rank
    optimizer.step()
    seen["after NaN"] = scales(manager_of(model)).numpy()
    assert torch.equal(histories(manager_of(model)), before)  # nothing rolled, on any rank
    assert copy.deepcopy(model.module.first).scaling.exchange is None
    assert amax.is_shared(manager_of(model))
    shared.remove()
    assert manager_of(model).exchange is None and not amax.is_shared(manager_of(model))
    step(model, optimizer, batch("MLP", 4, rank))
    seen["local again"] = scales(manager_of(model)).numpy()
    seen["parameters"] = numbers(model)["module.first.weight"]
    return seen


def test_all_ranks_have_one_state():
    first, second = on_ranks(2, share)
    for name in ("shared", "after NaN", "parameters"):
        assert (first[name] == second[name]).all(), name
    for name in ("local", "local again"):
        assert (first[name] != second[name]).any(), name
    # The first step also compares names (a header of eight numbers) and joins the histories of nine operands; each step
    # has a header, and four numbers for each of them.
    header, histories = 8 * 4, [9 * 32 * 4, 9 * 4, 9 * 4, 9 * 8]
    assert first["all-reduces"] == [header, *histories, *[header + 9 * 4 * 4] * 2]


def fewer_products(rank):
    model = converted("MLP", "delayed")
    if rank == 1:
        model.head = nn.Linear(48, 24)
        octavo.restore(model)
        octavo.convert_to_fp8(model, octavo.FP8TrainingConfig(skip=("head",)))
    octavo.share_amax(model)
    loss_of(model, batch("MLP", 0, rank)).backward()
    start = time.monotonic()
    with pytest.raises(ValueError, match="ranks multiply different things") as error:
        adamw(model.parameters()).step()
    return str(error.value), time.monotonic() - start


def test_ranks_with_other_products_are_told_at_once():
    for message, seconds in on_ranks(2, fewer_products, limit=90):
        assert "rank 1 lacks 3 of rank 0 and has 0 others (head." in message
        assert "share_amax(model, group=...)" in message
        assert seconds < 30


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Parameter(torch.randn(64, 64) / 8), nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x, products):
        for weight in (self.a, self.b, self.a)[:products]:
            x = x @ weight
        return x.square().mean()


def branches(rank, products):
    """Steps of an autocast, by the products that this rank runs in each; the error of the last."""
    model, context = DDP(Branches(), find_unused_parameters=True), octavo.fp8_autocast()
    optimizer = adamw(model.parameters())
    shared = octavo.share_amax(context)
    for i, by_rank in enumerate(products):
        with context:
            loss = model((rank + i + 1) * torch.ones(8, 64), by_rank[rank])
        loss.backward()
        if i < len(products) - 1:
            optimizer.step()
    before, start = histories(context.scaling), time.monotonic()
    with Counted() as counted:
        try:
            optimizer.step()
        except ValueError as error:
            assert torch.equal(histories(context.scaling), before) and time.monotonic() - start < 10
            return str(error)
        finally:
            shared.remove()
    return len(counted.sizes), scales(context.scaling).numpy()


def branches_in_turn(rank, cases):
    return [branches(rank, case) for case in cases]


def branches_on_a_gpu(rank):
    """Steps as on a GPU, where nobody waits for the header; without other collectives, which would."""
    amax._is_read_at_once = lambda _device: False
    model, context = Branches(), octavo.fp8_autocast()
    optimizer = adamw(model.parameters())
    octavo.share_amax(context)
    for i, products in enumerate([1, 2, 3 - rank, 2]):
        with context:
            loss = model((rank + i + 1) * torch.ones(8, 64), products)
        loss.backward()
        try:
            optimizer.step()
        except ValueError as error:
            return str(error)
    raise AssertionError("no error")


def test_a_product_that_one_rank_alone_has_is_named_a_step_later_on_a_gpu():
    one, other = on_ranks(2, branches_on_a_gpu, limit=90)
    assert one.startswith("rank 0, step 3: this rank has multiplied something new (")
    assert other.startswith("rank 1, step 4: another rank has multiplied something new in the last step")


def test_nobody_waits_for_a_header_while_a_cuda_graph_is_captured(monkeypatch):
    """CUDA refuses to wait for an event meanwhile. The step behind the graph reads what the step before it has sent."""
    header, sent = amax._HeaderOnItsWay(), torch.ones(amax.HEADER)
    header.send(sent)
    header._event = Mock()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert header.receive() is None and not header._event.synchronize.called
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert torch.equal(header.receive(), sent) and header._event.synchronize.called
    assert header.receive() is None


def test_a_product_that_one_rank_alone_has_is_named_at_once():
    cases = [[(1, 1), (2, 2), (3, 2)], [(1, 2)], [(1, 1), (2, 2), (3, 3)], [(1, 1), (2, 2), (2, 2)]]
    ones, others = on_ranks(2, branches_in_turn, cases, limit=90)
    assert ones[0].startswith("rank 0, step 3: this rank has multiplied something new (")
    assert others[0].startswith("rank 1, step 3: another rank has multiplied something new and this one has not")
    for message in (ones[0], others[0], ones[1], others[1]):
        assert "share_amax(model, group=...) for ranks that run the same products" in message
    assert "rank 1 lacks 0 of rank 0 and has 3 others" in ones[1] and ones[1] == others[1]
    # Something new on all ranks: a header with what was agreed, four tensors of histories, and all maxima.
    for one, other, reduces in zip(ones[2:], others[2:], (6, 1), strict=True):
        assert one[0] == other[0] == reduces and (one[1] == other[1]).all()


def skipped_step(rank, call):
    amax.LIMIT = 2.0
    model = converted("MLP", "delayed")
    model = shard(model) if call == "fp8_all_gather" else model
    getattr(octavo, call)(model)
    optimizer = adamw(model.parameters())
    step(model, optimizer, batch("MLP", 0, rank))
    loss_of(model, batch("MLP", 1, rank)).backward()
    if rank == 1:
        time.sleep(4)  # its gradients were not finite, say, so it goes on without a step
        return ""
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="could not be reduced within 2 s") as error:
        optimizer.step()
    assert time.monotonic() - start < 30
    return str(error.value)


@pytest.mark.parametrize("call", ["share_amax", "fp8_all_gather"])
def test_a_rank_that_skips_a_step_is_missed(call):
    message, _ = on_ranks(2, skipped_step, call, limit=90)
    assert message.startswith("rank 0, step 2:") and "optimizer.step() equally often" in message
    assert message.endswith(f"train without octavo.{call}")


def destroyed(rank, folder):
    """Groups that live on have threads, of which a process dies at its end. Then ranks meet again."""
    model = converted("MLP", "delayed")
    optimizer = adamw(model.parameters())
    shared = octavo.share_amax(model)
    assert together.from_all(rank) == together.from_all(rank) == [0, 1]
    step(model, optimizer, batch("MLP", 0, rank))
    groups = [weakref.ref(group) for group in distributed.distributed_c10d._world.pg_map]
    distributed.barrier()
    distributed.destroy_process_group()
    left = sum(group() is not None for group in groups)
    loss_of(model, batch("MLP", 1, rank)).backward()
    with pytest.raises(RuntimeError, match=r"was destroyed: call remove\(\)"):
        optimizer.step()
    shared.remove()
    optimizer.step()
    store = distributed.FileStore(f"{folder}/again", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    octavo.share_amax(model)
    step(model, optimizer, batch("MLP", 2, rank))
    return len(groups), left, together.from_all(rank)


def test_no_group_outlives_destroy_process_group(tmp_path):
    assert on_ranks(2, destroyed, str(tmp_path), limit=90) == [(3, 0, [0, 1])] * 2


def models_in_turn(rank):
    """On one rank alone, something still holds the scales of a model that was trained when another takes a step."""
    amax.LIMIT = 5.0
    model = converted("MLP", "delayed")
    octavo.share_amax(model)
    optimizer = adamw(model.parameters())
    step(model, optimizer, batch("MLP", 0, rank))
    left = manager_of(model) if rank == 1 else None
    del model, optimizer
    gc.collect()
    other = nn.Linear(8, 8)
    other(torch.ones(4, 8)).sum().backward()
    adamw(other.parameters()).step()
    return left and left.step_count


def test_a_model_that_is_gone_takes_no_part_in_the_steps_of_another():
    assert on_ranks(2, models_in_turn, limit=90) == [None, 1]


def test_a_rank_has_thirty_seconds():
    assert amax.LIMIT == 30


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        octavo.share_amax(converted("MLP", "delayed"))


def unconverted(rank):
    with pytest.raises(ValueError, match="convert_to_fp8"):
        octavo.share_amax(nn.Linear(4, 4))
    context = octavo.fp8_autocast()
    octavo.share_amax(context)
    model = nn.Linear(32, 32)
    optimizer = adamw(model.parameters())
    for _ in range(2):
        with context:
            loss = model((rank + 1) * torch.ones(16, 32)).square().mean()
        loss.backward()
        optimizer.step()
    newest = max(state[LAST_AMAX].item() for state in context.scaling.states)
    return scales(context.scaling).numpy(), newest


def test_products_of_an_autocast():
    (first, newest), (second, _) = on_ranks(2, unconverted)
    assert (first == second).all() and newest == 2  # the larger of two inputs, which is larger than all else
