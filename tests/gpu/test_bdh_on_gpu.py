"""The fused BDH on the GPU: kernels against the specification, gradients against the autocast's, a short run."""

from importlib import import_module

import pytest
import torch

from octavo import FP8TrainingConfig, fp8_autocast
from octavo.models.bdh import BDH, BDHConfig, fuse, ops, rope_angles, unfuse
from octavo.numerics import Quantized
from octavo.numerics.scaling import AMAX, NON_FINITE, SATURATED, SCALE, SEEN, UNDERFLOW, new_states

RECIPE = FP8TrainingConfig().recipe
X, G = RECIPE.x.encode(), RECIPE.g.encode()
SIZES = [(2, 4, 256, 512), (2, 3, 97, 130), (1, 1, 1, 2)]  # B, H, T, N
CONFIG = BDHConfig(dim=128, heads=4, neurons=1024, layers=4)


def by_the_spec(monkeypatch, function, *args):
    with monkeypatch.context() as patch:
        patch.setattr(ops, "_has_kernels", lambda *_: False)
        patch.setattr(import_module("octavo.ops.quantize"), "has_fp8_tensor_cores", lambda _: False)
        return function(*args)


def pairs(parts):
    """Data and scale, alternating, as operands."""
    return [Quantized(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]


def with_scale(parts, z_scale=None):
    """Data, its scale, the same data in another layout, and z, as operands; what is empty is left out."""
    rows, scale, columns, *z = parts
    return [Quantized(data, scale) for data in (rows, columns) if data.numel()] + [Quantized(x, z_scale) for x in z]


def codes(data):
    """FP8 as integers that count steps, NaN aside."""
    bits = data.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


def assert_nearly_same(actual, expected, share=1e-3):
    """At most 0.1 % of the values differ, by one step; the scales are the same."""
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.scale, b.scale, rtol=1e-6, atol=0)
        assert a.data.shape == b.data.shape and a.data.dtype == b.data.dtype
        off = (codes(a.data) - codes(b.data)).abs()
        assert off.max() <= 1
        assert (off > 0).float().mean() <= share


def assert_same_statistics(mine, theirs, saved=()):
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        torch.testing.assert_close(a[[SCALE, AMAX]], b[[SCALE, AMAX]], rtol=1e-2, atol=0)
        torch.testing.assert_close(a[[SEEN, NON_FINITE]], b[[SEEN, NON_FINITE]], rtol=0, atol=0)
        losses = [SATURATED] if i in saved else [SATURATED, UNDERFLOW]
        torch.testing.assert_close(a[losses], b[losses], rtol=1e-2, atol=1e-3)


def states(count):
    return [new_states(device="cuda") for _ in range(count)]


def saved(*shape, scale):
    x = torch.randn(shape, device="cuda").add(0.4).relu() * 100
    return Quantized(x.to(torch.float8_e4m3fn), torch.tensor(scale, device="cuda"))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_forward_kernels(monkeypatch, size, dtype):
    B, H, T, N = size
    cos, sin = rope_angles(T, N, torch.device("cuda"))
    s_pre, t_pre = (torch.randn(shape, device="cuda").to(dtype) for shape in ((B, T, H, N), (H, B, T, N)))
    mine, theirs = states(4), states(4)
    for use in range(2):  # the second finds a scale that is too small
        x = s_pre * (1 + use)
        actual = pairs(ops.bdh_relu_rope(x, cos, sin, *mine[:2], X))
        actual += pairs(ops.bdh_gate(x, t_pre, *mine[2:], X))
        expected = pairs(by_the_spec(monkeypatch, ops.bdh_relu_rope, x, cos, sin, *theirs[:2], X))
        expected += pairs(by_the_spec(monkeypatch, ops.bdh_gate, x, t_pre, *theirs[2:], X))
        assert_nearly_same(actual, expected)
    assert_same_statistics(mine, theirs, saved=(1, 3))
    q, s, _, _ = expected
    again = (*s, cos, sin, q.scale, X, dtype)
    columns = Quantized(ops.bdh_rope_columns(*again), q.scale)
    assert_nearly_same([columns], [Quantized(by_the_spec(monkeypatch, ops.bdh_rope_columns, *again), q.scale)])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_backward_kernels(monkeypatch, size):
    B, H, T, N = size
    cos, sin = rope_angles(T, N, torch.device("cuda"))
    dq = torch.randn(B, H, T, N, device="cuda").bfloat16() * 1e-3
    dz = torch.randn(B, T, H, N, device="cuda").bfloat16() * 1e-3
    s, t = saved(B, T, H, N, scale=0.01), saved(B, T, H, N, scale=0.02)
    z_scale = torch.tensor(0.03, device="cuda")
    mine, theirs = states(2), states(2)
    for use in range(2):
        gate = (dz * (1 + use), [*s, *t], z_scale)
        rope = (dq * (1 + use), dz, [*s, *t], cos, sin)
        actual = with_scale(ops.bdh_gate_backward(*gate, mine[0], G, X), z_scale)
        actual += with_scale(ops.bdh_relu_rope_backward(*rope, mine[1], G))
        expected = with_scale(by_the_spec(monkeypatch, ops.bdh_gate_backward, *gate, theirs[0], G, X), z_scale)
        expected += with_scale(by_the_spec(monkeypatch, ops.bdh_relu_rope_backward, *rope, theirs[1], G))
        assert_nearly_same(actual, expected)
    assert_same_statistics(mine, theirs)


@pytest.mark.parametrize("T", [1, 64, 130, 512])
def test_causal_kernels(monkeypatch, T):
    scores = torch.randn(2, 3, T, T, device="cuda").bfloat16()
    mine, theirs = states(2), states(2)
    for use in range(2):
        x = scores * (1 + use)
        actual = with_scale(ops.bdh_mask(x, mine[0], X, False)) + with_scale(ops.bdh_mask(x, mine[1], G, True))
        expected = with_scale(by_the_spec(monkeypatch, ops.bdh_mask, x, theirs[0], X, False))
        expected += with_scale(by_the_spec(monkeypatch, ops.bdh_mask, x, theirs[1], G, True))
        assert len(actual) == 3
        assert_nearly_same(actual, expected, share=0)
    assert_same_statistics(mine, theirs)


def test_what_is_not_finite_becomes_nan_and_is_recorded():
    s_pre = torch.randn(1, 5, 2, 8, device="cuda").bfloat16()
    s_pre[0, 1, 0, 3], s_pre[0, 2, 1, 0] = float("nan"), float("inf")
    cos, sin = rope_angles(5, 8, torch.device("cuda"))
    mine = states(2)
    q, s = pairs(ops.bdh_relu_rope(s_pre, cos, sin, *mine, X))
    assert q.data.float().isnan().sum() == 4 and s.data.float().isnan().sum() == 2
    assert mine[0][NON_FINITE] == mine[1][NON_FINITE] == 1 and mine[0][AMAX] > 0


def loss_and_gradient(model, tokens, context=None):
    model.zero_grad()
    if context is None:
        loss = model(*tokens)[1]
    else:
        with context:
            loss = model(*tokens)[1]
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten().double() for p in model.parameters()])


def batch(rows, length, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    start = torch.randint(256, (rows, 1), device="cuda", generator=generator)
    tokens = (start + torch.arange(length + 1, device="cuda")) % 256
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("length", [256, 77])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_against_bf16_and_autocast(length, compiled):
    model = BDH(CONFIG).to("cuda", torch.bfloat16)
    loss, gradient = loss_and_gradient(model, batch(4, length))
    _, by_autocast = loss_and_gradient(model, batch(4, length), fp8_autocast())
    fuse(model)
    function = torch.compile(model) if compiled else model
    loss_fused, fused = loss_and_gradient(function, batch(4, length))
    assert loss_fused == pytest.approx(loss, rel=0.01)

    def agreement(a, b):
        return torch.nn.functional.cosine_similarity(a, b, dim=0).item()

    assert agreement(fused, gradient) > agreement(by_autocast, gradient) - 0.02
    assert agreement(fused, by_autocast) > 0.95
    unfuse(model)


def test_a_short_run():
    model = BDH(CONFIG).to("cuda")
    fused = fuse(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(30):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(*batch(8, 128, step))[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1
    assert all(s["scale"] > 0 for s in fused.scaling.statistics().values())
