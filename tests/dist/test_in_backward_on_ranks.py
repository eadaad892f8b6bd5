"""Steps within backward on several ranks: refused where gradients are averaged later, and right under FSDP2."""

import torch
from dist_cases import adamw, converted, largest_difference, numbers, run, shard, simulated
from ranks import on_ranks
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from octavo import FP8Trainer
from octavo.optim import offload_master, step_in_backward

AVERAGED = "applied before they are averaged"


def refusals(rank):
    """What each way to step within backward says under DDP, before DDP is there, and under FSDP2."""
    model = converted("MLP", "current")
    before = (
        _said(step_in_backward, adamw(model.parameters())),
        _said(offload_master, model, adamw(model.parameters())),
    )
    model = converted("MLP", "current")
    wrapped = DistributedDataParallel(model)
    optimizer = adamw(wrapped.parameters())
    after = (
        _said(step_in_backward, optimizer),
        _said(step_in_backward, optimizer, offload=True),
        _said(offload_master, model, optimizer),
        _said(offload_master, wrapped, optimizer),
        _said(FP8Trainer, model, optimizer, release_gradients=True, convert_model_to_fp8=False),
        _said(FP8Trainer, model, optimizer, offload="master", convert_model_to_fp8=False),
    )
    unharmed = all(p._post_accumulate_grad_hooks is None for p in model.parameters()) and model.first.fp8_only is None
    sharded = shard(converted("MLP", "current"))
    return before, after, unharmed, _said(offload_master, sharded, adamw(sharded.parameters()))


def group_that_comes_later(rank):
    """Steps within backward are set up while there is one process, and ranks meet then."""
    model = converted("MLP", "current")
    world, distributed.group.WORLD = distributed.group.WORLD, None
    try:
        step_in_backward(adamw(model.parameters()))
    finally:
        distributed.group.WORLD = world
    return _said(model(torch.ones(4, 40), torch.ones(4, 24)).backward)


def through_the_callback(rank, folder):
    from trainer_cases import converted as small
    from trainer_cases import trainer

    from octavo import OctavoCallback

    said = []
    for options in ({"release_gradients": True}, {"offload": "master"}):
        ours = trainer(f"{folder}/{rank}", small(), [OctavoCallback(**options)], max_steps=1, max_grad_norm=0.0)
        assert ours.args.world_size == 2
        said.append(_said(ours.train))
    return said


def sharded_with_callback(rank, recipe):
    """Under FSDP2, with the callback's hooks around the steps: Accelerate has no FSDP2 on a CPU."""
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from octavo import OctavoCallback

    model = shard(converted("Llama", recipe))
    optimizer = adamw(model.parameters())
    arguments = TrainingArguments(max_grad_norm=0.0, use_cpu=True)
    assert arguments.world_size == 2
    callback = OctavoCallback(release_gradients=True, check_weights=False)
    callback.on_train_begin(arguments, TrainerState(), TrainerControl(), model=model, optimizer=optimizer)
    run(rank, model, "Llama", optimizer)
    released = [p.grad is None for p in model.parameters()]
    callback.on_train_end(arguments, TrainerState(), TrainerControl())
    return numbers(model), all(released)


def sharded(rank, kind, recipe):
    model = shard(converted(kind, recipe))
    optimizer = adamw(model.parameters())
    step_in_backward(optimizer)
    run(rank, model, kind, optimizer)
    return numbers(model)


def _said(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_gradients_that_are_averaged_later_are_refused():
    for before, after, unharmed, under_fsdp2 in on_ranks(2, refusals):
        assert all(AVERAGED in said for said in (*before, *after)), (before, after)
        assert before[0].startswith("step_in_backward on 2 ranks: 5 of 5 parameters are not sharded by FSDP2")
        assert unharmed
        assert under_fsdp2.startswith("offload_master with FSDP2: masters of shards are not supported")


def test_ranks_that_meet_later_are_refused_in_backward():
    assert all(AVERAGED in said for said in on_ranks(2, group_that_comes_later))


def test_the_callback_refuses_under_ddp(tmp_path):
    for said in on_ranks(2, through_the_callback, str(tmp_path)):
        assert said[0].startswith("OctavoCallback(release_gradients=True) on 2 ranks") and AVERAGED in said[0]
        assert said[1].startswith("OctavoCallback(offload='master') on 2 ranks") and AVERAGED in said[1]


def test_steps_in_backward_under_fsdp2_equal_simulated_ranks():
    expected = simulated("Llama", "block")
    for actual, released in on_ranks(2, sharded_with_callback, "block"):
        assert largest_difference(actual, expected) == 0
        assert released
    expected = simulated("MLP", "delayed")
    for actual in on_ranks(2, sharded, "MLP", "delayed"):
        assert largest_difference(actual, expected) == 0
