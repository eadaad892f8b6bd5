"""Linears with one input as one FP8 product: values and every gradient, frozen weights, one graph under compile."""

import pytest
import torch
from bounds import assert_product_close
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from octavo import FP8Linear, FP8TrainingConfig
from octavo.nn.linear_function import linear
from octavo.numerics.scaling import SATURATED, SCALE, UNDERFLOW, new_states
from octavo.ops import linear as ops_linear
from octavo.ops.linear import LinearSpec
from octavo.ops.weight import Weight

CONFIGS = {
    **{name: FP8TrainingConfig.from_recipe(name) for name in ("delayed", "current", "channel", "block", "mx")},
    "block, channel wgrad": FP8TrainingConfig.from_recipe("block", wgrad="channel"),
    "E5M2": FP8TrainingConfig(fp8_format="E5M2"),
}
SIZES = (24, 40, 17)  # outputs of the three weights
K = 33


def spec_of(config, dtype=torch.float32, record=True):
    recipe = config.recipe
    return LinearSpec(recipe.x, recipe.w, recipe.g, dtype, record=record)


def group(x, weights, bias, spec, states):
    """`states`: scaling state of x, w and g."""
    return linear(x, Weight(weights, state=states[1]), spec, states[::2], bias=bias)


def fresh_states():
    return tuple(new_states(3, device="cpu").unbind())


def build(dtype=torch.float32, factors=(1.0, 4.0, 0.2)):
    x = torch.randn(2, 13, K, dtype=dtype, requires_grad=True)
    weights = [nn.Parameter(torch.randn(n, K, dtype=dtype) * f) for n, f in zip(SIZES, factors, strict=True)]
    return x, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_values_and_gradients(name, dtype):
    config = CONFIGS[name]
    x, weights = build(dtype)
    bias = nn.Parameter(torch.randn(sum(SIZES)))
    y = group(x, weights, bias, spec_of(config, torch.float32), fresh_states())
    g = torch.randn_like(y)
    y.backward(g)
    assert y.shape == (2, 13, sum(SIZES))
    forward, backward = config.recipe.x.format, config.recipe.g.format
    w, x_rows, g_rows = torch.cat([w.detach() for w in weights]), x.detach().reshape(-1, K), g.reshape(-1, sum(SIZES))
    assert_product_close(y.reshape(-1, sum(SIZES)) - bias, x_rows, w.mT, forward, forward)
    assert_product_close(x.grad.reshape(-1, K), g_rows, w, backward, forward)
    assert x.grad.dtype == dtype
    assert all(weight.grad.dtype == dtype for weight in weights)
    assert_product_close(torch.cat([weight.grad for weight in weights]), g_rows.mT, x_rows, backward, forward)
    torch.testing.assert_close(bias.grad, g_rows.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_group_is_separate_linears_with_a_shared_scale(name):
    config = CONFIGS[name]
    x, weights = build(factors=(1.0, 1.0, 1.0))
    if config.recipe.w.granularity == "block":
        weights = [nn.Parameter(torch.randn(128, K)) for _ in SIZES]  # else a block would span two of them
    with torch.no_grad():
        for w in weights:
            w[0, 0] = 4.5  # the same amax, so the same scale, alone or together
    group_states = fresh_states()
    together = group(x, weights, None, spec_of(config), group_states)
    alone = torch.cat([group(x, [w], None, spec_of(config), fresh_states()) for w in weights], dim=-1)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    if config.scaling == "delayed":
        assert group_states[1][SCALE] == torch.tensor(4.5) / config.recipe.w.format.max


@pytest.mark.parametrize("trained", [(), (1,), (0, 1, 2)])
@pytest.mark.parametrize("name", ["delayed", "block"])
def test_frozen_weights_cost_nothing(name, trained, monkeypatch):
    x, weights = build()
    for i, w in enumerate(weights):
        w.requires_grad_(i in trained)
    layouts = []
    quantize = ops_linear.quantize_group
    monkeypatch.setattr(ops_linear, "quantize_group", lambda *a, **k: (layouts.append(a[4]), quantize(*a, **k))[1])
    y = group(x, weights, None, spec_of(CONFIGS[name]), fresh_states())
    saved = [t for t in y.grad_fn.next_functions[0][0].saved_tensors if t is not None]
    y.backward(torch.randn_like(y))
    assert layouts == (["both", "both"] if trained else ["rows", "rows"])  # x, then g
    assert any(t.element_size() == 1 for t in saved) == bool(trained)
    assert [w.grad is not None for w in weights] == [i in trained for i in range(3)]
    assert x.grad is not None


def test_an_input_without_gradient(monkeypatch):
    x, weights = build()
    layouts = []
    quantize = ops_linear.quantize_group
    monkeypatch.setattr(ops_linear, "quantize_group", lambda *a, **k: (layouts.append(a[4]), quantize(*a, **k))[1])
    group(x.detach(), weights, None, spec_of(CONFIGS["delayed"]), fresh_states()).sum().backward()
    assert layouts == ["both", "columns"] and all(w.grad is not None for w in weights)


def test_only_the_bias_is_trained():
    x, weights = build()
    bias = nn.Parameter(torch.zeros(sum(SIZES)))
    state = fresh_states()
    frozen = [w.detach() for w in weights]
    group(x.detach(), frozen, bias, spec_of(CONFIGS["delayed"]), state).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full_like(bias, 26.0))
    assert not state[2].any()  # nothing asked for the gradient in FP8


def test_output_dtype_and_record():
    x, weights = build(torch.bfloat16)
    state = fresh_states()
    y = group(x, weights, None, spec_of(CONFIGS["delayed"], torch.float16, record=False), state)
    assert y.dtype == torch.float16 and not any(each.any() for each in state)


@pytest.mark.parametrize("name", CONFIGS)
def test_one_graph_under_compile(name):
    torch._dynamo.reset()
    x, weights = build()
    bias = nn.Parameter(torch.randn(sum(SIZES)))
    leaves = [x, bias, *weights]
    product = spec_of(CONFIGS[name])
    counter = CompileCounterWithBackend("aot_eager")

    def run(function, state):
        y = function(x, weights, bias, product, state)
        return [y, *torch.autograd.grad(y.square().sum(), leaves)]

    eager_states, compiled_states = fresh_states(), fresh_states()
    compiled = torch.compile(group, backend=counter, fullgraph=True)
    for _ in range(2):
        for a, b in zip(run(group, eager_states), run(compiled, compiled_states), strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1
    for a, b in zip(eager_states, compiled_states, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_decides_the_dtype():
    layer = FP8Linear(K, 20)
    x = torch.randn(5, K, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32


@pytest.mark.matrix
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_zero_rows_change_nothing(name, compiled, monkeypatch):
    """On tensor cores tokens are padded to whole tiles; here the specification is given the same rows."""
    torch._dynamo.reset()
    x, weights = build()
    bias = nn.Parameter(torch.randn(sum(SIZES)))
    g = torch.randn(2, 13, sum(SIZES))
    function = torch.compile(group, backend="aot_eager", fullgraph=True) if compiled else group

    def run(state):
        y = function(x, weights, bias, spec_of(CONFIGS[name]), state)
        return y, *torch.autograd.grad(y, (x, *weights, bias), g)

    plain, state = run(plain_states := fresh_states()), fresh_states()
    monkeypatch.setattr(ops_linear, "_pads", lambda *_: True)
    torch._dynamo.reset()
    for one, other in zip(run(state), plain, strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(state, plain_states, strict=True):
        other[[SATURATED, UNDERFLOW]] *= 26 / ops_linear.TILE  # shares of more elements
        torch.testing.assert_close(one, other)


def test_nothing_is_kept_without_gradients(monkeypatch):
    x, weights = build()
    layouts = []
    quantize = ops_linear.quantize_group
    monkeypatch.setattr(ops_linear, "quantize_group", lambda *a, **k: (layouts.append(a[4]), quantize(*a, **k))[1])
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            group(x, weights, None, spec_of(CONFIGS["delayed"], record=False), fresh_states())
    assert layouts == ["rows", "rows"]
