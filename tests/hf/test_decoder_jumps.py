"""Weights of a converted decoder that jump: delayed scaling is off by no more than current scaling is."""

import pytest
import torch
from decoder_cases import batch, build, run

from octavo import FP8TrainingConfig, convert_to_fp8
from octavo.convert import is_converted


def outcome(model, train):
    """All gradients as one, or the logits."""
    if train:
        return [torch.cat([gradient.flatten() for gradient in run(model, **batch())[1].values()])]
    with torch.no_grad():
        return [model.eval()(**batch()).logits]


def errors(scaling, factor, train, **how):
    expected_of, model = build(), build()
    report = convert_to_fp8(model, FP8TrainingConfig(scaling=scaling, **how))
    for _ in range(2):
        run(model, **batch())
        report.scaling.step()
    for one in (expected_of, model):
        with torch.no_grad():
            for name, parameter in one.named_parameters():
                if "proj" in name or "lm_head" in name:
                    parameter.mul_(factor)
    assert is_converted(model)
    pairs = zip(outcome(model, train), outcome(expected_of, train), strict=True)
    return [float((a - b).norm() / b.norm()) for a, b in pairs], report


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("factor", [2.0, 10.0])
@pytest.mark.parametrize("how", [{}, {"fp8_head": True}, {"activations": "fp8"}], ids=str)
def test_weights_that_jump(how, factor, train):
    delayed, report = errors("delayed", factor, train, **how)
    current, _ = errors("current", factor, train, **how)
    assert all(mine <= 1.5 * theirs for mine, theirs in zip(delayed, current, strict=True)), (delayed, current)
    actual = report.scaling.statistics()
    assert all(one["saturated"] == 0 for one in actual.values())
    assert not train or all(
        actual[f"model.layers.0.{name}"]["rescaled"] for name in ("self_attn.qkv.w", "mlp.gate_up.w")
    )
