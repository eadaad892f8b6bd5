"""FP8Linear: an nn.Linear in every respect but the arithmetic."""

import copy

import pytest
import torch
from bounds import assert_product_close
from torch import nn

from octavo import FP8Linear, FP8TrainingConfig
from octavo.numerics.scaling import AMAX, CALLS, SCALE


@pytest.mark.parametrize("shape", [(20,), (1, 20), (6, 20), (2, 3, 5, 20)])
@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_backward(shape, bias):
    layer = FP8Linear(20, 30, bias=bias)
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    assert y.shape == (*shape[:-1], 30)
    g = torch.randn_like(y)
    y.backward(g)
    rows, g_rows, y_rows = x.reshape(-1, 20), g.reshape(-1, 30), y.reshape(-1, 30)
    assert_product_close(y_rows - layer.bias if bias else y_rows, rows, layer.weight.mT)
    assert_product_close(x.grad.reshape(-1, 20), g_rows, layer.weight, "E5M2", "E4M3")
    assert_product_close(layer.weight.grad, g_rows.mT, rows, "E5M2", "E4M3")
    if bias:
        torch.testing.assert_close(layer.bias.grad, g_rows.sum(0))


def test_state_dict_is_that_of_a_linear():
    layer, plain = FP8Linear(8, 4), nn.Linear(8, 4)
    assert list(layer.state_dict()) == ["weight", "bias"]
    layer.load_state_dict(plain.state_dict())
    plain.load_state_dict(layer.state_dict())
    assert layer.weight_master is layer.weight
    assert isinstance(layer, nn.Linear)


def test_from_linear_shares_the_parameters():
    plain = nn.Linear(8, 4).eval()
    layer = FP8Linear.from_linear(plain)
    assert layer.weight is plain.weight and layer.bias is plain.bias and not layer.training


def test_scaling_state_survives_casts_and_moves_with_identity():
    layer = FP8Linear(16, 16)
    layer(torch.randn(4, 16)).sum().backward()
    state, before = layer.state_x, layer.state_x.clone()
    layer.to(torch.bfloat16)
    assert layer.state_x is state and state.dtype == torch.float32 and torch.equal(state, before)
    assert layer(torch.randn(4, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_delayed_scale_stays_in_force_within_a_step_while_it_holds():
    layer = FP8Linear(16, 16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for value, in_force in ((1.0, 1.0), (1.02, 1.0), (0.5, 1.0), (3.0, 3.0), (2.0, 3.0)):  # micro-batches
        layer(value * torch.ones(4, 16)).sum().backward()
        assert layer.state_x[SCALE] == torch.tensor(in_force) / 448
    assert layer.state_x[AMAX] == 3
    actual = layer.scaling.statistics(reset=False)["linear.x"]
    assert actual["saturated"] == 0 and actual["rescaled"] == pytest.approx(1 / 5)
    optimizer.step()
    assert layer.state_x[SCALE] == torch.tensor(3.0) / 448
    optimizer.step()  # nothing new: nothing rolls
    assert layer.scaling.state_dict()["_steps"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("no_grad", [True, False])
def test_evaluation_learns_nothing(no_grad):
    """Also one that forgets `no_grad`: what it sees decides nothing that comes later."""
    layer = FP8Linear(16, 16)
    layer.train(no_grad)
    x = torch.randn(4, 16)
    with torch.set_grad_enabled(not no_grad):
        before = layer(x)
        layer(1e5 * x)
        assert torch.equal(layer(x), before)
    assert layer.state_x[CALLS] == 0 and layer.state_x[SCALE] == 0


def test_a_skipped_step_leaves_the_history_alone():
    layer = FP8Linear(16, 16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    layer(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    history = layer.scaling.state_dict()["_history"]
    x = torch.ones(4, 16)
    x[0, 0] = float("inf")
    layer(x).sum().backward()
    optimizer.step()
    assert torch.equal(layer.scaling.state_dict()["_history"], history)


def test_autocast_decides_the_output_dtype():
    layer = FP8Linear(16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch.randn(4, 16))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_empty_input():
    layer = FP8Linear(16, 8)
    layer(torch.randn(0, 16)).sum().backward()
    assert layer.weight.grad.eq(0).all()


def test_deepcopy_is_independent():
    layer = FP8Linear(16, 16)
    layer(torch.randn(4, 16)).sum().backward()
    twin = copy.deepcopy(layer)
    assert twin.state_x is twin.scaling.states[0] and twin.state_x is not layer.state_x
    twin(torch.randn(4, 16)).sum().backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert twin.scaling.state_dict()["_steps"].tolist() == [1, 1, 1]


def test_repr_names_the_recipe():
    text = repr(FP8Linear(8, 4, config=FP8TrainingConfig.from_recipe("block")))
    assert "E4M3·E4M3→E4M3 per block" in text and "scaling=current" in text


def test_insisting_on_tensor_cores_is_an_error_without_them():
    if torch.cuda.is_available():
        pytest.skip("this machine may have them")
    with pytest.raises(RuntimeError, match="emulate=False: FP8 not supported on this GPU"):
        FP8Linear(8, 4, config=FP8TrainingConfig(emulate=False))


def test_overfits_a_batch_as_well_as_fp32():
    x, target = torch.randn(64, 32), torch.randn(64, 8)

    def final_loss(make):
        torch.manual_seed(1)
        model = nn.Sequential(make(32, 128), nn.GELU(), make(128, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(150):
            loss = nn.functional.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    start = nn.functional.mse_loss(torch.zeros_like(target), target).item()
    fp32, fp8 = final_loss(nn.Linear), final_loss(FP8Linear)
    assert fp32 < start / 10 and fp8 < start / 10


@pytest.mark.parametrize("width", [17, 20, 31, 33, 1])
@pytest.mark.parametrize("recipe", ["delayed", "channel", "block", "mx"])
def test_a_wrong_width_is_an_error_even_if_it_pads_to_the_right_one(recipe, width):
    layer = FP8Linear(32, 16, config=FP8TrainingConfig.from_recipe(recipe))
    with pytest.raises(ValueError, match=f"input has {width} features; this FP8Linear takes 32"):
        layer(torch.randn(4, width))


def test_an_input_of_integers_is_an_error():
    """`nn.Linear` refuses them too; quantised, token ids would be numbers."""
    with pytest.raises(TypeError, match=r"input is in torch\.int64; this FP8Linear takes floating-point numbers"):
        FP8Linear(32, 16)(torch.arange(32))


def test_a_foreign_optimizer_does_not_roll_the_history():
    layer, other = FP8Linear(16, 16), nn.Linear(2, 2)
    mine = torch.optim.SGD(layer.parameters(), lr=0.0)
    foreign = torch.optim.SGD(other.parameters(), lr=0.0)
    for _ in range(3):
        layer(torch.ones(4, 16)).sum().backward()
        mine.step()
        layer(torch.ones(4, 16)).sum().backward()
        other(torch.ones(1, 2)).sum().backward()
        foreign.step()
    assert layer.scaling.state_dict()["_steps"].tolist() == [3, 3, 3]
