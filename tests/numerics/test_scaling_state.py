"""FP8ScalingManager's life around training: checkpoints, adopted rows, optimisers, copies, statistics."""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from octavo.numerics import E5M2, FP8ScalingManager, OperandRecipe, scaling
from octavo.numerics.operand import quantize_operand
from octavo.numerics.scaling import CALLS, SCALE, SLOTS

ALGORITHMS = ["max", "most_recent", "ema"]


def manager(**options):
    return FP8ScalingManager(**{"history_len": 3, "margin": 1.0, **options})


def train(m, steps, start=0, names=("x", "g")):
    """Deterministic amaxes, two micro-batches a step; the scales after each step."""
    actual = []
    for step in range(start, start + steps):
        for micro_batch in range(2):
            for i, name in enumerate(names):
                m.record(name, 1.0 + (step * 7 + micro_batch * 3 + i) % 11)
        m.step()
        actual.append([m.get_scale(name).item() for name in names])
    return actual


def trained(steps=5, **options):
    m = manager(**options)
    m.register("x")
    m.register("g", format=E5M2, margin=2.0)
    train(m, steps)
    return m


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("registered", [False, True])
def test_state_dict_round_trip_continues_identically(algorithm, interval, registered):
    m = trained(algorithm=algorithm, interval=interval)
    m.record("x", 100.0)  # in the middle of a step
    saved = io.BytesIO()
    torch.save(m.state_dict(), saved)
    saved.seek(0)
    fresh = manager(algorithm=algorithm, interval=interval)
    if registered:  # in another order
        states = {"g": fresh.register("g", format=E5M2, margin=2.0), "x": fresh.register("x")}
    fresh.load_state_dict(torch.load(saved, weights_only=True))
    if registered:
        assert all(fresh.register(name) is each for name, each in states.items())
    assert [fresh.get_scale(n) for n in ("x", "g")] == [m.get_scale(n) for n in ("x", "g")]
    assert train(fresh, 6, start=5) == train(m, 6, start=5)


def test_a_forgotten_history_would_be_noticed():
    """The check above can fail: restoring the scales without the history diverges."""
    m = trained()
    state = m.state_dict()
    state["_history"] = torch.zeros_like(state["_history"])
    fresh = manager()
    fresh.load_state_dict(state)
    assert train(fresh, 6, start=5) != train(m, 6, start=5)


def test_loading_before_layers_register_their_rows():
    m = trained()
    fresh = manager()
    fresh.load_state_dict(m.state_dict())
    mine = torch.zeros(SLOTS)
    assert fresh.register("g", format=E5M2, margin=2.0, state=mine) is mine
    assert torch.equal(mine, m.register("g"))
    assert train(fresh, 3, start=5) == train(m, 3, start=5)
    assert mine[SCALE] == m.register("g")[SCALE]


def test_a_saved_state_is_a_copy():
    m = trained()
    state = m.state_dict()
    before = copy.deepcopy(state)
    train(m, 3, start=5)
    for key, value in before.items():
        assert torch.equal(state[key], value) if isinstance(value, torch.Tensor) else state[key] == value


def test_an_empty_manager_saves_and_loads():
    fresh = manager()
    fresh.load_state_dict(manager().state_dict())
    assert fresh.names == [] and fresh.statistics() == {}
    fresh.step()


def test_another_history_length_is_refused():
    with pytest.raises(ValueError, match="history_len=5: the saved scaling state has 3"):
        manager(history_len=5).load_state_dict(trained().state_dict())


def test_a_state_for_another_format_is_not_taken_silently():
    """Saved for E5M2 (57344), used for E4M3 (448): everything would saturate by a factor of 128."""
    fresh = manager()
    fresh.register("g", format="E4M3", margin=2.0)
    try:
        fresh.load_state_dict(trained().state_dict())
    except ValueError as error:
        assert "g" in str(error)
    else:
        fresh.update_amax("g", 1000.0)
        assert fresh.get_scale("g") == 448.0 / 2000


def test_names_not_in_the_saved_state_keep_theirs():
    m = manager()
    m.update_amax("other", 8.0)
    m.load_state_dict(trained().state_dict())
    assert m.get_scale("other") == 56.0 and m.names == ["other", "x", "g"]
    m.record("other", 1.0)
    m.step()
    assert m.get_scale("other") == 56.0


def test_register_adopts_a_row_and_keeps_its_history():
    m = manager()
    m.update_amax("x", 8.0)
    mine = torch.zeros(SLOTS)
    assert m.register("x", state=mine) is mine and m.register("x") is mine
    assert mine[SCALE] == torch.tensor(8.0 / 448)
    m.update_amax("x", 2.0)
    assert m.get_scale("x") == 56.0 and mine[SCALE] == torch.tensor(8.0 / 448)
    first = torch.zeros(SLOTS)
    assert m.register("new", state=first) is first
    m.update_amax("new", 1.0)
    assert first[SCALE] == torch.tensor(1.0 / 448)


class Custom(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        return closure() if closure else None


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "Adam": lambda p: torch.optim.Adam(p, 0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1),
    "Custom": Custom,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_step_rolls(name):
    m = manager()
    m.follow_optimizers()
    parameter = nn.Parameter(torch.ones(3))
    optimizer = OPTIMIZERS[name]([parameter])
    for amax, expected in ((2.0, 2), (8.0, 8), (1.0, 8)):
        parameter.grad = torch.ones(3)
        m.record("x", amax)
        optimizer.step(lambda: torch.ones(())) if name == "LBFGS" else optimizer.step()
        assert 448 / m.get_scale("x").item() == expected
    before = m.state_dict()["_steps"].clone()
    optimizer.step(lambda: torch.ones(())) if name == "LBFGS" else optimizer.step()  # without a use
    assert torch.equal(m.state_dict()["_steps"], before)


def test_once_the_models_own_optimizer_has_stepped_others_do_not_count():
    """As of a discriminator beside a generator."""
    m, model = manager(), nn.Linear(3, 3)
    m.follow_optimizers(model)
    own, other = (torch.optim.SGD(x.parameters(), lr=0.1) for x in (model, nn.Linear(3, 3)))
    for optimizer in (other, own, other, other, own):
        optimizer.step()
    assert m.step_count == 3


def hooks():
    return len(scaling._followers)


def test_following_stops_with_the_manager():
    gc.collect()
    before = hooks()
    m = manager()
    m.follow_optimizers()
    assert hooks() == before + 1
    state = m.register("x")
    m.record("x", 2.0)
    del m
    gc.collect()
    assert hooks() == before
    OPTIMIZERS["SGD"]([nn.Parameter(torch.ones(1))]).step()
    assert state[SCALE] == 0


def test_a_manager_may_die_during_a_step():
    """As when the garbage collector finds an old model just then."""
    doomed, m = [manager()], manager()
    doomed[0].follow_optimizers()
    handle = torch_optimizer.register_optimizer_step_post_hook(lambda *_: doomed.clear())
    m.follow_optimizers()
    m.record("x", 2.0)
    OPTIMIZERS["SGD"]([nn.Parameter(torch.ones(1))]).step()
    handle.remove()
    assert not doomed and 448 / m.get_scale("x").item() == 2


def test_a_manager_that_does_not_follow_stays_put():
    m = manager()
    m.record("x", 2.0)
    OPTIMIZERS["SGD"]([nn.Parameter(torch.ones(1))]).step()
    assert m.get_scale("x") == 1.0
    gc.collect()
    before = hooks()
    copied = copy.deepcopy(m)
    assert hooks() == before and copied.names == ["x"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_follows_too_and_shares_nothing(duplicate):
    m = trained()
    m.follow_optimizers()
    copied = duplicate(m)
    copied.record("x", 128.0)
    OPTIMIZERS["SGD"]([nn.Parameter(torch.ones(1))]).step()
    assert copied.get_scale("x") == 3.5
    assert m.get_scale("x").item() != copied.get_scale("x").item()
    gc.collect()
    before = hooks()
    del copied
    gc.collect()
    assert hooks() == before - 1


def test_a_copied_model_keeps_its_rows_tied_to_the_copied_manager():
    m = manager()
    holder = {"manager": m, "row": m.register("x")}
    copied = copy.deepcopy(holder)
    assert copied["manager"].register("x") is copied["row"] and copied["row"] is not holder["row"]


def test_statistics_average_over_uses_and_reset():
    m = manager()
    state = m.register("x")
    assert m.statistics() == {}
    recipe = OperandRecipe(E5M2, delayed=True)
    quantize_operand(torch.tensor([[1.0, 2.0, 0.0, 0.0]]), state, recipe)
    quantize_operand(torch.tensor([[1.0, 1000.0, 0.0, 1e-30]]), state, recipe)
    actual = m.statistics()["x"]
    assert actual["amax"] == 1000 and actual["scale"] == state[SCALE]
    assert actual["saturated"] == 0 and actual["underflow"] == 1 / 8 and actual["rescaled"] == 1 / 2
    assert m.statistics() == {} and state[CALLS] == 0
    quantize_operand(torch.tensor([[1.0, 2.0, 0.0, 0.0]]), state, recipe)
    assert m.statistics()["x"]["rescaled"] == 0


def test_nothing_reads_uninitialised_memory(monkeypatch):
    """With every `torch.empty` filled with NaN, five steps end in the same state."""
    plain = trained().state_dict()
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        poisoned = trained().state_dict()
    finally:
        torch.use_deterministic_algorithms(False)
    for key, value in plain.items():
        assert torch.equal(poisoned[key], value) if isinstance(value, torch.Tensor) else poisoned[key] == value
