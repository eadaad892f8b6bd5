"""Tensor parallelism of linears: results, gradients, what is refused, and the names of torch that are relied on."""

from functools import partial

import numpy as np
import parallel_cases as cases
import pytest
import torch
from ranks import on_ranks
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import octavo
from octavo import FP8TrainingConfig
from octavo.nn.loss import FP8Head, linear_cross_entropy
from octavo.nn.parallel import layout_of
from octavo.nn.sequence import SequenceShard
from octavo.nn.styles import COLUMNS, ROWS, Style, is_sequence_parallel, prepared_inputs, style_of
from octavo.nn.vocabulary import Vocabulary
from octavo.numerics.scaling import new_states


def train(rank):
    """The parameters after some steps, converted before and after, by recipe."""
    results = {}
    for recipe in cases.RECIPES:
        for convert_first in (True, False):
            model = cases.parallel_linears(recipe, convert_first=convert_first)
            cases.train_linears(model)
            assert isinstance(model.up.weight, DTensor) and model.up.weight.placements == (Shard(0),)
            assert model.down.weight.placements == (Shard(1),) and model.down.bias.placements == (Replicate(),)
            results[recipe, convert_first] = cases.numbers(model)
    return results


def test_shards_are_multiplied_as_linears_of_their_size():
    ranks = on_ranks(2, train)
    for recipe in cases.RECIPES:
        expected = cases.Halves()
        octavo.convert_to_fp8(expected, recipe)
        cases.train_linears(expected)
        for rank in ranks:
            for convert_first in (True, False):
                assert cases.distance(rank[recipe, convert_first], expected.numbers()) == 0, recipe


def gradients(rank, recipe, hidden):
    model = cases.parallel_linears(recipe, convert_first=True, hidden=hidden)
    x = cases.tokens(0).requires_grad_()
    model(x).square().mean().backward()
    return cases.numbers(model, gradients=True) | {"x": x.grad.numpy()}


def gradients_of_one(recipe, hidden):
    model = cases.Whole(hidden)
    if recipe is not None:
        octavo.convert_to_fp8(model, recipe)
    x = cases.tokens(0).requires_grad_()
    model(x).square().mean().backward()
    return cases.numbers(model, gradients=True) | {"x": x.grad.numpy()}


def every_gradient(rank):
    return {(r, h): gradients(rank, r, h) for r in cases.RECIPES for h in (cases.HIDDEN, 203)}


def test_gradients_are_those_of_one_process():
    """Per block and per 32, up to the order of sums; else no farther than FP8 is from FP32. 203: ranks differ."""
    for rank in on_ranks(2, every_gradient):
        for (recipe, hidden), actual in rank.items():
            one, exact = gradients_of_one(recipe, hidden), gradients_of_one(None, hidden)
            far = cases.distance(one, exact)
            assert 0.005 < far < 0.1
            assert cases.distance(actual, exact) < 1.1 * far
            if hidden == cases.HIDDEN and recipe in ("block", "mx"):
                assert cases.distance(actual, one) < far / 50
            else:
                assert cases.distance(actual, one) < 1.5 * far


def saved_and_loaded(rank, folder):
    """Weights and states of a checkpoint of shards, read into another model; and all of them, as one process has it."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    states = []
    for fill in (True, False):
        model = cases.parallel_linears("block", convert_first=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if fill:
            cases.train_linears(model, 1)
            model(cases.tokens(0)).square().mean().backward()
            optimizer.step()
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        if fill:
            checkpoint.save(state, checkpoint_id=folder)
        else:
            checkpoint.load(state, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        full = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        flat = full[0] | {f"{n}.{k}": v for n, s in full[1]["state"].items() for k, v in s.items()}
        states.append({name: value.numpy().copy() for name, value in flat.items()})
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return states


def test_checkpoints_of_shards(tmp_path):
    one = cases.Whole()
    written, read = on_ranks(2, saved_and_loaded, str(tmp_path))[0]
    assert cases.distance(read, written) == 0 and "up.weight.exp_avg" in read
    one.load_state_dict({name: torch.from_numpy(read[name]) for name in one.state_dict()})


def odd_values(rank):
    model = cases.parallel_linears("block", convert_first=True)
    zeros = model(torch.zeros(2, 3, cases.WIDTH))
    nan = torch.zeros(1, 2, cases.WIDTH)
    nan[0, 1, 7] = torch.nan
    return zeros.detach().numpy(), model(nan).isnan().any(-1).numpy(), model(torch.zeros(0, cases.WIDTH)).shape


def test_zeros_nan_and_nothing():
    model = cases.Whole()
    octavo.convert_to_fp8(model, "block")
    expected = model(torch.zeros(2, 3, cases.WIDTH)).detach().numpy()
    for zeros, nan, empty in on_ranks(2, odd_values):
        np.testing.assert_allclose(zeros, expected, rtol=1e-4, atol=1e-5)
        assert nan.tolist() == [[False, True]]
        assert empty == (0, cases.WIDTH)


def test_layouts():
    r, p = Replicate(), Partial()
    assert layout_of(r, Shard(0), 3) == (Shard(2), p, Shard(0), Shard(0))
    assert layout_of(Shard(-1), Shard(-1), 3) == (p, Shard(2), Shard(1), r)
    assert layout_of(Shard(1), r, 3) == (Shard(1), Shard(1), p, p)
    assert layout_of(r, r, 3) == (r, r, r, r)
    for x, w in ((p, Shard(0)), (r, Shard(1)), (Shard(2), Shard(0)), (Shard(2), r), (Shard(1), Shard(1)), (r, p)):
        assert layout_of(x, w, 3) is None


def replicated(rank):
    """Tokens sharded, weights on each rank: gradients are summed over ranks."""
    model = octavo.FP8Linear(256, 128, config="block")
    mesh = cases.mesh()
    nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(0))
    nn.init.normal_(model.bias, generator=torch.Generator().manual_seed(1))
    for name, p in list(model.named_parameters()):
        model.register_parameter(name, nn.Parameter(distribute_tensor(p.data, mesh, [Replicate()])))
    x = distribute_tensor(cases.tokens(0, (2, 128, 256)), mesh, [Shard(0)])  # a block of 128 tokens on each
    y = model(x)
    assert y.placements == (Shard(0),)
    y.full_tensor().square().mean().backward()
    assert all(p.grad.placements == (Replicate(),) for p in model.parameters())
    return cases.numbers(model, gradients=True)


def test_tokens_that_are_sharded_beside_whole_weights():
    one = octavo.FP8Linear(256, 128, config="block")
    nn.init.normal_(one.weight, generator=torch.Generator().manual_seed(0))
    nn.init.normal_(one.bias, generator=torch.Generator().manual_seed(1))
    one(cases.tokens(0, (2, 128, 256))).square().mean().backward()
    expected = cases.numbers(one, gradients=True)
    for actual in on_ranks(2, replicated):
        assert cases.distance(actual, expected) < 1e-6  # FP32 sums in another order


def refusals(rank):
    messages = []

    def refused(call):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
        else:
            messages.append("")

    mesh = cases.mesh()
    model = cases.parallel_linears("block", convert_first=True)
    x = cases.tokens(0)
    refused(lambda: model.up.forward(x))
    refused(lambda: octavo.FP8Linear(256, 8, config="block")(distribute_tensor(x, mesh, [Replicate()])))
    refused(lambda: model.down(distribute_tensor(cases.tokens(0, (4, 512)), mesh, [Partial()])))
    refused(lambda: octavo.fp8_sequence_gather(model))
    percentile = cases.Whole()
    octavo.convert_to_fp8(percentile, FP8TrainingConfig.from_recipe("current", percentile=0.999))
    parallelize_module(percentile, mesh, {"up": ColwiseParallel(input_layouts=Shard(1))})
    refused(lambda: octavo.fp8_sequence_gather(percentile))
    sequence = cases.Whole()
    octavo.convert_to_fp8(sequence, "block")
    parallelize_module(sequence, mesh, {"up": ColwiseParallel(input_layouts=Shard(1))})
    octavo.fp8_sequence_gather(sequence)
    uneven = distribute_tensor(cases.tokens(0, (2, 63, 256)), mesh, [Shard(1)])
    refused(lambda: sequence.up(uneven))
    from octavo.nn.frozen import FP8FrozenLinear

    frozen = FP8FrozenLinear.from_linear(nn.Linear(256, 128))
    refused(lambda: frozen(distribute_tensor(x, mesh, [Replicate()])))
    refused(lambda: Vocabulary(distributed.group.WORLD, 3, 0, 3))
    return messages


def test_what_cannot_be_done_is_said():
    words = (
        "its input is not: call the module that was sharded", "its weight is not: name this linear in the plan",
        "redistribute the input before", "no FP8 linear that gathers tokens", "percentile of all tokens",
        "63 tokens on 2 ranks", "frozen in FP8 cannot be sharded", "leaves this one none of it",
    )  # fmt: skip
    for messages in on_ranks(2, refusals):
        assert len(messages) == len(words)
        for message, word in zip(messages, words, strict=True):
            assert word in message


def styles(rank):
    """What is read from torch's hooks: private names, and so held to what they are."""
    mesh = cases.mesh()
    model = cases.Whole()
    model.norm = nn.LayerNorm(cases.WIDTH)
    assert style_of(model.up) is None
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "": cases.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    }
    parallelize_module(model, mesh, {name: style for name, style in plan.items() if name})
    parallelize_module(model, mesh, plan[""])
    assert style_of(model.up) == Style(COLUMNS, mesh, Shard(1), Shard(-1), False)
    assert style_of(model.down) == Style(ROWS, mesh, Shard(-1), Shard(1), True)
    assert style_of(model.norm) is None and is_sequence_parallel(model.norm) and not is_sequence_parallel(model.up)
    ((_, prepared, on),) = prepared_inputs(model)
    assert prepared is plan[""] and on == mesh
    model.up.register_forward_hook(lambda *_: None)
    assert style_of(model.up) is None  # somebody else watches it
    return True


def test_styles_are_read_from_hooks():
    assert all(on_ranks(2, styles))


def loss_case(vocabulary, dtype, head):
    torch.manual_seed(0)
    hidden = torch.randn(300, 32).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, 32) / 3).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (300,))
    labels[::7] = -100
    options = {}
    if head:
        recipe = FP8TrainingConfig.from_recipe("current").recipe
        options = {"head": FP8Head(recipe.x, recipe.w), "states": (new_states(device="cpu"), new_states(device="cpu"))}
    return hidden, weight, labels, options


def loss_of(vocabulary, dtype, head, rank=None):
    hidden, weight, labels, options = loss_case(vocabulary, dtype, head)
    if rank is not None:
        rows = -(-vocabulary // 2)
        weight = weight.detach()[rank * rows : (rank + 1) * rows].clone().requires_grad_()
        options["vocabulary"] = Vocabulary(distributed.group.WORLD, rank * rows, len(weight), vocabulary)
    loss = linear_cross_entropy(hidden, weight, labels, **options)
    (loss * 3).backward()
    return loss.item(), hidden.grad.float(), weight.grad.float()


LOSSES = [(v, d, h) for v in (161, 64) for d in (torch.float32, torch.bfloat16) for h in (False, True)]


def parallel_losses(rank):
    import octavo.nn.loss as module

    module.CHUNK_BYTES = 256 * 80 * 4  # 256 tokens of 80 logits, or 128 of 81: ranks must not choose by themselves
    results = []
    for case in LOSSES:
        loss, dh, dw = loss_of(*case, rank)
        distributed.all_reduce(dh)
        results.append((loss, dh.numpy(), dw.numpy()))
    _, _, labels, _ = loss_case(161, torch.float32, False)
    labels[1] = 161
    with pytest.raises(IndexError, match="161 is not a token"):
        Vocabulary(distributed.group.WORLD, 0, 161, 161).cross_entropy(torch.zeros(300, 161), labels)
    return results


def test_loss_over_parts_of_the_vocabulary():
    ranks = on_ranks(2, parallel_losses, limit=100)
    for i, (vocabulary, dtype, head) in enumerate(LOSSES):
        (loss, *one), (_, *exact) = loss_of(vocabulary, dtype, head), loss_of(vocabulary, dtype, False)
        one, exact = ({"h": dh.numpy(), "w": dw.numpy()} for dh, dw in (one, exact))
        dws = np.concatenate([rank[i][2] for rank in ranks])
        for rank in ranks:
            assert abs(rank[i][0] / loss - 1) < (3e-3 if head else 1e-6 if dtype == torch.float32 else 1e-3)
            actual = {"h": rank[i][1], "w": dws}
            if head:  # the parts have scales of their own: no farther from high precision than with one for all
                assert cases.distance(actual, exact) < 1.1 * cases.distance(one, exact)
            else:  # FP32 sums in another order; a rounding of BF16
                assert cases.distance(actual, one) < (1e-5 if dtype == torch.float32 else 2**-8)


def gathers(rank):
    """The bytes of a linear whose tokens are sharded, with and without FP8; that its results have the same bits."""
    found = {}
    for recipe in cases.RECIPES:
        results = []
        for in_fp8 in (False, True):
            model = octavo.FP8Linear(256, 512, config=recipe)
            nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(0))
            nn.init.normal_(model.bias, generator=torch.Generator().manual_seed(1))
            parallelize_module(model.to(torch.bfloat16), cases.mesh(), ColwiseParallel(input_layouts=Shard(1)))
            assert not in_fp8 or octavo.fp8_sequence_gather(model) == 1
            x = cases.tokens(3, (2, 256, 256)).chunk(2, dim=1)[rank].bfloat16().requires_grad_()
            with cases.Wire() as forward:
                y = model(x * 1)
            with cases.Wire() as backward:
                y.float().square().mean().backward()
            tensors = [y, x.grad, model.weight.grad.to_local(), model.bias.grad.to_local()]
            if model.recipe.x.granularity == "tensor":
                tensors.append(model.state_x[:4])  # as if this rank had seen all tokens
            results.append([t.detach().float().numpy().copy() for t in tensors])
            found[recipe, in_fp8] = (dict(forward.sent), dict(backward.sent))
        for plain, fp8 in zip(*results, strict=True):
            np.testing.assert_array_equal(plain, fp8)
    return found


def test_gathers_in_fp8_have_the_same_bits_and_half_the_bytes():
    elements = 2 * 128 * 256  # of x on one rank
    scales = {"block": 4 / 128, "mx": 1 / 32, "channel": 4 / 256, "current": 4 / 256, "delayed": 4 / 256}
    again = {"block": 1 + 4 / 128, "mx": 1 + 1 / 32, "channel": 1, "current": 0, "delayed": 0}  # in backward
    for sent in on_ranks(2, gathers):
        for recipe in cases.RECIPES:
            forward, backward = sent[recipe, True]
            assert sent[recipe, False][0]["gather"] == 2 * elements  # BF16
            assert forward["gather"] == elements * (1 + scales[recipe])
            assert backward.get("gather", 0) == elements * again[recipe]
            assert backward["reduce_scatter"] == sent[recipe, False][1]["reduce_scatter"]


def straddling(rank):
    """Groups of 128 and 32 tokens that two ranks share: x is sent as it is, and quantised on arrival."""
    results = {}
    for recipe, shape, dim in (("block", (2, 40, 256), 1), ("mx", (2, 40, 256), 1), ("block", (6, 256), 0)):
        outcomes = []
        for in_fp8 in (False, True):
            model = octavo.FP8Linear(256, 96, bias=False, config=recipe)
            nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(0))
            parallelize_module(model, cases.mesh(), ColwiseParallel(input_layouts=Shard(dim)))
            assert not in_fp8 or octavo.fp8_sequence_gather(model) == 1
            x = cases.tokens(3, shape).chunk(2, dim=dim)[rank].clone().requires_grad_()
            model(x).square().mean().backward()
            outcomes.append([t.numpy().copy() for t in (x.grad, model.weight.grad.to_local())])
        results[recipe, shape] = [float(np.abs(a - b).max()) for a, b in zip(*outcomes, strict=True)]
    return results


def test_gathers_of_groups_that_straddle_ranks():
    for results in on_ranks(2, straddling):
        assert all(difference == [0, 0] for difference in results.values()), results


def test_order_of_gathered_tokens():
    shard = partial(SequenceShard, _Two())
    assert (
        shard(1, (3, 8, 5)).runs == (3, 4)
        and shard(0, (8, 5)).runs == (1, 4)
        and shard(1, (2, 4, 6, 5)).runs == (2, 12)
    )


class _Two:
    def size(self):
        return 2
