"""Head and loss in chunks on the GPU: labels that are no tokens, gradients in FP16 and over many chunks."""

import subprocess
import sys

import pytest
import torch

from octavo.nn import loss as module
from octavo.nn.loss import linear_cross_entropy

if torch.cuda.is_available():
    from octavo.kernels import cross_entropy as kernel

ASSERTED = """
import torch
from octavo.nn import loss as module
from octavo.nn.loss import linear_cross_entropy
hidden, weight = torch.randn(8, 64, device="cuda"), torch.randn(50, 64, device="cuda")
labels = torch.full((8,), {label}, device="cuda")
print(linear_cross_entropy(hidden, weight, labels).item())
"""


@pytest.mark.parametrize("label", [-1, 50])
def test_a_label_that_is_no_token_is_asserted_on_the_device(label):
    """In a process of its own, which has no use for its GPU afterwards."""
    done = subprocess.run([sys.executable, "-c", ASSERTED.format(label=label)], capture_output=True, text=True)
    assert done.returncode != 0 and "device-side assert" in done.stderr
    assert "labels: one is neither -100 nor a token, 0 to 49" in done.stdout + done.stderr
    fine = subprocess.run([sys.executable, "-c", ASSERTED.format(label=49)], capture_output=True, text=True)
    assert fine.returncode == 0 and float(fine.stdout) > 0


def test_a_label_that_is_no_token_is_nan_to_the_kernel():
    logits, labels = torch.randn(3, 300, device="cuda"), torch.tensor([300, 3, -1], device="cuda")
    loss, lse = kernel.cross_entropy(logits, labels)
    assert loss.isnan().tolist() == lse.isnan().tolist() == [True, False, True]


def test_the_loss_does_not_wait_for_the_gpu():
    hidden = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(500, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 500, (300,), device="cuda")
    linear_cross_entropy(hidden, weight, labels).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy(hidden, weight, labels).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def exact_gradients(hidden, weight, labels, factor):
    doubles = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss = torch.nn.functional.cross_entropy(doubles[0] @ doubles[1].t(), labels, reduction="sum") * factor
    return torch.autograd.grad(loss, doubles)


def inputs(tokens, width, vocabulary, hidden_dtype, weight_dtype):
    hidden = torch.randn(tokens, width, device="cuda").to(hidden_dtype).requires_grad_()
    weight = (0.3 * torch.randn(vocabulary, width, device="cuda")).to(weight_dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (tokens,), device="cuda")


def error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("chunk_bytes", [2**30, 1])
@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float32])
def test_fp16_with_a_loss_scale(weight_dtype, chunk_bytes, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    hidden, weight, labels = inputs(1000, 128, 4000, torch.float16, weight_dtype)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = linear_cross_entropy(hidden, weight, labels, count=2**17)
    (2.0**16 * loss).backward()
    for x, expected in zip((hidden, weight), exact_gradients(hidden, weight, labels, 0.5), strict=True):
        assert x.grad.dtype == x.dtype and error(x.grad, expected) < 3e-3
        assert (x.grad == 0).double().mean() < 0.001


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_many_chunks_are_as_accurate_as_one(weight_dtype, monkeypatch):
    hidden, weight, labels = inputs(64 * 128, 128, 500, torch.bfloat16, weight_dtype)
    expected = exact_gradients(hidden, weight, labels, 1 / len(labels))[1]
    errors = []
    for chunk_bytes in (2**30, 1):
        monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
        loss = linear_cross_entropy(hidden, weight, labels)
        errors.append(error(torch.autograd.grad(loss, weight)[0], expected))
    assert errors[1] < 1.2 * errors[0], errors


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_the_head_takes_what_is_planned(weight_dtype):
    """Several chunks: dw in FP32 and one chunk's logits; see `tools/plan/head.py`."""
    tokens, width, vocabulary = 6000, 1024, 128256
    hidden, weight, labels = inputs(tokens, width, vocabulary, weight_dtype, weight_dtype)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        linear_cross_entropy(hidden, weight, labels).backward()
    actual = torch.cuda.max_memory_allocated() - before
    (start, stop), *more = module.chunk_bounds(0, tokens, vocabulary * 2, module.CHUNK_BYTES)
    assert more
    expected = vocabulary * width * 4 + (stop - start) * vocabulary * 2 + hidden.nbytes
    if weight_dtype == torch.float32:
        expected += (vocabulary + stop - start) * width * 2
    assert expected <= actual < 1.05 * expected
