"""Head and loss in chunks on the GPU: labels that are no tokens, gradients in FP16 and over many chunks."""

import subprocess
import sys

import pytest
import torch

from octavo.nn.loss import linear_cross_entropy

if torch.cuda.is_available():
    from octavo.kernels import cross_entropy as kernel

ASSERTED = """
import torch
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
