"""Classes that Octavo and FSDP2 both give to a module, in either order, and back."""

import pytest
import torch
from dist_cases import MLP, adamw, batch, layers, loss_of, plain, shard
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import octavo
from octavo.nn.linear import FP8Linear
from octavo.nn.sharded import plain_class
from octavo.optim import offload_master


def classes_of(model):
    return {name: (plain_class(module), isinstance(module, FSDPModule)) for name, module in model.named_modules()}


def units(model):
    """All linears, and layers of a decoder around them."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return linears if isinstance(model, MLP) else [*linears, *layers(model)]


def convert_and_restore(rank, kind):
    """Restored, a model has the classes that it had, units are units, and it computes what it computed before."""
    expected = shard(plain(kind), units)
    before = classes_of(expected)
    wanted = loss_of(expected, batch(kind, 0, rank)).item()
    found = {}
    for order in ("sharded, converted", "converted, sharded"):
        model = plain(kind)
        if order == "sharded, converted":
            shard(model, units)
            octavo.convert_to_fp8(model, "block")
        else:
            octavo.convert_to_fp8(model, "block")
            shard(model, units)
        assert any(isinstance(module, FP8Linear) for module in model.modules())
        in_fp8 = loss_of(model, batch(kind, 0, rank)).item()
        octavo.restore(model)
        loss = loss_of(model, batch(kind, 0, rank))
        loss.backward()
        assert all(isinstance(p.grad, DTensor) for p in model.parameters() if p.requires_grad)
        adamw(model.parameters()).step()
        found[order] = (classes_of(model) == before, loss.item() == wanted, in_fp8 != wanted)
    return found


@pytest.mark.parametrize("kind", ["MLP", "Llama"])
def test_restore_keeps_units(kind):
    for found in on_ranks(2, convert_and_restore, kind):
        assert found == dict.fromkeys(["sharded, converted", "converted, sharded"], (True, True, True))


def shard_after_offload(rank):
    model = MLP()
    octavo.convert_to_fp8(model, "block")
    with pytest.raises(ValueError, match="offload_master"):
        offload_master(model, adamw(model.parameters()))
    fully_shard(model)
    with pytest.raises(ValueError, match="offload_master with FSDP2: masters of shards are not supported"):
        offload_master(model, adamw(model.parameters()))
    return all(torch.isfinite(p.full_tensor()).all().item() for p in model.parameters())


def test_masters_of_shards_are_refused():
    assert on_ranks(2, shard_after_offload) == [True, True]
