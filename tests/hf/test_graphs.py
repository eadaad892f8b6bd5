"""CUDA graphs are refused where there are none; `tests/gpu` has the rest."""

import pytest
import torch
from torch import nn

import octavo
from octavo.hf.build import build_causal_lm
from octavo.tools.bench.cases import LLAMAS


def tiny():
    return build_causal_lm(LLAMAS["tiny"], layers=1, positions=64, device="cpu")


def test_refused():
    with pytest.raises(ValueError, match="Linear is not a decoder that Octavo has fused"):
        octavo.use_cuda_graphs(nn.Linear(2, 2))
    model = tiny()
    with pytest.raises(ValueError, match="call convert_to_fp8 first"):
        octavo.use_cuda_graphs(model)
    octavo.convert_to_fp8(model)
    with pytest.raises(ValueError, match="the model is on cpu; move it to a GPU first"):
        octavo.use_cuda_graphs(model)
    octavo.use_cuda_graphs(model, False)


def test_no_mask_is_looked_at_without_graphs():
    model = tiny()
    octavo.convert_to_fp8(model)
    tokens = torch.randint(256, (1, 64))
    loss = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss
    loss.backward()
    assert loss.isfinite()
