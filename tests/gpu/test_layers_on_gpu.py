"""Layers and autocast on the GPU: tensor cores against float64, each recipe, eager, compiled, checkpointed."""

import re

import pytest
import torch
import torch.nn.functional as F
from bounds import assert_product_close, cosine
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import FP8Linear, FP8TrainingConfig, convert_to_fp8, fp8_autocast
from octavo.models.bdh import BDH, BDHConfig

RECIPES = ("delayed", "current", "channel", "block", "mx")


def test_support():
    assert octavo.check_fp8_support(), str(octavo.check_fp8_support())


@pytest.mark.parametrize("emulate", [None, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(5, 20, 30), (257, 300, 129), (1024, 1024, 512), (1, 16, 16)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_linear(recipe, sizes, dtype, emulate):
    m, k, n = sizes
    config = FP8TrainingConfig.from_recipe(recipe, emulate=emulate)
    layer = FP8Linear(k, n, config=config, device="cuda", dtype=dtype)
    x = torch.randn(2, m, k, device="cuda", dtype=dtype, requires_grad=True)
    y = layer(x)
    g = torch.randn_like(y)
    y.backward(g)
    forward, backward = config.recipe.x.format, config.recipe.g.format
    rows, g_rows = x.reshape(-1, k), g.reshape(-1, n)
    # The bias is rounded with the result; take it off in float64.
    assert_product_close((y.reshape(-1, n).double() - layer.bias).to(dtype), rows, layer.weight.mT, forward, forward)
    assert_product_close(x.grad.reshape(-1, k), g_rows, layer.weight, backward, forward)
    assert_product_close(layer.weight.grad, g_rows.mT, rows, backward, forward)


@pytest.mark.parametrize("how", ["none", "get_scale"])
@pytest.mark.parametrize("sizes", [(5, 20, 30), (1024, 1024, 512)])
def test_fp8_linear_and_fp8_matmul_run_on_tensor_cores_and_train(sizes, how):
    m, k, n = sizes
    x, w = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in ((m, k), (n, k)))
    manager = octavo.FP8ScalingManager(margin=1.0, device="cuda")
    manager.update_amax("x", x.abs().max())
    manager.update_amax("w", w.abs().max())
    scales = (manager.get_scale("x"), manager.get_scale("w")) if how == "get_scale" else (None, None)
    g = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        y = octavo.fp8_linear(x, w, *scales)
        y.backward(g)
    names = " ".join(event.key for event in profile.key_averages())
    assert "tensor_kernel" in names, names
    dx, dw = x.grad, w.grad
    x.grad = w.grad = None
    octavo.fp8_matmul(x, w.mT, *scales).backward(g)
    for actual, expected in ((y, x @ w.mT), (dx, g @ w), (dw, g.mT @ x), (x.grad, g @ w), (w.grad, g.mT @ x)):
        assert cosine(actual, expected) > 0.995


def test_a_multiplier_that_has_lost_its_type_gives_nan_without_waiting_for_the_device():
    x, w = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    assert octavo.quantize(w, 448 / w.abs().max()).dequantize().isnan().all()
    assert octavo.fp8_linear(x, w, None, 448 / w.abs().max()).isnan().all()


def test_a_finite_value_saturates_however_small_the_scale_on_the_device():
    x = torch.zeros(64, 64, device="cuda")
    x[0, :6] = torch.tensor([1e38, -1e38, 3e38, float("inf"), float("-inf"), float("nan")])
    for rounding in ("nearest", "stochastic"):
        data = octavo.quantize(x, scale=2.0**-100, rounding=rounding).data.float()
        assert data[0, :3].isfinite().all() and data[0, 3:6].isnan().all() and not data[1:].any()


def test_nothing_is_emulated_and_the_report_says_nothing_of_it(caplog):
    report = convert_to_fp8(nn.Sequential(nn.Linear(64, 64, device="cuda")), FP8TrainingConfig(emulate=False))
    assert not report.emulation and "emulated" not in str(report)
    assert not [record for record in caplog.records if record.name == "octavo"]


def test_tensor_cores_are_used_and_agree_with_the_emulation():
    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    w = nn.Parameter(torch.randn(1024, 768, device="cuda", dtype=torch.bfloat16))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile, fp8_autocast():
        y = x @ w
    names = " ".join(event.key for event in profile.key_averages())
    assert re.search(r"e4m3|fp8|f8|nvjet_sm\d+_q", names.lower()), names  # cuBLAS 13 calls FP8 operands q
    with fp8_autocast(FP8TrainingConfig(emulate=True)):
        emulated = x @ w
    assert cosine(y, emulated) > 0.99999


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("a_shape", "b_shape"), [((2, 1, 33, 70), (4, 70, 50)), ((70, 33), (4, 33, 5)), ((3, 40, 64), (3, 64, 48))]
)
def test_batched_and_broadcast(recipe, a_shape, b_shape):
    config = FP8TrainingConfig.from_recipe(recipe)
    a = torch.randn(a_shape, device="cuda", requires_grad=True)
    b = nn.Parameter(torch.randn(b_shape, device="cuda"))
    with fp8_autocast(config):
        y = a @ b
    g = torch.randn_like(y)
    y.backward(g)
    forward, backward = config.recipe.x.format, config.recipe.g.format
    assert_product_close(y, a, b, forward, forward)
    assert_product_close(a.grad, g, b.mT, backward, forward)
    assert_product_close(b.grad, a.mT, g, forward, backward)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (64,)))))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("use_reentrant", [None, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_compiled_and_checkpointed(recipe, use_reentrant, compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4))).cuda().bfloat16()
    convert_to_fp8(model, FP8TrainingConfig.from_recipe(recipe))
    if compiled:
        for block in model:
            block.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(33, 64, device="cuda", dtype=torch.bfloat16)
    losses = []
    for _ in range(20):
        y = x.clone().requires_grad_()
        for block in model:
            y = block(y) if use_reentrant is None else checkpoint(block, y, use_reentrant=use_reentrant)
        loss = (y.float() - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_bdh_under_the_autocast(compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = BDH(BDHConfig(dim=128, heads=4, neurons=1024, layers=2)).cuda()
    function = torch.compile(model, fullgraph=True) if compiled else model
    context = fp8_autocast(model=model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(256, (4, 65), device="cuda")
    losses = []
    for _ in range(30):
        with torch.autocast("cuda", torch.bfloat16), context:
            loss = function(tokens[:, :-1], tokens[:, 1:])[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(context.report.in_fp8) == 10
    assert losses[-1] < losses[0] - 1


def test_moving_a_converted_model():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    convert_to_fp8(model)
    state = model[0].state_x
    model.cuda()
    assert model[0].state_x is state and state.is_cuda
    model(torch.randn(4, 32, device="cuda")).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert model[0].scaling.state_dict()["_steps"].tolist() == [1] * 6
    model.cpu()
    model(torch.randn(4, 32)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert model[0].scaling.state_dict()["_steps"].tolist() == [2] * 6


def test_attention_in_fp8_is_refused():
    q, k, v = (torch.randn(1, 2, 64, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with fp8_autocast(FP8TrainingConfig(fp8_dpa=True)), pytest.raises(ValueError, match="Measured on an H200"):
        F.scaled_dot_product_attention(q, k, v)
    with fp8_autocast(FP8TrainingConfig(fp8_dpa=True, emulate=True)):
        actual = F.scaled_dot_product_attention(query=q, key=k, value=v)
    assert cosine(actual, F.scaled_dot_product_attention(q, k, v)) > 0.99
