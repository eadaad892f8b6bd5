"""FSDP2 that gathers in FP8: the same bits as without, about half of BF16's bytes, one all-reduce a step."""

import inspect
import io
import pickle
import warnings

import pytest
import torch
from dist_cases import MLP, RECIPES, adamw, batch, converted, largest_difference, loss_of, numbers, shard
from ranks import on_ranks
from test_amax_on_ranks import Counted
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import octavo
from octavo.dist import gather
from octavo.nn.gathered import GatheredWeight
from octavo.numerics import Quantized

# Shards on two ranks consist of whole groups of 32 rows, and are wide enough for scales per row to be few.
WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4, "num_hidden_layers": 4}


def trained(
    rank, kind, recipe, fp8, *, steps=2, prepare=None, between=None, dtype=None, autocast=False, changes=None, **options
):
    """Parameters after some steps under FSDP2, with or without gathering in FP8."""
    model = converted(kind, recipe, **(changes or {}))
    model = model if dtype is None else model.to(dtype)
    if prepare is not None:
        prepare(model)
    shard(model, **options)
    gathers = octavo.fp8_all_gather(model) if fp8 else None
    optimizer = adamw(model.parameters())
    for i in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, batch(kind, i, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            gathers = between(i, model, gathers)
    return numbers(model), model


def difference(rank, kind, recipe, **how):
    plain, in_fp8 = (trained(rank, kind, recipe, fp8, **how)[0] for fp8 in (False, True))
    return largest_difference(in_fp8, plain)


def every_recipe(rank, cases):
    return {case: difference(rank, *case) for case in cases}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_bits_are_those_of_plain_fsdp2(world):
    # Three ranks do not divide 64 rows, and blocks of 128 straddle shards and weights everywhere.
    cases = [("Llama", recipe) for recipe in RECIPES if world > 1 or recipe != "current"]
    cases += [("MLP", recipe) for recipe in RECIPES] if world == 2 else []
    for found in on_ranks(world, every_recipe, cases):
        assert found == dict.fromkeys(cases, 0.0)


def under_a_policy(rank, cases):
    """The loss before the first step, where weights are not on BF16's grid by chance, and parameters after some."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    found = {}
    for kind, recipe in cases:
        first = []
        for fp8 in (False, True):
            model = shard(converted(kind, recipe), mp_policy=policy)
            if fp8:
                octavo.fp8_all_gather(model)
            first.append(loss_of(model, batch(kind, 0, rank)).item())
        found[kind, recipe] = first[1] - first[0], difference(rank, kind, recipe, mp_policy=policy)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_weights_are_rounded_as_the_policy_says(world):
    cases = [("MLP", recipe) for recipe in RECIPES]
    for found in on_ranks(world, under_a_policy, cases):
        assert found == dict.fromkeys(cases, (0.0, 0.0))


def two_optimizers(rank, recipes):
    """How often each history has rolled in three steps, and parameters, of weights and biases in optimisers apart."""

    def rolls(recipe, fp8):
        model = shard(converted("MLP", recipe))
        if fp8:
            octavo.fp8_all_gather(model)
        parts = [[p for p in model.parameters() if (p.dim() > 1) is weights] for weights in (True, False)]
        optimizers = [adamw(part) for part in parts]
        for i in range(3):
            loss_of(model, batch("MLP", i, rank)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        manager = model.octavo_report.scaling
        return numbers(model), dict(zip(manager.names, manager.histories()[-1].tolist(), strict=True))

    found = {}
    for recipe in recipes:
        (plain, expected), (in_fp8, rolled) = rolls(recipe, False), rolls(recipe, True)
        found[recipe] = largest_difference(in_fp8, plain), {n: rolled[n] - expected[n] for n in rolled if n[-1] == "w"}
    return found


def test_a_second_optimizer_rolls_no_history_again():
    for found in on_ranks(2, two_optimizers, ("delayed", "current", "block")):
        for recipe, (moved, more) in found.items():
            assert moved == 0.0, recipe
            assert recipe == "block" or (len(more) == 3 and not any(more.values())), more


def whole_blocks(rank):
    """Shards of whole blocks and groups: all scales travel with the values."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 16}
    sizes["num_hidden_layers"] = 1
    found = {recipe: difference(rank, "Llama", recipe, changes=sizes) for recipe in ("block", "mx")}
    _, model = trained(rank, "Llama", "block", True, steps=1, changes=sizes)
    products = {id(w.product): w.product for w in _members(model)}.values()
    return found, [product.shared for product in products]


def _members(model):
    return [
        m.weight._local_tensor.fsdp_pre_all_gather.func.__self__ for m in model.modules() if type(m) is octavo.FP8Linear
    ]


def test_scales_of_whole_blocks_travel_beside_them():
    for found, shared in on_ranks(2, whole_blocks):
        assert found == {"block": 0.0, "mx": 0.0}
        assert not any(shared)


def options(rank):
    """Units that keep weights, activations computed again, weights that change between steps, undoing, BF16."""

    def checkpointed(model):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    @torch.no_grad()
    def change(_step, model, gathers):
        for p in model.parameters():
            p.mul_(1.5)
        return gathers

    @torch.no_grad()
    def change_unseen(_step, model, gathers):
        torch._foreach_mul_([p.data for p in model.parameters()], 3.0)
        if gathers is not None:
            gathers.refresh()
        return gathers

    @torch.no_grad()
    def evaluate_others(_step, model, gathers):
        """Weights are swapped for an evaluation, as averages of them are; these are larger."""
        trained = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.mul_(2)
        loss_of(model.eval(), batch("MLP", 9, 0))
        model.train().reshard()
        for p, before in zip(model.parameters(), trained, strict=True):
            p.copy_(before)
        return gathers

    def undo(step, model, gathers):
        if gathers is not None and step == 0:
            gathers.remove()
            assert not any(hasattr(p._local_tensor, "fsdp_pre_all_gather") for p in model.parameters())
            return None
        return octavo.fp8_all_gather(model) if step == 1 else gathers

    def share(model):
        octavo.share_amax(model)

    found = {}
    for recipe in ("delayed", "channel", "mx"):
        found[recipe, "kept"] = difference(rank, "MLP", recipe, reshard_after_forward=False)
    for recipe in ("channel", "mx"):  # in the first backward rows are fetched, later they come along
        found[recipe, "checkpointed"] = difference(rank, "Llama", recipe, prepare=checkpointed)
    found["changed"] = difference(rank, "MLP", "delayed", between=change, steps=3)
    found["changed unseen"] = difference(rank, "MLP", "delayed", between=change_unseen, steps=3)
    found["others evaluated"] = difference(rank, "MLP", "delayed", between=evaluate_others, steps=4)
    plain = trained(rank, "MLP", "delayed", False, steps=4)[0]
    found["undone"] = largest_difference(trained(rank, "MLP", "delayed", True, steps=4, between=undo)[0], plain)
    found["shared"] = difference(rank, "MLP", "delayed", prepare=share, steps=3)
    found["BF16"] = difference(rank, "Llama", "delayed", dtype=torch.bfloat16)
    found["autocast"] = difference(rank, "Llama", "block", autocast=True)
    return found


def test_options_change_no_bit():
    for found in on_ranks(2, options):
        assert found == dict.fromkeys(found, 0.0)


def counted(rank):
    """Bytes that a rank sends in a step, in BF16 and in FP8, and the all-reduces of a step."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    original, sent = collectives.DefaultAllGather.__call__, []

    def call(self, output_tensor, input_tensor, *args, **kwargs):
        sent.append(input_tensor.nbytes)
        return original(self, output_tensor, input_tensor, *args, **kwargs)

    collectives.DefaultAllGather.__call__ = call
    found = {}
    for recipe in ("BF16", "delayed", "channel", "block", "mx"):
        model = shard(converted("Llama", "delayed" if recipe == "BF16" else recipe, **WIDE).bfloat16())
        if recipe != "BF16":
            octavo.fp8_all_gather(model)
            octavo.share_amax(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for i in range(2):
            sent.clear()
            with Counted() as reduced:
                loss_of(model, batch("Llama", i, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
        found[recipe] = sum(sent) + sum(reduced.sizes), len(reduced.sizes)
    return found


def test_bytes_and_all_reduces_of_a_step():
    (found, _) = on_ranks(2, counted)
    plain, none = found.pop("BF16")
    assert none == 0
    for recipe, (in_fp8, reduces) in found.items():
        assert reduces == 1, recipe  # of shared scales and of weights together
        assert in_fp8 <= 0.56 * plain, recipe


def plainness(rank, folder):
    """Parameters, states of the optimiser and files are those of plain FSDP2."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.tensor import DTensor

    weights, model = trained(rank, "MLP", "block", True)
    kept = io.BytesIO()
    torch.save({name: p.to_local() for name, p in model.state_dict().items()}, kept)
    kept.seek(0)
    assert len(torch.load(kept, weights_only=True)) == 5
    with pytest.raises(TypeError, match=r"save model\.state_dict\(\)"):
        pickle.dumps(model.first.weight._local_tensor)
    for p in model.parameters():
        assert type(p.data) is DTensor and type(p._local_tensor) is torch.Tensor and p.dtype == torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(get_model_state_dict(model), checkpoint_id=folder)
        other = shard(converted("MLP", "block"))
        octavo.fp8_all_gather(other)
        loss_of(other, batch("MLP", 0, rank))  # before loading: its scales are those of other weights
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state)
    losses = [loss_of(m, batch("MLP", 9, rank)).item() for m in (model, other)]
    other.reshard()
    return largest_difference(numbers(other), weights), losses


def test_files_and_parameters_stay_plain(tmp_path):
    for moved, (before, after) in on_ranks(2, plainness, str(tmp_path / "checkpoint")):
        assert moved == 0 and before == after


def replicated(rank):
    """Two replicas of two shards each."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return {recipe: difference(rank, "MLP", recipe, mesh=mesh) for recipe in ("delayed", "mx")}


def test_replicas_of_shards():
    for found in on_ranks(4, replicated):
        assert found == {"delayed": 0.0, "mx": 0.0}


def while_it_is_active(rank):
    model = shard(converted("MLP", "delayed"))
    gathers = octavo.fp8_all_gather(model)
    expected = loss_of(model, batch("MLP", 0, rank)).item()
    with pytest.raises(ValueError, match=r"in FP8 already: call remove\(\)"):
        octavo.fp8_all_gather(model)
    for part in (model, model.first):
        with pytest.raises(ValueError, match=r"call remove\(\) on what octavo\.fp8_all_gather returned"):
            octavo.restore(part)
    assert loss_of(model, batch("MLP", 0, rank)).item() == expected
    gathers.remove()
    octavo.fp8_all_gather(model).remove()
    octavo.restore(model)
    in_fp32 = loss_of(shard(MLP()), batch("MLP", 0, rank)).item()
    return loss_of(model, batch("MLP", 0, rank)).item() - in_fp32


def test_a_second_call_and_restore_are_refused():
    assert on_ranks(2, while_it_is_active) == [0.0, 0.0]


def refusals(rank):
    model = converted("MLP", "delayed")
    with pytest.raises(ValueError, match="fully_shard"):
        octavo.fp8_all_gather(model)
    unconverted = shard(nn.Sequential(nn.Linear(8, 8)), units=list)
    with pytest.raises(ValueError, match="convert_to_fp8"):
        octavo.fp8_all_gather(unconverted)
    with_percentile = nn.Sequential(nn.Linear(32, 32))
    octavo.convert_to_fp8(with_percentile, octavo.FP8TrainingConfig(percentile=99.0))
    with pytest.raises(ValueError, match="percentile"):
        octavo.fp8_all_gather(shard(with_percentile, units=list))
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(32, 32))
    octavo.convert_to_fp8(empty)
    with pytest.raises(ValueError, match="meta device"):
        octavo.fp8_all_gather(shard(empty, units=list))
    compiled = shard(converted("MLP", "delayed"))
    compiled.first.compile(backend="eager")
    with pytest.raises(ValueError, match="first is compiled"):
        octavo.fp8_all_gather(compiled)
    for place in (lambda model: model, lambda model: model.first):
        later = shard(converted("MLP", "delayed"))
        octavo.fp8_all_gather(later)
        place(later).compile(backend="eager")
        with pytest.raises(Exception, match=r"leave out torch\.compile or octavo\.fp8_all_gather"):
            loss_of(later, batch("MLP", 0, rank))  # else without the gradients of what is compiled
    gather._NAMES["FSDPParam"] = (*gather._NAMES["FSDPParam"], "_gone")
    with pytest.raises(RuntimeError, match=r"FSDPParam\._gone"):
        octavo.fp8_all_gather(shard(model))


def test_what_cannot_be_gathered_is_refused():
    on_ranks(1, refusals)


def test_the_private_names_of_fsdp2():
    """Beyond names: hooks of one argument that may be set after sharding, and one tensor where there is one rank."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    parameter, unit = _fsdp_param.FSDPParam, _fsdp_param_group.FSDPParamGroup
    for kind, owner in (("FSDPParam", parameter), ("FSDPParamGroup", unit)):
        assert all(hasattr(owner, name) for name in gather._NAMES[kind])

    def source(function):
        return "".join(inspect.getsource(function).split())

    asked, made = source(parameter.all_gather_inputs.fget), source(parameter.init_unsharded_param)
    assert "num_fn_paramsnotin(1,5)" in asked and 'hasattr(self._sharded_local_tensor,"fsdp_pre_all_gather")' in asked
    assert 'hasattr(self,"_unsharded_param")' in made and "out=self._unsharded_param" in made
    assert "len(self.all_gather_outputs)>0" in source(parameter.init_all_gather_outputs)
    assert "fsdp_param.all_gather_inputs[0]" in source(unit.wait_for_unshard)
    assert {state.name for state in _fsdp_param_group.TrainingState} >= {"FORWARD", "PRE_BACKWARD"}
    assert torch.__version__.startswith(("2.11", "2.12", "2.13")), "look through FSDP2 of this torch, then add it here"


class Stored:
    shape, dtype, device = torch.Size([3, 4]), torch.bfloat16, torch.device("cpu")

    def dequantized(self):
        return Quantized(torch.ones(3, 4).to(torch.float8_e4m3fn), torch.tensor(2.0)).dequantize(self.dtype)


def test_a_gathered_weight_reads_as_its_values_and_cannot_be_written_to():
    weight = nn.Parameter(GatheredWeight(Stored()))
    assert isinstance(weight, GatheredWeight) and weight.shape == (3, 4) and weight.dtype == torch.bfloat16
    assert weight.float().sum() == 24 and "GatheredWeight" in repr(weight)
    assert nn.functional.linear(torch.ones(1, 4, dtype=torch.bfloat16), weight).tolist() == [[8, 8, 8]]
    with torch.no_grad(), pytest.raises(RuntimeError, match="gathered in FP8"):
        weight.mul_(2)
