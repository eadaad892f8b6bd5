"""A fused decoder's loss while training: transformers' default in chunks of tokens, any other as the user has it."""

import pytest
import torch
from bounds import cosine
from decoder_cases import assert_close_to, batch, build, run
from torch import nn

from octavo import FP8TrainingConfig, convert_to_fp8
from octavo.nn import loss

transformers = pytest.importorskip("transformers")
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss  # noqa: E402


def fused(**changes):
    """In the same precision as the original: losses and gradients agree to rounding."""
    model = build(**changes)
    convert_to_fp8(model, precision="bf16")
    return model


def assert_same(actual, expected):
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in actual[1].items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def smoothed(logits, labels, vocab_size, **_kwargs):
    """A user's loss: label smoothing."""
    targets = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    return nn.functional.cross_entropy(logits.float().view(-1, vocab_size), targets, label_smoothing=0.3)


def assign(model):
    model.loss_function = smoothed


def assign_type(model):
    model.loss_type = "ForMaskedLM"  # does not shift


def override(model):
    cls = type(model)
    model.__class__ = type(cls.__name__, (cls,), {"loss_function": property(lambda _: smoothed)})


@pytest.mark.parametrize("change", [assign, assign_type, override])
def test_the_users_own_loss_is_the_one_that_is_trained(change):
    reference, model = build(), fused()
    plain = run(reference, **batch())
    for each in (reference, model):
        change(each)
    expected = run(reference, **batch())
    assert abs(expected[0] - plain[0]) > 0.01
    assert_same(run(model, **batch()), expected)


def test_a_loss_assigned_before_conversion():
    reference, model = build(), build()
    for each in (reference, model):
        assign(each)
    with pytest.raises(ValueError, match="fp8_head=True: its loss function is not transformers' default"):
        convert_to_fp8(model, FP8TrainingConfig(fp8_head=True))
    report = convert_to_fp8(model, precision="bf16")
    assert "loss not fused: its loss function" in report.summary()
    assert_same(run(model, **batch()), run(reference, **batch()))


def test_a_loss_in_place_of_the_default_for_all_models(monkeypatch):
    reference, model = build(), fused()
    monkeypatch.setitem(LOSS_MAPPING, "ForCausalLM", smoothed)
    assert_same(run(model, **batch()), run(reference, **batch()))


def test_the_default_loss_given_back_is_fused_again():
    model = fused()
    assign(model)
    assert model(**batch()).logits is not None
    model.loss_function = ForCausalLMLoss
    assert model(**batch()).logits is None


@pytest.mark.parametrize("ignored", [0, 7, -1])
def test_another_ignore_index(ignored):
    reference, model = build(), fused()
    inputs = batch()
    inputs["labels"] = inputs["input_ids"].clone()
    inputs["labels"][:, ::2] = ignored
    expected = run(reference, **inputs, ignore_index=ignored)
    if ignored >= 0:
        assert abs(expected[0] - run(reference, **inputs)[0]) > 0.01
    assert_same(run(model, **inputs, ignore_index=ignored), expected)


def test_the_default_ignore_index_named_is_still_the_default():
    model = fused()
    assert model(**batch(), ignore_index=-100).logits is None


def test_arguments_that_the_loss_may_know_are_for_the_loss_to_take():
    """What a later version of transformers, or the user's loss, does with them is not ours to guess."""
    model = fused()
    assert model(**batch(), label_smoothing=0.1).logits is not None
    seen = {}

    def weighted(logits, labels, vocab_size, token_weights=None, **_kwargs):
        seen["weights"] = token_weights
        return ForCausalLMLoss(logits, labels, vocab_size) * token_weights.mean()

    model.loss_function = weighted
    weights = torch.full((3, 21), 0.5)
    loss = model(**batch(), token_weights=weights).loss
    assert seen["weights"] is weights
    torch.testing.assert_close(loss, build()(**batch()).loss / 2)


@pytest.mark.parametrize("wrong", [-1, 160])
@pytest.mark.parametrize("config", [FP8TrainingConfig(), FP8TrainingConfig(fp8_head=True)], ids=["BF16", "FP8"])
def test_labels_that_are_no_tokens_are_refused(wrong, config):
    inputs = batch()
    inputs["labels"][-1, -1] = wrong
    with pytest.raises(IndexError, match="out of bounds"):
        build()(**inputs)
    model = build()
    convert_to_fp8(model, config)
    with pytest.raises(IndexError, match=f"labels: {wrong} .* vocabulary of 160"):
        model(**inputs)


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
@pytest.mark.parametrize("length", [20, 22])
def test_labels_of_another_length_are_refused(name, length):
    inputs = {**batch(), name: torch.ones(3, length, dtype=torch.int64)}
    for model in (build(), fused()):
        with pytest.raises(ValueError, match=f"{3 * length}"):
            model(**inputs)


def test_fp16_with_a_loss_scale():
    """The gradient of the head is far below FP16 until it is multiplied by the scale; the head's own sum is not."""
    count, scale = 2.0**17, 2.0**16
    reference, model = build(), build()
    convert_to_fp8(model, precision="bf16")
    with torch.autocast("cpu", dtype=torch.float16):
        (scale * model(**batch(), num_items_in_batch=count).loss).backward()
    (scale * reference(**batch(), num_items_in_batch=count).loss).backward()
    for name, weight in (("lm_head", reference.lm_head.weight), ("embed", reference.model.embed_tokens.weight)):
        actual = (model.lm_head if name == "lm_head" else model.model.embed_tokens).weight.grad
        assert ((actual == 0) & (weight.grad != 0)).double().mean() < 0.001
        assert cosine(actual, weight.grad) > (0.9999 if name == "lm_head" else 0.99)


@pytest.mark.parametrize("tokens", [127, 128, 129, 257])
@pytest.mark.parametrize("head", ["BF16", "frozen", "FP8"])
def test_chunks_have_every_token(head, tokens, monkeypatch):
    """Also a last one that is alone in its chunk. Labels come shifted: else the last token has none."""
    inputs = batch(1, tokens)
    inputs |= {"shift_labels": inputs["input_ids"].clone(), "labels": inputs["input_ids"]}
    results = []
    for chunk_bytes in (2**30, 1):
        for name in ("CHUNK_BYTES", "FROZEN_CHUNK_BYTES"):
            monkeypatch.setattr(loss, name, chunk_bytes)
        model = build(max_position_embeddings=512)
        convert_to_fp8(model, FP8TrainingConfig(fp8_head=head == "FP8"))
        model.lm_head.weight.requires_grad_(head != "frozen")
        results.append(run(model, **inputs))
    assert_same(results[1], results[0])
    if head == "BF16":
        reference = build(max_position_embeddings=512)
        assert_close_to(results[0], run(reference, **inputs))
