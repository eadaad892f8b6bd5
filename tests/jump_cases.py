"""Values that jump from one step to the next: what delayed scaling makes of them, beside current scaling.

A kind of layer is trained for a few steps; then its inputs or its weights grow at once. `errors` are those of the
output and of every gradient against float64. Delayed scaling may be off by 1.5 times what current scaling is.
"""

import torch
from torch import nn
from torch.nn.functional import silu

from octavo import FP8Linear, FP8TrainingConfig, convert_to_fp8, fp8_autocast
from octavo.nn.linear_function import linear
from octavo.nn.mlp_function import gated_mlp
from octavo.numerics import FP8ScalingManager
from octavo.ops.mlp import MLPSpec
from octavo.ops.weight import Weight

FACTORS = (2.0, 10.0, 1000.0)
KINDS = ("linear", "converted", "autocast", "batched", "self product", "group", "mlp", "mlp, FP8 activations")
CASES = [(kind, what) for kind in KINDS for what in ("x", "w") if (kind, what) != ("self product", "w")]
WIDTH, TOKENS = 64, 48


class Layer(nn.Module):
    """A layer of one kind. `plain` is the same in high precision, for inputs and weights of any dtype."""

    def __init__(self, kind, config, device, dtype):
        super().__init__()
        self.kind, self.config = kind, config
        sizes = {"group": (64, 128, 64), "mlp": (128, 128), "self product": ()}.get(kind.split(",")[0], (96,))
        generator = torch.Generator().manual_seed(0)
        shapes = [(n, WIDTH) for n in sizes] + ([(WIDTH, 128)] if kind.startswith("mlp") else [])
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) / 8 for shape in shapes)
        if kind in ("linear", "converted"):
            linear = nn.Linear(WIDTH, 96, bias=False)
            linear.weight = self.weights[0]
            self.inner = nn.Sequential(linear)
        self.to(device=device, dtype=dtype)
        if kind == "linear":
            self.inner[0] = FP8Linear.from_linear(self.inner[0], config)
            self.scaling = self.inner[0].scaling
        elif kind == "converted":
            self.scaling = convert_to_fp8(self.inner, config).scaling
        elif kind in ("autocast", "batched", "self product"):
            self.context = fp8_autocast(config)
            self.scaling = self.context.scaling
        else:
            self.scaling = FP8ScalingManager.from_config(config, device)
            # Linears that share its manager: scaling state of x, w and g.
            parts = [FP8Linear(16, 16, config=config, scaling=self.scaling, name=name) for name in ("first", "second")]
            self.states = [part.states for part in parts]
            self.weight_states = [part.state_w for part in parts]
            self.spec = parts[0].spec(torch.zeros(1, 16, device=device, dtype=dtype))

    def forward(self, x):
        if self.kind in ("linear", "converted"):
            return self.inner(x)
        if self.kind in ("autocast", "batched", "self product"):
            with self.context:
                return self.plain(x, list(self.weights))
        if self.kind == "group":
            return linear(x, Weight(list(self.weights), state=self.weight_states[0]), self.spec, self.states[0])
        mlp = MLPSpec(self.spec, "silu", saves_fp8="FP8" in self.kind)
        gate, up, down = self.weights
        weights = Weight([gate, up], state=self.weight_states[0]), Weight([down], state=self.weight_states[1])
        return gated_mlp(x, *weights, mlp, *self.states)

    def plain(self, x, weights):
        if self.kind == "batched":
            return x.view(4, -1, WIDTH) @ weights[0].view(4, 24, WIDTH).mT
        if self.kind == "self product":
            return x @ x.mT
        if self.kind.startswith("mlp"):
            gate, up, down = weights
            return (silu(x @ gate.mT) * (x @ up.mT)) @ down.mT
        return x @ torch.cat(weights).mT


def inputs(device, dtype, seed):
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def run(layer, x, train):
    """The output, and in training the gradients of the input and of every weight."""
    if not train:
        with torch.no_grad():
            return [layer(x)]
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(gradient_of(y))
    return [y.detach(), x.grad, *(w.grad for w in layer.weights)]


def gradient_of(y):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.device, y.dtype)


def reference(layer, x, train):
    weights = [w.detach().double().requires_grad_() for w in layer.weights]
    x64 = x.double().requires_grad_()
    y = layer.plain(x64, weights)
    if not train:
        return [y.detach()]
    y.backward(gradient_of(y.to(x.dtype)).double())
    return [y.detach(), x64.grad, *(w.grad for w in weights)]


def errors(kind, scaling, what, factor, train, *, device="cpu", dtype=torch.float32, format="HYBRID"):
    """Relative errors of everything that one use after the jump gives, and the layer."""
    layer = Layer(kind, FP8TrainingConfig(scaling=scaling, fp8_format=format), device, dtype)
    for step in range(3):
        run(layer, inputs(device, dtype, step), train=True)
        layer.scaling.step()
    x = inputs(device, dtype, 7)
    if what == "x":
        x = x * factor
    else:
        with torch.no_grad():
            for w in layer.weights:
                w.mul_(factor)
    expected = reference(layer, x, train)
    actual = run(layer, x, train)
    return [relative(a, b) for a, b in zip(actual, expected, strict=True)], layer


def relative(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


def assert_no_worse_than_current(kind, what, factor, train, **how):
    delayed, layer = errors(kind, "delayed", what, factor, train, **how)
    current, _ = errors(kind, "current", what, factor, train, **how)
    assert all(mine <= 1.5 * theirs for mine, theirs in zip(delayed, current, strict=True)), (delayed, current)
    statistics = layer.scaling.statistics()
    assert all(actual["saturated"] == 0 for actual in statistics.values())
    assert not train or any(actual["rescaled"] > 0 for actual in statistics.values())
