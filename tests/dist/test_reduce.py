"""Gradients that travel in FP8 or BF16: bytes, distance from FP32 sums, losses, NaN; under FSDP2 and DDP."""

import math

import pytest
import torch
from dist_cases import adamw, batch, converted, loss_of, shard
from ranks import on_ranks
from torch import distributed, nn
from torch.distributed.tensor import DTensor

import octavo
from octavo.dist import reduce

STEPS = 40


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def wrapped(engine, dtype, kind="MLP", **changes):
    model = converted(kind, "delayed", **changes)
    model = shard(model) if engine == "fsdp2" else nn.parallel.DistributedDataParallel(model)
    return model, None if dtype is None else octavo.reduce_gradients(model, dtype)


def gradients(rank, engine, dtype, spoil=None):
    model, _ = wrapped(engine, dtype)
    inputs = batch("MLP", 0, rank)
    if spoil is not None and rank == 1:
        inputs["y"][:, 3] = spoil  # the gradients of one row of the head
    loss_of(model, inputs).backward()
    return {name.removeprefix("module."): whole(p.grad).clone() for name, p in model.named_parameters()}


def distance(actual, expected):
    a, b = (torch.cat([g.flatten() for g in each.values()]) for each in (actual, expected))
    return ((a - b).norm() / b.norm()).item()


def trained(rank, engine, dtype):
    """Weights after a few steps, and after one more without."""
    model, handle = wrapped(engine, dtype)
    optimizer = adamw(model.parameters())
    weights = []
    for i in range(4):
        if i == 3:
            handle.remove()
        loss_of(model, batch("MLP", i, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(torch.cat([whole(p.detach()).flatten() for p in model.parameters()]).numpy())
    return weights[2:]


def last_losses(rank, dtype):
    """The mean loss over ranks of the last steps of 40, of a decoder that sees four batches again and again."""
    model, _ = wrapped("fsdp2", dtype, "Llama", num_hidden_layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for i in range(STEPS):
        loss = loss_of(model, batch("Llama", i % 4, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    mean = torch.stack(found)
    distributed.all_reduce(mean)
    return mean[0].item() / 2, mean[-4:].mean().item() / 2


def compare_losses(rank):
    return {dtype: last_losses(rank, dtype) for dtype in (None, "fp8")}


def test_losses_after_forty_steps():
    found, _ = on_ranks(2, compare_losses)
    (begin, expected), (_, actual) = found[None], found["fp8"]
    assert expected < begin - 0.2
    assert abs(actual / expected - 1) <= 1e-3


class Sent:
    """Bytes that a rank sends by all-to-all and by all-gather, or would by FP32 reduce-scatter."""

    def __enter__(self):
        self.bytes, self._original = {}, (distributed.all_to_all_single, reduce.all_gather)
        distributed.all_to_all_single = self._count("all_to_all", self._original[0])
        reduce.all_gather = self._count("all_gather", self._original[1])
        return self

    def _count(self, name, function):
        def call(received, sent, *args, **kwargs):
            self.bytes[name] = self.bytes.get(name, 0) + sent.nbytes
            return function(received, sent, *args, **kwargs)

        return call

    def __exit__(self, *_):
        distributed.all_to_all_single, reduce.all_gather = self._original


def measure(rank, engine):
    found = {"distance": {}, "bytes": {}, "weights": {}}
    expected = gradients(rank, engine, None)
    found["size"] = sum(g.numel() for g in expected.values())
    for dtype in ("fp8", "bf16"):
        with Sent() as sent:
            actual = gradients(rank, engine, dtype)
        found["distance"][dtype], found["bytes"][dtype] = distance(actual, expected), sent.bytes
        found["weights"][dtype] = trained(rank, engine, dtype)
    for spoil in (math.nan, math.inf):
        bad = gradients(rank, engine, "fp8", spoil=spoil)
        found[str(spoil)] = bad["head.bias"].isfinite().tolist()
        assert not bad["first.weight"].isfinite().any()  # all of it depends on that output
    return found


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_gradients(engine):
    first, second = on_ranks(2, measure, engine)
    for dtype, most in (("fp8", 0.03), ("bf16", 0.004)):
        assert 0 < first["distance"][dtype] <= most  # half a step of E4M3 is 1/16, of BF16 2^-9
        for mine, theirs in zip(first["weights"][dtype], second["weights"][dtype], strict=True):
            assert (mine == theirs).all()
    for spoil in (math.nan, math.inf):
        assert first[str(spoil)] == [place != 3 for place in range(24)]
    in_fp32 = 4 * first["size"]
    sent = first["bytes"]
    if engine == "fsdp2":
        assert sent["fp8"]["all_to_all"] <= 0.27 * in_fp32 and set(sent["fp8"]) == {"all_to_all"}
        assert sent["bf16"]["all_to_all"] <= 0.51 * in_fp32
    else:  # the sums return to all ranks in BF16: half of them from each
        assert sent["fp8"]["all_to_all"] <= 0.27 * in_fp32 and sent["fp8"]["all_gather"] <= 0.26 * in_fp32


def sums(rank):
    """Odd sizes, zeros, tiny and huge values, and an order of ranks that is always the same."""
    results = {}
    for size in (1, 127, 128, 129, 300):
        generator = torch.Generator().manual_seed(rank)
        g = torch.randn(3, size, generator=generator) * torch.tensor([1.0, 1e-30, 1e30]).view(3, 1)
        exact = g.clone()
        distributed.all_reduce(exact)
        one, two = (reduce.exchange_and_sum(g, "fp8", None) for _ in range(2))
        assert torch.equal(one, two) and one.dtype == torch.float32
        results[size] = ((one - exact[rank]).abs().max() / g.abs().amax(dim=1)[rank]).item()
    assert reduce.exchange_and_sum(torch.zeros(3, 5), "fp8", None).tolist() == [0] * 5
    return results


def test_sums_of_odd_sizes():
    for results in on_ranks(3, sums):
        assert all(
            error <= 3 / 16 for error in results.values()
        )  # three values, each off by half a step of its largest


def test_what_is_refused():
    with pytest.raises(ValueError, match="dtype='int8'"):
        octavo.reduce_gradients(nn.Linear(2, 2), "int8")
    with pytest.raises(ValueError, match="fully_shard"):
        octavo.reduce_gradients(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="are summed"):
        reduce.SmallReduceScatter("fp8")(torch.zeros(1), torch.zeros(1), None, distributed.ReduceOp.AVG)
