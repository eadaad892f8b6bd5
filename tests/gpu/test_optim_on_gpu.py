"""Gradients applied within backward and states in host memory, on a GPU: the same weights, in less memory."""

import copy
import gc

import pytest
import torch
from torch import nn

from octavo import FP8TrainingConfig, convert_to_fp8
from octavo.nn.fp8_only import full_precision
from octavo.numerics.split import join
from octavo.optim import (
    OPTIMIZERS,
    build_optimizer,
    keep_masters,
    offload_master,
    offload_states,
    step_in_backward,
)
from octavo.optim.split_masters import LOW


def build(count=6, dtype=torch.bfloat16):
    torch.manual_seed(0)
    layers = [layer for _ in range(count) for layer in (nn.Linear(1024, 1024, bias=False), nn.GELU())]
    return nn.Sequential(*layers).to("cuda", dtype)


HOW = {
    "plain": lambda _optimizer: None,
    "released": step_in_backward,
    "released and offloaded": lambda optimizer: step_in_backward(optimizer, offload=True),
    "offloaded": offload_states,
}


def run(name, how, steps=4):
    if name != "adamw":
        pytest.importorskip("torchao")
    model = build()
    optimizer = build_optimizer(name, model.parameters(), 1e-3)
    HOW[how](optimizer)
    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(1))
    for _ in range(steps):
        model(x).float().square().mean().backward()
        gradients_left = sum(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return model, optimizer, gradients_left


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_weights(name):
    expected = [p.detach().clone() for p in run(name, "plain")[0].parameters()]
    for how in HOW:
        model, optimizer, gradients_left = run(name, how)
        for actual, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=2**-7, atol=1e-5)
        assert gradients_left == (0 if "released" in how else 6)
        for state in optimizer.state.values():
            moments = state["exp_avg"]
            parts = [getattr(moments, n) for n in moments.__tensor_flatten__()[0]] if name != "adamw" else [moments]
            if "offloaded" in how:
                assert all(part.device.type == "cpu" and part.is_pinned() for part in parts)
            else:
                assert all(part.is_cuda for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_in_one_pass_is_torchao_s(name, dtype):
    pytest.importorskip("torchao")
    from optim_cases import SHAPES, check_steps

    for shape in (*SHAPES, (1024, 1024)):
        check_steps(name, shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_takes_no_memory_beside_what_it_steps(name):
    if name != "adamw":
        pytest.importorskip("torchao")
    gc.collect()  # what earlier tests left in cycles would be freed within a step
    weight = nn.Parameter(torch.ones(4096, 8192, device="cuda", dtype=torch.bfloat16))
    stochastic = name != "adamw"
    optimizer = build_optimizer(name, [weight], lr=5e-4, weight_decay=0.0, stochastic_rounding=stochastic)
    for _ in range(2):  # the first makes the states
        weight.grad = torch.ones_like(weight)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() < 2**20
    if stochastic:  # an update of a 2,000th of a weight: to the nearest it would be nothing
        assert abs(1 - weight.float().mean().item() - 2 * 5e-4) < 1e-5
    weight.grad[0, 0] = float("nan")
    optimizer.step()
    assert weight[0, 0].isnan()


def test_states_saved_and_loaded():
    _, optimizer, _ = run("adamw", "released and offloaded")
    states = optimizer.state_dict()
    other = build_optimizer("adamw", build().parameters(), 1e-3)
    step_in_backward(other, offload=True)
    other.load_state_dict(states)
    for mine, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert theirs["exp_avg"].device.type == "cpu" and torch.equal(mine["exp_avg"], theirs["exp_avg"])


def test_less_memory():
    peaks = {}
    for how in HOW:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        unchanged = run("adamw", how)
        peaks[how] = torch.cuda.max_memory_allocated() - before
        del unchanged
    one = 2 * 1024 * 1024  # bytes of a weight, of its gradient and of each of its two moments
    assert peaks["plain"] - peaks["released"] > 4 * one
    assert peaks["plain"] - peaks["offloaded"] > 5 * one
    assert peaks["plain"] - peaks["released and offloaded"] > 10 * one


def test_memory_does_not_grow_with_what_the_host_is_ahead():
    """Buffers for what is on its way, however many parameters there are."""
    peaks = []
    for count in (6, 48):
        model = build(count)
        optimizer = build_optimizer("adamw", model.parameters(), 1e-3)
        step_in_backward(optimizer, offload=True)
        x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
        for step in range(4):
            if step == 2:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            model(x).float().square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del model, optimizer
    one = 2 * 1024 * 1024
    assert peaks[1] - peaks[0] < 10 * one  # activations of 42 more layers; their states are 84


def train(offload, *, config, name, dtype=torch.float32, count=24, steps=6):
    if name != "adamw":
        pytest.importorskip("torchao")
    model = build(count, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    convert_to_fp8(model, config)
    optimizer = build_optimizer(name, model.parameters(), 1e-3)
    if offload:
        offload_master(model, optimizer)
    else:
        step_in_backward(optimizer)
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(steps):
        x = torch.randn(256, 1024, device="cuda", dtype=dtype, generator=generator)
        model(x).float().square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("recipe", ["current", "block"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_on_the_host_are_what_fp32_weights_would_be(name, recipe):
    """A copy that another overtakes would leave a weight, or a moment, a step behind: off by the learning rate."""
    config = FP8TrainingConfig.from_recipe(recipe)
    expected = train(False, config=config, name=name)[0].state_dict()
    model, optimizer = train(True, config=config, name=name)
    for key, actual in model.state_dict().items():
        assert actual.is_pinned() and actual.dtype == torch.float32
        torch.testing.assert_close(actual.cuda(), expected[key], rtol=1e-5, atol=2e-5)
    for linear in (module for module in model if isinstance(module, nn.Linear)):
        assert linear.weight.untyped_storage().nbytes() == 4
        torch.testing.assert_close(
            linear.fp8_only.data.float() * _spread(linear.fp8_only.scale),
            linear.weight_master.cuda(),
            rtol=2**-4,
            atol=1e-3,
        )
        assert optimizer.state[linear.weight]["exp_avg"].device.type == "cpu"


def _spread(scale):
    return scale.repeat_interleave(128, 0).repeat_interleave(128, 1) if scale.dim() else scale


def test_fp8_weights_are_what_masters_round_to():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=512, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
    convert_to_fp8(model, FP8TrainingConfig(activations="fp8"))
    optimizer = build_optimizer("adamw", model.parameters(), 1e-3)
    handle = offload_master(model, optimizer)
    ids = torch.randint(512, (2, 128), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    losses = []
    for _ in range(20):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert losses[-1] < losses[0] / 2
    groups = list(dict.fromkeys(handle._product.values()))
    assert len(groups) == 4 * 4  # q, k and v; o; gate and up; down
    for group in groups:
        fp8_before = group.data.clone()
        group.write([full_precision(p).cuda() for p in group.parameters])
        assert torch.equal(fp8_before.view(torch.uint8), group.data.view(torch.uint8))
    before = model(input_ids=ids, labels=ids).loss.detach()
    weights, states = model.state_dict(), optimizer.state_dict()
    model.load_state_dict({key: value.clone() for key, value in weights.items()})
    optimizer.load_state_dict(states)
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss.detach(), before)
    handle.remove()
    assert all(p.untyped_storage().nbytes() == 2 * p.numel() for p in model.parameters())


def test_weights_take_a_byte_each():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = build(24)
    convert_to_fp8(model)
    full = torch.cuda.memory_allocated() - before
    handle = offload_master(model, build_optimizer("adamw", model.parameters(), 1e-3))
    allocated = torch.cuda.memory_allocated() - before
    assert full >= 24 * 2 * 1024 * 1024 and allocated < 0.52 * full
    handle.remove()


@pytest.mark.parametrize("shape", [(4096,), (333, 129), (1024, 1024)], ids=str)
def test_halves_of_fp32_are_those_of_the_spec(shape):
    from octavo.kernels import split as kernel
    from octavo.numerics import split as spec

    x = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda").view(torch.float32)
    x.view(-1)[:2] = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32, device="cuda").view(torch.float32)
    wanted, actual = ([torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)] for _ in range(2))
    spec.split(x, *wanted)
    kernel.split(x, *actual)
    for one, other in zip(actual, wanted, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))
    assert torch.equal(kernel.join(*actual).view(torch.int32), spec.join(*wanted).view(torch.int32))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bf16_weights_with_masters_move_as_fp32_ones(name, how):
    """The same gradients for both: what is left is the order of sums in the optimiser's kernel."""
    if name != "adamw":
        pytest.importorskip("torchao")
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(1024, 512).bfloat16().to("cuda", dtype)) for _ in range(3)]
        keep_masters(weights)
        optimizer = build_optimizer(name, weights, 1e-5)
        HOW[how](optimizer)
        for seed in range(4):
            generator = torch.Generator("cuda").manual_seed(seed)
            given = [torch.randn(1024, 512, device="cuda", generator=generator).bfloat16() for _ in weights]
            sum((w * g.to(dtype)).sum(dtype=torch.float32) for w, g in zip(weights, given, strict=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        lows = [optimizer.state[w].get(LOW) for w in weights]  # some ways keep them in host memory
        results.append(
            [w.detach() if low is None else join(w.detach(), low.cuda()) for w, low in zip(weights, lows, strict=True)]
        )
    for exact, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-6, atol=1e-8)
        assert not torch.equal(actual, actual.bfloat16().float())


@pytest.mark.parametrize("fused", [True, False])
def test_a_run_with_masters_resumes_exactly(fused):
    def start(weights):
        keep_masters(weights)
        return torch.optim.AdamW(weights, lr=1e-5, fused=fused)

    def step(optimizer, seed):
        for weight in (w for group in optimizer.param_groups for w in group["params"]):
            generator = torch.Generator("cuda").manual_seed(seed)
            weight.grad = torch.randn(weight.shape, device="cuda", generator=generator).bfloat16()
        optimizer.step()

    weights = [nn.Parameter(torch.randn(300, 77, device="cuda").bfloat16()) for _ in range(2)]
    optimizer = start(weights)
    for seed in range(3):
        step(optimizer, seed)
    twins = [nn.Parameter(w.detach().clone()) for w in weights]
    again = start(twins)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares tensors of a live one
    for seed in range(3, 6):
        for one in (optimizer, again):
            step(one, seed)
    for weight, twin in zip(weights, twins, strict=True):
        mine, theirs = optimizer.state[weight], again.state[twin]
        assert float(theirs["step"]) == float(mine["step"]) == 6
        # The first step after loading is torch's own, in another order of sums.
        exact = join(weight.detach(), mine[LOW])
        torch.testing.assert_close(join(twin.detach(), theirs[LOW]), exact, rtol=1e-6, atol=1e-9)


def test_memory_of_a_step_with_masters():
    """Masters and FP32 gradients are there for a portion of the weights only, and two bytes stay."""
    count, before = 24 * 2048 * 2048, torch.cuda.memory_allocated()
    weights = [nn.Parameter(torch.zeros(2048, 2048, dtype=torch.bfloat16, device="cuda")) for _ in range(24)]
    keep_masters(weights)
    optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
    allocated, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    assert allocated < 14.5 * count and peak - allocated < 9 * 2**26
