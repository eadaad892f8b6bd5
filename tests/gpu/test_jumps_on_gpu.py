"""Delayed scaling on the GPU: values that jump cost no more than under current scaling, in every kind of layer."""

import pytest
import torch
from jump_cases import CASES, FACTORS, assert_no_worse_than_current


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(("kind", "what"), CASES)
def test_a_jump_costs_no_accuracy(kind, what, factor, train, dtype):
    assert_no_worse_than_current(kind, what, factor, train, device="cuda", dtype=dtype)


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("what", ["x", "w"])
@pytest.mark.parametrize("kind", ["linear", "group", "mlp"])
def test_many_programs(kind, what, train, monkeypatch):
    """Large enough that each program has several tiles, and programs start when others are done."""
    monkeypatch.setattr("jump_cases.TOKENS", 16384)
    assert_no_worse_than_current(kind, what, 1000.0, train, device="cuda", dtype=torch.bfloat16)
