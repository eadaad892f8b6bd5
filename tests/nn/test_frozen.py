"""A linear frozen in FP8: products against FP32, bytes that survive casts, and no way to train it by mistake."""

import copy
import io

import pytest
import torch
from bounds import cosine
from torch import nn

from octavo import FP8TrainingConfig
from octavo.nn.frozen import FROZEN_GRANULARITIES, SCALE_NAME, FP8FrozenLinear, FrozenTensor, quantize_weight
from octavo.numerics.quantize import Quantized
from octavo.ops.weight import Weight

SIZES = [(300, 200), (128, 256), (576, 192), (16, 1), (1, 16), (33, 7)]


def build(granularity, k=300, n=200, bias=True, dtype=torch.bfloat16):
    torch.manual_seed(0)
    linear = nn.Linear(k, n, bias=bias, dtype=dtype)
    # Rows that differ a lot: a scale that goes to the wrong place would show.
    with torch.no_grad():
        linear.weight.mul_(torch.logspace(-2, 2, n)[:, None].to(dtype))
    return linear, FP8FrozenLinear.from_linear(linear, granularity)


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
@pytest.mark.parametrize(("k", "n"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forward_and_backward_against_the_dequantised_weight(granularity, k, n, dtype):
    linear, frozen = build(granularity, k, n, dtype=dtype)
    x = torch.randn(2, 9, k, dtype=dtype, requires_grad=True)
    y = frozen(x)
    g = torch.randn_like(y)
    y.backward(g)
    w = frozen.dequantize(torch.float32)
    assert y.shape == (2, 9, n) and y.dtype == dtype and x.grad.dtype == dtype
    assert cosine(y, x.detach().float() @ w.T + linear.bias.float()) > 0.998
    assert cosine(x.grad, g.float() @ w) > 0.9975
    assert frozen.weight.grad is None
    torch.testing.assert_close(frozen.bias.grad, g.float().sum((0, 1)).to(dtype))


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
@pytest.mark.parametrize(("k", "n"), SIZES)
def test_products_in_high_precision(granularity, k, n):
    """By the dequantised weight, exactly, and by no copy of it that lives on."""
    _, frozen = build(granularity, k, n)
    frozen.fp8_products = False
    x = torch.randn(2, 9, k, dtype=torch.bfloat16, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = frozen(x)
    g = torch.randn_like(y)
    y.backward(g)
    w = frozen.dequantize(torch.bfloat16)
    assert torch.equal(y, nn.functional.linear(x, w, frozen.bias))
    assert not saved
    assert torch.equal(x.grad, (g.reshape(-1, n) @ w).reshape(x.shape))
    torch.testing.assert_close(frozen.bias.grad, g.float().sum((0, 1)).bfloat16())
    assert "products in high precision" in repr(frozen)


def test_products_in_high_precision_take_autocast_and_graphs():
    _, frozen = build("block")
    frozen.fp8_products = False
    x = torch.randn(9, 300, requires_grad=True)
    w = frozen.dequantize(torch.bfloat16)
    expected = nn.functional.linear(x.bfloat16(), w, frozen.bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(frozen(x), expected)
    compiled = torch.compile(frozen, fullgraph=True, backend="aot_eager")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = compiled(x.bfloat16())
    assert not any(tensor.is_floating_point() and tensor.numel() == w.numel() for tensor in saved)
    y.sum().backward()
    assert torch.equal(y, expected) and x.grad.dtype == torch.float32


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
def test_transposing_the_weight_changes_no_product(granularity):
    weight = quantize_weight(torch.randn(200, 300).mul_(torch.logspace(-2, 2, 200)[:, None]), granularity)
    g = torch.randn(5, 200)
    w = Weight([weight.data], [weight.scale])
    factor = w.row_factor(None, None)
    actual = (g if factor is None else g * factor) @ w.dgrad_operand(None, None).dequantize().T
    torch.testing.assert_close(actual, g @ weight.dequantize(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
def test_casts_and_copies_leave_the_bytes_alone(granularity):
    _, frozen = build(granularity)
    x = torch.randn(3, 300, dtype=torch.bfloat16)
    before = frozen(x)
    for change in (lambda m: m.to(torch.float16), lambda m: m.float(), lambda m: m.half(), lambda m: m.double()):
        copied = copy.deepcopy(frozen)
        change(copied)
        assert copied.weight.dtype == torch.uint8
        assert torch.equal(copied.to(torch.bfloat16)(x), before)
    assert torch.equal(pickled(frozen).weight, frozen.weight)


def pickled(module):
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = FP8FrozenLinear(300, 200, granularity=module.granularity, dtype=torch.bfloat16)
    other.load_state_dict(torch.load(file))
    return other


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
def test_state_dict(granularity):
    linear, frozen = build(granularity)
    state = frozen.state_dict()
    assert list(state) == ["weight", "bias", SCALE_NAME]
    assert state["weight"].dtype == torch.float8_e4m3fn and state[SCALE_NAME].dtype == torch.float32
    x = torch.randn(3, 300, dtype=torch.bfloat16)
    for given in (state, linear.state_dict()):  # FP8, or a weight to quantise
        other = FP8FrozenLinear(300, 200, granularity=granularity, dtype=torch.bfloat16)
        other.load_state_dict(given, strict=given is state)
        assert torch.equal(other(x), frozen(x))
    missing = {name: value for name, value in state.items() if name != SCALE_NAME}
    with pytest.raises(RuntimeError, match=SCALE_NAME):
        FP8FrozenLinear(300, 200, granularity=granularity).load_state_dict(missing)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda m: m.requires_grad_(True),
        lambda m: m.weight.requires_grad_(),
        lambda m: setattr(m.weight, "requires_grad", True),
        lambda m: [p.requires_grad_(True) for p in nn.Sequential(m).parameters()],
        lambda m: nn.Sequential(m).requires_grad_(True),
    ],
)
def test_it_cannot_be_trained_by_hand(attempt):
    _, frozen = build("block")
    with pytest.raises(ValueError, match="full_finetuning=True"):
        attempt(frozen)
    frozen.requires_grad_(False)
    assert not frozen.weight.requires_grad and not frozen.bias.requires_grad


def test_wrong_weights_are_refused():
    frozen = FP8FrozenLinear(300, 200, granularity="block")
    with pytest.raises(RuntimeError, match="no weight yet"):
        frozen(torch.randn(2, 300))
    data = torch.zeros(200, 300).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"weight has shape \(300, 200\)"):
        frozen.set_weight(Quantized(data.t(), torch.ones(3, 2)))
    with pytest.raises(ValueError, match=r"weight_scale_inv has shape \(3, 3\).* takes \(2, 3\)"):
        frozen.set_weight(Quantized(data, torch.ones(3, 3)))
    with pytest.raises(ValueError, match="granularity='row'"):
        FP8FrozenLinear(300, 200, granularity="row")
    with pytest.raises(ValueError, match="7 features"):
        build("block")[1](torch.randn(2, 7))


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
def test_compiled_as_one_graph(granularity):
    _, frozen = build(granularity)
    x = torch.randn(4, 300, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(frozen, backend="aot_eager", fullgraph=True)
    y = compiled(x)
    y.sum().backward()
    actual = x.grad
    x.grad = None
    expected = frozen(x)
    expected.sum().backward()
    assert torch.equal(y, expected) and torch.equal(actual, x.grad)


def test_empty_input_and_no_bias():
    _, frozen = build("block", bias=False)
    assert frozen(torch.zeros(0, 300, dtype=torch.bfloat16)).shape == (0, 200)
    assert frozen(torch.zeros(4, 300, dtype=torch.bfloat16)).abs().max() == 0


def test_other_recipes_beside_the_weight():
    linear, _ = build("channel")
    frozen = FP8FrozenLinear.from_linear(linear, "channel", FP8TrainingConfig.from_recipe("channel", fp8_format="E4M3"))
    x = torch.randn(64, 300, dtype=torch.bfloat16, requires_grad=True)
    y = frozen(x)
    g = torch.randn_like(y)
    y.backward(g)
    assert cosine(x.grad, g.float() @ frozen.dequantize(torch.float32)) > 0.9993  # closer than with E5M2
    assert isinstance(frozen.weight, FrozenTensor)


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("refill", ["fill", "load_state_dict"])
def test_a_weight_filled_anew_before_backward_is_an_error(granularity, compiled, refill):
    """As autograd has it for any weight: dx would be by another weight than y."""
    linear, frozen = build(granularity)
    # With the partitioner that Inductor uses: it keeps the weight itself, which autograd then looks after.
    call = torch.compile(frozen, fullgraph=True, backend="aot_eager_decomp_partition") if compiled else frozen
    x = torch.randn(4, 300, dtype=torch.bfloat16, requires_grad=True)
    y = call(x)
    if refill == "fill":
        frozen.set_weight(quantize_weight(-linear.weight, granularity))
    else:
        frozen.load_state_dict({"weight": -linear.weight.detach(), "bias": linear.bias.detach()})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    call(x).sum().backward()
    assert cosine(x.grad, torch.ones(4, 200) @ frozen.dequantize(torch.float32)) > 0.99


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
def test_a_linear_on_the_meta_device_is_filled_by_assignment(granularity):
    """As engines do that load on one rank: they go by the dtypes that they find, and cast to them."""
    _, frozen = build(granularity)
    x = torch.randn(4, 300, dtype=torch.bfloat16)
    expected, state = frozen(x), frozen.state_dict()
    empty = copy.deepcopy(frozen).to("meta")
    assert {name: (p.dtype, p.shape.numel()) for name, p in empty.named_parameters()} == {
        name: (value.dtype, value.numel()) for name, value in state.items()
    }
    empty.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
    assert empty.weight.dtype == torch.uint8 and getattr(empty, SCALE_NAME).dtype == torch.int32
    assert torch.equal(empty(x), expected)
    assert torch.equal(empty.to(torch.float16).quantized.data.view(torch.uint8), frozen.weight)


def test_a_linear_that_leaves_the_meta_device_empty_stores_bits():
    _, frozen = build("block")
    state, x = frozen.state_dict(), torch.randn(4, 300, dtype=torch.bfloat16)
    expected = frozen(x)
    empty = copy.deepcopy(frozen).to("meta").to_empty(device="cpu")
    assert empty.weight.dtype == torch.uint8 and getattr(empty, SCALE_NAME).dtype == torch.int32
    empty.load_state_dict(state)
    assert torch.equal(empty(x), expected)


def test_a_scale_for_the_whole_weight_has_a_dimension_that_files_do_not_have():
    """FSDP2 shards no tensor without dimensions."""
    _, frozen = build("tensor")
    assert getattr(frozen, SCALE_NAME).shape == (1,)
    assert frozen.quantized.scale.shape == frozen.state_dict()[SCALE_NAME].shape == ()


def test_scales_that_were_cast_to_integers_are_refused():
    _, frozen = build("block")
    state = frozen.state_dict()
    state[SCALE_NAME] = state[SCALE_NAME].int()
    with pytest.raises(RuntimeError, match=f"{SCALE_NAME} is in torch.int32: something has cast it from float32"):
        frozen.load_state_dict(state)
