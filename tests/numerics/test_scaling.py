"""FP8ScalingManager: how scales follow amax histories, and what does not move them."""

import math

import numpy as np
import pytest
import torch

from octavo import FP8Linear
from octavo.numerics import E4M3, E5M2, FP8ScalingManager, FP8TrainingConfig, compute_scale
from octavo.numerics.quantize import SMALLEST_SCALE
from octavo.numerics.scaling import AMAX, NON_FINITE, SCALE, SEEN, SLOTS

BAD = [math.nan, math.inf, -math.inf]


def manager(**options):
    return FP8ScalingManager(**{"history_len": 4, "margin": 1.0, **options})


def amax_of(m, name="x"):
    """The amax behind a scale: FP8_MAX / (scale × margin)."""
    return 448.0 / (m.get_scale(name).item() * m.margin)


def run(m, amaxes, name="x"):
    actual = []
    for amax in amaxes:
        m.update_amax(name, amax)
        actual.append(amax_of(m, name))
    return actual


def test_the_quantising_multiplier():
    m = FP8ScalingManager()
    assert (m.history_len, m.margin) == (1024, 2.0)
    assert m.get_scale("x") == 1.0
    m.update_amax("x", 1.0)
    assert m.get_scale("x") == 224.0 and m.get_scale("x").shape == () and m.get_scale("x").dtype == torch.float32
    assert m.get_scale("y") == 1.0
    m.update_amax("x", torch.tensor(2.0, dtype=torch.bfloat16))
    assert m.get_scale("x") == 112.0


def test_the_multiplier_is_correctly_rounded():
    """A number divided by a tensor is `reciprocal × number` in torch: off by one unit for one amax in five."""
    m = manager()
    for amax in range(1, 100):
        m.update_amax(str(amax), float(amax))
        assert m.get_scale(str(amax)).item() == np.float32(448) / np.float32(amax)


@pytest.mark.parametrize("format", ["E4M3", "e5m2", E5M2, "E4M3_FNUZ"])
def test_the_format_sets_the_maximum(format):
    m = FP8ScalingManager(format=format)
    m.update_amax("x", 1.0)
    assert m.get_scale("x") == m.format.max / 2


def test_a_registered_tensor_has_its_own_format_and_margin():
    m = FP8ScalingManager()
    m.register("g", format=E5M2, margin=4.0)
    for name in ("x", "g"):
        m.update_amax(name, 1.0)
    assert (m.get_scale("x"), m.get_scale("g")) == (224.0, 57344 / 4)
    assert m.names == ["g", "x"]


def test_max_over_the_history_and_drop_out():
    assert run(manager(history_len=3), [1, 8, 2, 4, 1, 1, 1]) == [1, 8, 8, 8, 4, 4, 1]
    assert run(manager(history_len=1), [1, 8, 2]) == [1, 8, 2]


def test_most_recent():
    assert run(manager(algorithm="most_recent"), [1, 8, 2, 4]) == [1, 8, 2, 4]


def test_ema_is_nine_tenths_old_and_one_tenth_new():
    amaxes = np.array([1, 8, 2, 4, 4], np.float64)
    expected = [amaxes[0]]
    for amax in amaxes[1:]:
        expected.append(0.9 * expected[-1] + 0.1 * amax)
    # Two products, a sum, the division and margin, for five steps in FP32: under 30 roundings of 2^-24.
    np.testing.assert_allclose(run(manager(algorithm="ema"), amaxes), expected, rtol=30 * 2.0**-24)


@pytest.mark.parametrize("algorithm", ["max", "most_recent", "ema"])
def test_an_interval_recomputes_every_n_steps(algorithm):
    """The first step sets the scale; then steps 3, 6, … do. The history misses none of them."""
    m = manager(algorithm=algorithm, interval=3, history_len=8)
    actual = run(m, [1, 2, 4, 8, 16, 32])
    every = run(manager(algorithm=algorithm, history_len=8), [1, 2, 4, 8, 16, 32])
    assert actual == [every[0], every[0], every[2], every[2], every[2], every[5]]


@pytest.mark.parametrize("algorithm", ["max", "most_recent", "ema"])
@pytest.mark.parametrize("interval", [1, 5])
def test_an_all_zero_first_use_does_not_fix_the_scale(algorithm, interval):
    """LoRA's B is zero at the first step, and so is the gradient of A: the first amax that counts is the next one."""
    m = manager(algorithm=algorithm, interval=interval)
    m.update_amax("x", 0.0)
    assert m.get_scale("x") == 1.0
    m.update_amax("x", 2.0)
    assert m.get_scale("x") == 224.0


def test_a_zero_after_others_keeps_the_history():
    assert run(manager(), [2, 0, 0]) == [2, 2, 2]


@pytest.mark.parametrize("amax", [2.0**-149, 1e-40, 2.0**-126, 3e38])
def test_extreme_amax_gives_a_finite_positive_multiplier(amax):
    m = manager()
    m.update_amax("x", amax)
    multiplier, scale = m.get_scale("x"), m.states[0][SCALE]
    assert 0 < multiplier < math.inf
    assert scale >= SMALLEST_SCALE
    # The two words for one thing: each is a rounding or two from the other's reciprocal.
    assert abs(multiplier.item() * scale.item() - 1) < 4 * 2.0**-24


def test_record_takes_the_maximum_over_micro_batches_and_step_rolls_once():
    m = manager(history_len=2)
    for amax in (1.0, 4.0, 2.0):
        m.record("x", amax)
    assert m.get_scale("x") == 1.0  # nothing before the step
    m.step()
    assert amax_of(m) == 4
    # One entry for the three: with a history of two, it takes two more steps until 4 is forgotten.
    assert run(m, [1, 1]) == [4, 1]


def snapshot(m):
    state = m.state_dict()
    return [state[key].clone() for key in ("rows", "_history", "_amax", "_ema", "_steps")]


def unchanged(before, m):
    return all(torch.equal(a, b) for a, b in zip(before, snapshot(m), strict=True))


@pytest.mark.parametrize("algorithm", ["max", "most_recent", "ema"])
def test_stepping_twice_changes_nothing(algorithm):
    m = manager(algorithm=algorithm)
    run(m, [1, 8])
    m.record("x", 3.0)
    m.step()
    before = snapshot(m)
    m.step()
    assert unchanged(before, m)
    # The check can fail: a history that really advances twice differs.
    m.record("x", 3.0)
    m.step()
    assert not unchanged(before, m)


def test_a_planted_second_advance_is_caught(monkeypatch):
    """Planted bug: `step` rolls every row whether it was used or not."""
    m = manager()
    m.record("x", 3.0)
    m.step()
    before, real = snapshot(m), FP8ScalingManager._roll

    def roll_always(self):
        for state in self.states:
            state[SEEN] = 1
        real(self)

    monkeypatch.setattr(FP8ScalingManager, "_roll", roll_always)
    m.step()
    assert not unchanged(before, m)


def test_names_that_were_not_used_do_not_roll():
    m = manager(history_len=2)
    run(m, [5], "x")
    run(m, [7], "y")
    for _ in range(3):
        m.record("x", 1.0)
        m.step()
    assert (amax_of(m, "x"), amax_of(m, "y")) == (1, 7)
    assert m.state_dict()["_steps"].tolist() == [4, 1]


@pytest.mark.parametrize("bad", BAD)
def test_one_non_finite_value_anywhere_stops_every_history(bad):
    m = manager()
    for name in ("x", "y"):
        run(m, [2], name)
    m.record("x", 16.0)
    m.record("y", 4.0)
    m.record("y", bad)
    before = snapshot(m)
    m.step()
    after = snapshot(m)
    assert all(torch.equal(a, b) for a, b in zip(before[1:], after[1:], strict=True))
    assert amax_of(m, "x") == amax_of(m, "y") == 2
    assert (torch.stack(m.states)[:, [AMAX, SEEN, NON_FINITE]] == 0).all()  # the step is over, and forgotten
    m.record("x", 16.0)
    m.step()
    assert amax_of(m, "x") == 16


@pytest.mark.parametrize("bad", BAD)
def test_a_non_finite_update_changes_nothing(bad):
    m = manager()
    m.update_amax("x", bad)
    assert m.get_scale("x") == 1.0
    m.update_amax("x", 2.0)
    m.update_amax("x", bad)
    assert amax_of(m) == 2


def test_observe_takes_the_maximum_or_the_percentile():
    x = torch.arange(-128.0, 0.0)
    m = manager()
    m.observe("x", x)
    m.step()
    assert amax_of(m) == 128
    m = manager(percentile=50.0)
    m.observe("x", x)
    m.step()
    assert amax_of(m) == 64
    m.observe("x", torch.tensor([1.0, math.inf]))
    m.step()
    assert amax_of(m) == 64


@pytest.mark.parametrize("margin", [0.25, 1.0, 4.0])
def test_the_scale_that_layers_read_has_the_margin_that_get_scale_has(margin):
    m = manager(margin=margin)
    for amax in (2.0, 3.0, 1.0):
        m.update_amax("x", amax)
    assert m.states[0][SCALE] == torch.tensor(3.0) / 448 * margin and m.get_scale("x") == 448 / (3 * margin)
    layer = FP8Linear(16, 16, config=FP8TrainingConfig(margin=math.log2(margin)))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    x = torch.randn(4, 16)
    for _ in range(2):
        layer(x).sum().backward()
        optimizer.step()
    assert (
        layer.state_x[SCALE] == x.abs().max() / 448 * margin
        and layer.state_w[SCALE] == layer.weight.abs().max() / 448 * margin
    )


@pytest.mark.parametrize("learn", ["update_amax", "record", "observe"])
def test_an_amax_with_a_graph_is_taken_without_it(learn):
    """`update_amax(name, w.abs().max())`, as training scripts write it: three steps, each with its backward."""
    m, w = manager(), torch.ones(4, 4, requires_grad=True)
    for _ in range(3):
        getattr(m, learn)("w", w if learn == "observe" else w.abs().max())
        m.step()
        assert not any(state.requires_grad for state in m.states)
        assert not any(tensor.requires_grad for tensor in (m._history, m._amax, m._ema, m.get_scale("w")))
        (w * m.get_scale("w")).sum().backward()
    assert w.grad is not None and amax_of(m, "w") == 1


@pytest.mark.parametrize(("share", "percentage"), [(0.9999, 99.99), (0.5, 50), (0.999, 99.9)])
def test_a_percentile_may_be_a_share_or_a_percentage(share, percentage):
    x = torch.arange(1.0, 10_001.0)
    assert FP8TrainingConfig(percentile=share) == FP8TrainingConfig(percentile=percentage)
    assert compute_scale(x, percentile=share) == compute_scale(x, percentile=percentage)
    by_share, by_percentage = manager(percentile=share), manager(percentile=percentage)
    for m in (by_share, by_percentage):
        m.observe("x", x)
        m.step()
    assert by_share.get_scale("x") == by_percentage.get_scale("x")


@pytest.mark.parametrize("value", [1, 1.0, 0.01, 0.4999, 25, 49.9])
def test_a_percentile_that_may_mean_two_things_is_refused(value):
    for make in (
        lambda: FP8TrainingConfig(percentile=value),
        lambda: manager(percentile=value),
        lambda: compute_scale(torch.ones(4), percentile=value),
    ):
        with pytest.raises(ValueError, match=rf"percentile={value!r}: a percentage from 50 to 100.*share"):
            make()


def test_amax_must_be_one_number():
    with pytest.raises(ValueError, match=r"amax of 'x' has shape \(2,\).*observe"):
        manager().record("x", torch.ones(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"history_len": 0}, "history_len=0"),
        ({"history_len": 1.5}, r"history_len=1.5"),
        ({"interval": 0}, "interval=0"),
        ({"margin": 0}, "margin=0"),
        ({"margin": -1.0}, r"margin=-1.0"),
        ({"margin": math.nan}, "margin=nan"),
        ({"margin": math.inf}, "margin=inf"),
        ({"algorithm": "mean"}, "algorithm='mean': choose one of max, most_recent, ema"),
        ({"format": "E3M4"}, "format='E3M4'"),
        ({"percentile": 0}, "percentile=0"),
        ({"percentile": 101}, "percentile=101"),
    ],
)
def test_bad_options_name_field_and_value(options, message):
    with pytest.raises(ValueError, match=message):
        FP8ScalingManager(**options)


def test_from_config_reads_history_algorithm_interval_and_percentile():
    config = FP8TrainingConfig(
        amax_history_len=7, amax_compute_algo="ema", amax_update_interval=3, percentile=99.9, margin=4
    )
    m = FP8ScalingManager.from_config(config)
    assert (m.history_len, m.algorithm, m.interval, m.percentile) == (7, "ema", 3, 99.9)
    assert (m.margin, m.format) == (1.0, E4M3)  # operands bring their own


def test_rows_are_plain_fp32_numbers():
    state = manager().register("x")
    assert state.shape == (SLOTS,) and state.dtype == torch.float32 and not state.requires_grad and (state == 0).all()
