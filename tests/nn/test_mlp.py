"""The gated MLP in FP8 as one function, and the activation it is made of."""

import math

import pytest
import torch
import torch.nn.functional as F
from activation_cases import REFERENCES, least_cosine
from bounds import cosine
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from octavo import FP8TrainingConfig
from octavo.nn.mlp_function import gated_mlp
from octavo.numerics.activation import ACTIVATIONS, gated, gated_backward
from octavo.numerics.scaling import new_states
from octavo.ops import linear as ops_linear
from octavo.ops.linear import LinearSpec
from octavo.ops.mlp import MLPSpec
from octavo.ops.weight import Weight

CONFIGS = {
    **{name: FP8TrainingConfig.from_recipe(name) for name in ("delayed", "current", "channel", "block", "mx")},
    "block, channel wgrad": FP8TrainingConfig.from_recipe("block", wgrad="channel"),
    "E5M2": FP8TrainingConfig(fp8_format="E5M2"),
}
K, HIDDEN = 40, 72


def mlp_of(config, activation="silu", dtype=torch.float32, **options):
    recipe = config.recipe
    return MLPSpec(LinearSpec(recipe.x, recipe.w, recipe.g, dtype), activation, **options)


def run_mlp(x, gate, up, down, mlp, states, states_down):
    """`states`, `states_down`: scaling state of input, weight and gradient of each product."""
    weights = Weight([gate, up], state=states[1]), Weight([down], state=states_down[1])
    return gated_mlp(x, *weights, mlp, states[::2], states_down[::2])


def fresh_states():
    return tuple(new_states(3, device="cpu").unbind())


def build(dtype=torch.float32):
    x = torch.randn(3, 19, K, dtype=dtype, requires_grad=True)
    shapes = ((HIDDEN, K), (HIDDEN, K), (K, HIDDEN))
    return [x, *(nn.Parameter(torch.randn(s, dtype=dtype) / math.sqrt(s[1])) for s in shapes)]


def exact(leaves, activation):
    x, gate, up, down = leaves
    return F.linear(REFERENCES[activation].function(F.linear(x, gate)) * F.linear(x, up), down)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("saves_fp8", [False, True])
def test_values_and_gradients(name, activation, dtype, saves_fp8):
    leaves = build(dtype)
    y = run_mlp(*leaves, mlp_of(CONFIGS[name], activation, dtype, saves_fp8=saves_fp8), fresh_states(), fresh_states())
    g = torch.randn_like(y)
    actual = torch.autograd.grad(y, leaves, g)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = exact(doubles, activation)
    assert y.dtype == dtype and y.shape == expected.shape
    # E5M2 rounds by up to 12.5 %, 5 % as a rule; x's gradient has six such operands behind it: 1 − 6 · 0.05² = 0.985.
    least = 0.98 if name == "E5M2" else 0.99
    wanted = torch.autograd.grad(expected, doubles, g.double())
    for one, other in zip((y, *actual), (expected, *wanted), strict=True):
        assert cosine(one, other) > least_cosine(least, activation)
        assert abs(one.double().norm() / other.norm() - 1) < 0.03 * REFERENCES[activation].amplifies
    assert all(one.dtype == dtype for one in actual)


def test_gate_and_up_are_not_exchanged():
    """Only one of the halves has an activation."""
    x, gate, up, down = build()
    wrong = exact((x, up, gate, down), "silu")
    y = run_mlp(x, gate, up, down, mlp_of(CONFIGS["current"]), fresh_states(), fresh_states())
    assert cosine(y, exact((x, gate, up, down), "silu")) > 0.99 > 0.9 > cosine(y, wrong)


@pytest.mark.parametrize("trained", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_frozen_weights(trained, monkeypatch):
    leaves = build()
    for i, w in enumerate(leaves[1:]):
        w.requires_grad_(i in trained)
    layouts = []
    quantize = ops_linear.quantize_group
    monkeypatch.setattr(ops_linear, "quantize_group", lambda *a, **k: (layouts.append(a[4]), quantize(*a, **k))[1])
    y = run_mlp(*leaves, mlp_of(CONFIGS["delayed"]), fresh_states(), fresh_states())
    y.square().sum().backward()
    assert layouts[0] == ("both" if {0, 1} & set(trained) else "rows")  # x: its columns are for gate and up
    assert layouts[1] == ("both" if 2 in trained else "rows")  # g: its columns are for down
    assert [w.grad is not None for w in leaves[1:]] == [i in trained for i in range(3)]
    assert leaves[0].grad is not None


def test_h_is_not_saved():
    leaves = build()
    y = run_mlp(*leaves, mlp_of(CONFIGS["delayed"]), fresh_states(), fresh_states())
    saved = [t for t in y.grad_fn.next_functions[0][0].saved_tensors if t is not None]
    shapes = [tuple(t.shape) for t in saved]
    assert (57, 2 * HIDDEN) in shapes and (K, 57) in shapes
    assert (57, HIDDEN) not in shapes and (HIDDEN, 57) not in shapes
    assert next(t for t in saved if t.shape == (K, 57)).element_size() == 1


def test_gate_and_up_are_saved_in_half_as_much():
    leaves = build()
    outputs, sizes = [], []
    for saves_fp8 in (False, True):
        y = run_mlp(*leaves, mlp_of(CONFIGS["delayed"], saves_fp8=saves_fp8), fresh_states(), fresh_states())
        saved = [t for t in y.grad_fn.next_functions[0][0].saved_tensors if t is not None]
        saved = [t for t in saved if t.shape == (57, 2 * HIDDEN)]
        outputs.append(y)
        sizes.append([t.element_size() for t in saved])
    assert sizes == [[4], [1]] and torch.equal(*outputs)


@pytest.mark.matrix
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("saves_fp8", [False, True])
def test_one_graph_under_compile(name, saves_fp8):
    torch._dynamo.reset()
    leaves = build()
    mlp = mlp_of(CONFIGS[name], saves_fp8=saves_fp8)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run_mlp, backend=counter, fullgraph=True)

    def run(function, state):
        y = function(*leaves, mlp, *state)
        return [y, *torch.autograd.grad(y.square().sum(), leaves)]

    states = (fresh_states(), fresh_states()), (fresh_states(), fresh_states())
    for _ in range(2):
        for a, b in zip(run(run_mlp, states[0]), run(compiled, states[1]), strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1
    for a, b in zip(states[0], states[1], strict=True):
        torch.testing.assert_close(torch.stack(a), torch.stack(b))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_against_float64(activation):
    gate_up = torch.linspace(-12, 12, 4002).view(3, -1)
    dh = torch.randn(3, 667)
    double = gate_up.double().requires_grad_()
    gate, up = double.chunk(2, dim=-1)
    h = REFERENCES[activation].function(gate) * up
    (gradient,) = torch.autograd.grad(h, double, dh.double())
    torch.testing.assert_close(gated(gate_up, activation).double(), h.detach(), rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(gated_backward(dh, gate_up, activation).double(), gradient, rtol=2e-6, atol=5e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_of_large_values_is_finite(activation):
    gate_up = torch.tensor([[200.0, -200.0, 1e4, -1e4, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    expected = REFERENCES[activation].function(gate_up[:, :5].double()).float()
    torch.testing.assert_close(gated(gate_up, activation), expected)
    assert gated_backward(torch.ones(1, 5), gate_up, activation).isfinite().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_of_nan_is_nan(activation):
    gate_up = torch.tensor([[float("nan"), 1.0]])
    assert gated(gate_up, activation).isnan().all()
    assert gated_backward(torch.ones(1, 1), gate_up, activation).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activation_is_rounded_once(dtype):
    gate_up = torch.randn(20, 60, dtype=dtype)
    assert torch.equal(gated(gate_up, "silu"), gated(gate_up.float(), "silu").to(dtype))


@pytest.mark.matrix
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_zero_rows_change_nothing(name, compiled, monkeypatch):
    """On tensor cores tokens are padded to whole tiles; here the specification is given the same rows."""
    torch._dynamo.reset()
    leaves = build()
    g = torch.randn(3, 19, K)
    function = torch.compile(run_mlp, backend="aot_eager", fullgraph=True) if compiled else run_mlp

    def run():
        y = function(*leaves, mlp_of(CONFIGS[name]), fresh_states(), fresh_states())
        return y, *torch.autograd.grad(y, leaves, g)

    plain = run()
    monkeypatch.setattr(ops_linear, "_pads", lambda *_: True)
    torch._dynamo.reset()
    for one, other in zip(run(), plain, strict=True):
        torch.testing.assert_close(one, other)
