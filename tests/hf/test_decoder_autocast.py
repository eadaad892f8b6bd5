"""Whole decoders under the autocast: rotary positions are exact, and training goes as with `convert_to_fp8`."""

from contextlib import nullcontext

import pytest
import torch
from decoder_cases import SIZES, assert_close_to, build, every_family, run, transformers

from octavo import FP8TrainingConfig, convert_to_fp8, fp8_autocast, get_fp8_autocast_context

POSITIONS = 2048


def inputs(length=21):
    """Far from the beginning, where neighbouring positions are one in FP8."""
    ids = torch.randint(1, SIZES["vocab_size"], (3, length), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(POSITIONS - length, POSITIONS).expand(3, length)
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions, "use_cache": False}


def run_within(context, model):
    model.zero_grad()
    with context:
        loss = model(**inputs()).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@every_family
@pytest.mark.parametrize("torch_autocast", [None, "around", "inside"])
def test_positions_are_exact(family, torch_autocast):
    """Cosines and sines, as the decoder's layers get them, are those of the model alone, bit for bit."""
    model = build(family, max_position_embeddings=POSITIONS)
    rotary = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    seen = []
    rotary.register_forward_hook(lambda *call: seen.append(torch.stack(call[-1])))
    context = get_fp8_autocast_context(FP8TrainingConfig())
    bfloat16 = torch.autocast("cpu", torch.bfloat16) if torch_autocast else nullcontext()
    with bfloat16:
        model(**inputs())
    alone = list(seen)
    seen.clear()
    outer, inner = (bfloat16, context) if torch_autocast == "around" else (context, bfloat16)
    with outer, inner:
        model(**inputs())
    assert alone and len(seen) == len(alone)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(seen, alone, strict=True))
    # Seven linears a layer are in FP8; the head is not, nor are the positions, which newer versions do not multiply.
    assert [entry.op for entry in context.report.in_fp8 if entry.op == "linear"] == ["linear"] * 14
    reasons = {entry.reason for entry in context.report.not_in_fp8}
    assert any("config.skip" in reason for reason in reasons)
    if transformers.__version__.startswith("5.17."):
        off = "enabled=False" if torch_autocast else "fewer than 16"
        assert any(off in reason for reason in reasons)


@every_family
def test_as_the_model_alone_and_as_converted(family):
    model = build(family, max_position_embeddings=POSITIONS)
    expected = run(model, **inputs())
    actual = run_within(fp8_autocast(FP8TrainingConfig.from_recipe("current")), model)
    assert_close_to(actual, expected)
    convert_to_fp8(model, FP8TrainingConfig.from_recipe("current"))
    assert_close_to(actual, run(model, **inputs()), least=0.97)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_with_gradient_checkpointing(use_reentrant):
    config = FP8TrainingConfig.from_recipe("current")
    expected_loss, expected = run_within(fp8_autocast(config), build(max_position_embeddings=POSITIONS))
    model = build(max_position_embeddings=POSITIONS)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    loss, gradients = run_within(fp8_autocast(config), model)
    assert torch.equal(loss, expected_loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5)
