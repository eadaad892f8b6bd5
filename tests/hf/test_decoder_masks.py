"""Who sees whom in a converted decoder that is trained, and how: windows, packed rows, caches, dropout, scales.

In the precision of the original, so that losses and gradients agree to rounding and a wrong mask cannot hide.
"""

import pytest
import torch
from decoder_cases import RECIPES, assert_close_to, batch, build, every_family, run
from test_decoder_loss import assert_same
from torch import nn

from octavo import convert_to_fp8

transformers = pytest.importorskip("transformers")


def both(family="Llama", **changes):
    models = build(family, **changes), build(family, **changes)
    convert_to_fp8(models[1], precision="bf16")
    return models


def differ(one, other):
    """That a case has what it is about: without it, the gradients would be others."""
    flat = [torch.cat([g.flatten() for g in gradients.values()]) for _, gradients in (one, other)]
    assert (flat[0] - flat[1]).norm() > 0.02 * flat[1].norm()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Mistral", {"sliding_window": 4}),
        ("Qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}),
        ("Qwen3", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}),
        ("Gemma2", {"sliding_window": 4}),
        ("Gemma3", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_sliding_window(family, changes):
    reference, model = both(family, **changes)
    expected = run(reference, **batch())
    wide = build(family, **changes | {"sliding_window": 64})
    differ(expected, run(wide, **batch()))
    assert_same(run(model, **batch()), expected)


def packed(length=21):
    """Sequences of different lengths side by side in one row, as collators without padding give them.

    Without a cache: with one, transformers takes positions for those of one sequence.
    """
    positions = torch.cat([torch.arange(n) for n in (5, 9, length - 14)])
    return {**batch(1, length), "position_ids": positions[None], "use_cache": False}


@every_family
def test_packed_rows(family):
    """Tokens see their own sequence only."""
    reference, model = both(family)
    expected = run(reference, **packed())
    differ(expected, run(reference, **batch(1, 21)))
    assert_same(run(model, **packed()), expected)


def test_packed_rows_do_not_see_each_other():
    """Against the same sequences, one at a time."""
    _, model = both()
    inputs = packed()
    shifted = inputs["labels"].roll(-1, 1)
    for last in (4, 13, 20):
        shifted[0, last] = -100
    total = (shifted != -100).sum()
    loss, gradients = run(model, **inputs, shift_labels=shifted)
    alone = [
        run(model, input_ids=inputs["input_ids"][:, a:b], labels=inputs["labels"][:, a:b], num_items_in_batch=total)
        for a, b in ((0, 5), (5, 14), (14, 21))
    ]
    torch.testing.assert_close(loss, sum(each[0] for each in alone))
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, sum(each[1][name] for each in alone), rtol=1e-3, atol=1e-5)


def test_positions_that_begin_later():
    reference, model = both()
    positions = torch.arange(7, 28).expand(3, -1)
    assert_same(run(model, **batch(), position_ids=positions), run(reference, **batch(), position_ids=positions))


@every_family
def test_attention_dropout(family):
    """The same numbers are dropped, and only while training."""
    reference, model = both(family, attention_dropout=0.5)
    plain = run(build(family), **batch())
    actual = []
    for each in (reference, model):
        torch.manual_seed(5)
        actual.append(run(each, **batch()))
    differ(actual[0], plain)
    assert_same(actual[1], actual[0])
    with torch.no_grad():
        logits = [each.eval()(**batch()).logits for each in (reference, model, build(family).eval())]
    torch.testing.assert_close(logits[0], logits[2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits[1], logits[2], rtol=1e-4, atol=1e-5)


def prefix_of(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=True).past_key_values


@pytest.mark.parametrize("by_position", [False, True])
def test_a_filled_cache(by_position):
    """Tokens see what the cache holds, and those before them: no square mask."""
    reference, model = both()
    ids, labels = batch()["input_ids"], batch()["labels"]
    results = []
    for each in (reference, model):
        cache = prefix_of(each, ids[:, :8])
        each.train()
        if by_position:
            each.zero_grad()
            loss = each(ids[:, 8:], None, None, cache, labels=labels[:, 8:]).loss
            loss.backward()
            results.append((loss.detach(), {n: p.grad.clone() for n, p in each.named_parameters()}))
        else:
            results.append(run(each, input_ids=ids[:, 8:], labels=labels[:, 8:], past_key_values=cache))
    differ(results[0], run(reference, input_ids=ids[:, 8:], labels=labels[:, 8:]))
    assert_same(results[1], results[0])


def test_an_empty_cache_is_filled():
    reference, model = both()
    caches = [transformers.DynamicCache() for _ in range(2)]
    results = [
        run(each, **batch(), past_key_values=cache, use_cache=True)
        for each, cache in zip((reference, model), caches, strict=True)
    ]
    assert_same(results[1], results[0])
    assert [cache.get_seq_length() for cache in caches] == [21, 21]
    for each in (reference, model):
        assert each(**batch(), use_cache=True).past_key_values.get_seq_length() == 21


@pytest.mark.parametrize("keep", [5, 1, torch.tensor([2, 3, 20])], ids=["5", "1", "indices"])
def test_some_logits_with_labels(keep):
    """As many labels as logits that are kept; the loss is of these alone."""
    reference, model = both()
    inputs = batch()
    kept = keep if isinstance(keep, int) else len(keep)
    shifted = inputs["labels"][:, -kept:].contiguous()
    inputs |= {"shift_labels": shifted, "logits_to_keep": keep}
    expected = run(reference, **inputs)
    assert_same(run(model, **inputs), expected)
    assert model(**inputs).logits.shape == (3, kept, 160)


def test_no_logits_left_out_by_zero():
    reference, model = both()
    expected = run(reference, **batch())
    for keep in (0, torch.arange(21)):
        assert_same(run(model, **batch(), logits_to_keep=keep), expected)


@pytest.mark.parametrize("shape", ["[B, T]", "[B, 1, T, T]"])
def test_a_mask_of_the_users_own(shape):
    """Tokens in the middle that nobody sees, or a prefix that sees all of itself."""
    reference, model = both()
    mask = torch.ones(3, 21, dtype=torch.int64)
    mask[1, 4:9] = 0
    if shape != "[B, T]":
        mask = torch.ones(21, 21, dtype=torch.bool).tril()
        mask[:6, :6] = True
        mask = mask.expand(3, 1, -1, -1)
    expected = run(reference, **batch(), attention_mask=mask)
    differ(expected, run(reference, **batch()))
    assert_same(run(model, **batch(), attention_mask=mask), expected)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
def test_groups_of_heads(heads):
    reference, model = both(num_attention_heads=heads[0], num_key_value_heads=heads[1])
    assert_same(run(model, **batch()), run(reference, **batch()))
    fp8 = build(num_attention_heads=heads[0], num_key_value_heads=heads[1])
    convert_to_fp8(fp8)
    assert_close_to(run(fp8, **batch()), run(reference, **batch()))


@pytest.mark.parametrize("family", ["Gemma2", "Gemma3"])
def test_a_scale_of_attention_that_is_not_that_of_heads(family):
    reference, model = both(family, query_pre_attn_scalar=2)
    expected = run(reference, **batch())
    differ(expected, run(build(family, query_pre_attn_scalar=256), **batch()))
    assert_same(run(model, **batch()), expected)


@pytest.mark.parametrize("name", ["final_logit_softcapping", "attn_logit_softcapping"])
@pytest.mark.parametrize("value", [0.05, None])
def test_softcapping(name, value):
    """Gemma 2 bends its logits and, computed eagerly, its scores; or does not."""
    reference, model, without = (build("Gemma2", **{name: change}) for change in (value, value, None))
    for each in (reference, model, without):
        each.set_attn_implementation("eager")
    convert_to_fp8(model, precision="bf16")
    expected = run(reference, **batch())
    if value is not None:
        differ(expected, run(without, **batch()))
    assert_same(run(model, **batch()), expected)


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default", "rope_theta": 100.0}, {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}]
)
def test_rope(rope):
    reference, model = both(rope_parameters=rope)
    expected = run(reference, **batch())
    differ(expected, run(build(), **batch()))
    assert_same(run(model, **batch()), expected)


def test_attention_that_looks_both_ways():
    reference, model = both()
    for each in (reference, model):
        each.config.is_causal = False
        for layer in each.model.layers:
            layer.self_attn.is_causal = False
    expected = run(reference, **batch())
    differ(expected, run(build(), **batch()))
    assert_same(run(model, **batch()), expected)


def test_biases_of_attention():
    reference, model = both("Qwen2")
    assert any(isinstance(m, nn.Linear) and m.bias is not None for m in model.modules())
    assert_same(run(model, **batch()), run(reference, **batch()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["delayed", "FP8 activations"])
@every_family
def test_the_eps_of_norms(family, name, dtype):
    """Half of what a row has in all norms: none may have another."""
    reference = build(family, rms_norm_eps=0.5)
    expected = run(reference, **batch())
    model = build(family, rms_norm_eps=0.5).to(dtype)
    convert_to_fp8(model, RECIPES[name])
    loss, gradients = run(model, **batch())
    assert_close_to((loss, {n: g.float() for n, g in gradients.items()}), expected, least=0.98)
    differ(expected, run(build(family, rms_norm_eps=1e-6), **batch()))
