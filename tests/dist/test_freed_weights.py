"""An engine that frees weights between forward and backward, as ZeRO-3 does: fused pieces stay, and memory goes."""

import pytest
import torch
from dist_cases import batch, config_of, largest_difference, plain
from frozen_cases import SIZES, FreesWeights, adapted, gradients
from ranks import on_ranks

import octavo


def step(model, inputs, engine=None):
    output = model(**inputs)
    kept = None if engine is None else engine.gathered_bytes(frozen=True)
    output.loss.backward()
    return gradients(model), kept, output.logits


def frozen(_rank, cases):
    results = []
    for granularity, family in cases:
        inputs = batch("Llama", 0, 0)
        expected, *_ = step(adapted(granularity, family), inputs)
        model = adapted(granularity, family)
        base = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
        engine = FreesWeights(model)
        actual, kept, logits = step(model, inputs, engine)
        report = model.get_base_model().octavo_report
        results.append((actual, expected, kept, base, engine.calls, logits, report.hooked, report.unfused))
    return results


def trained(_rank, cases):
    results = []
    for kind, recipe in cases:
        models = [plain(kind, **SIZES), plain(kind, **SIZES)]
        for model in models:
            octavo.convert_to_fp8(model, config_of(kind, recipe))
        engine = FreesWeights(models[0])
        actual, _, logits = step(models[0], batch(kind, 0, 0), engine)
        expected, *_ = step(models[1], batch(kind, 0, 0))
        results.append((actual, expected, logits, models[0].octavo_report.hooked))
    return results


def test_a_frozen_base_is_not_kept_from_forward_to_backward():
    cases = [("block", "Llama"), ("channel", "Llama"), ("tensor", "Llama"), ("channel", "Qwen3")]
    (results,) = on_ranks(1, frozen, cases)
    for case, (actual, expected, kept, base, calls, logits, hooked, unfused) in zip(cases, results, strict=True):
        # Per tensor, q, k and v are three products: the gradients of their input are summed in another order.
        assert largest_difference(actual, expected) <= (1e-7 if "tensor" in case else 0), case
        assert kept == 0 < base, case
        assert calls > 20 and logits is None and hooked == [] and unfused == {}, case


@pytest.mark.parametrize("kind", ["FP8 head", "FP8 activations"])
def test_trained_weights_are_there_when_they_are_read(kind):
    cases = [(kind, "delayed"), (kind, "block")]
    (results,) = on_ranks(1, trained, cases)
    for case, (actual, expected, logits, hooked) in zip(cases, results, strict=True):
        assert largest_difference(actual, expected) == 0, case
        assert logits is None and hooked == [], case


def test_the_callback_looks_at_the_parts_that_ranks_have():
    """As DeepSpeed marks Parameters: empty ones, with this rank's part and the number of all elements beside it."""
    from octavo.hf.callback import _summary
    from octavo.hf.update_check import SampledWeights

    model = plain("MLP")
    octavo.convert_to_fp8(model)
    count = sum(p.numel() for p in model.parameters())
    assert f"{count:,} weights are trained" in _summary(model)
    for p in model.parameters():
        p.ds_numel, p.ds_tensor = p.numel(), p.detach().flatten()[: p.numel() // 2].clone()
        p.data = torch.empty(0)
    assert f"{count:,} weights are trained" in _summary(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sample = SampledWeights(model, optimizer)
    assert sample.share_moved(optimizer) == 0
    for p in model.parameters():
        p.ds_tensor += 1
    assert sample.share_moved(optimizer) == 1
