"""Which calls of attention go to cuDNN or flash attention, with stand-ins that run on a CPU."""

from types import SimpleNamespace

import pytest
import torch
from decoder_cases import batch, build, run
from test_decoder_loss import assert_same
from test_decoder_masks import differ, packed, prefix_of

from octavo import convert_to_fp8
from octavo.decoders import attention
from octavo.numerics.attention import varlen_attention


class Elsewhere:
    """A tensor as if it were on a GPU, in BF16."""

    device, dtype = torch.device("cuda"), torch.bfloat16

    def __init__(self, x):
        self.shape = x.shape


class OnGPU:
    """torch, with stand-ins for the kernels of a GPU that run on a CPU: they take what those take."""

    version = SimpleNamespace(hip=None)

    def __init__(self, cudnn, flash):
        aten = SimpleNamespace(_scaled_dot_product_cudnn_attention=cudnn, _flash_attention_forward=flash)
        self.ops = SimpleNamespace(aten=aten)

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def flash_calls():
    """Offsets of the sequences in each call of flash attention."""
    return []


@pytest.fixture
def calls(monkeypatch, flash_calls):
    """How often cuDNN would have run. As it does: causal from the upper left, groups of heads, no mask, no dropout."""
    seen = []

    def cudnn(query, key, value, bias, log_sum_exp, dropout, is_causal, *, scale):
        assert bias is None and log_sum_exp == torch.is_grad_enabled() and dropout == 0.0 and is_causal
        seen.append(query.shape)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
        return (out,)

    def flash(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left, window_size_right):
        assert cu_q is cu_k and cu_q.dtype == torch.int32 and max_q == max_k == cu_q.diff().max() and not debug
        assert causal == (window_size_left is None) and window_size_right == (None if causal else 0)
        flash_calls.append(cu_q.tolist())
        window = None if causal else window_size_left + 1
        return (varlen_attention(q, k, v, cu_q, scale=scale, window=window, dropout=dropout),)

    for name in ("_cudnn_takes", "_flash_takes"):
        honest = getattr(attention, name)
        monkeypatch.setattr(attention, name, lambda q, k, honest=honest: honest(Elsewhere(q), Elsewhere(k)))
    monkeypatch.setattr(attention, "torch", OnGPU(cudnn, flash))  # for this module alone
    monkeypatch.setattr(attention, "_ROUND", 21)
    return seen


def both(family="Llama", **changes):
    models = build(family, **changes), build(family, **changes)
    convert_to_fp8(models[1], precision="bf16")
    return models


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"num_key_value_heads": 1}),
        ("Llama", {"num_key_value_heads": 4}),
        ("Qwen3", {}),
        ("Gemma3", {"query_pre_attn_scalar": 2, "layer_types": ["full_attention", "full_attention"]}),
    ],
)
def test_plain_training_runs_on_cudnn(family, changes, calls):
    reference, model = both(family, **changes)
    actual = run(model, **batch())
    assert len(calls) == 2  # one a layer
    assert_same(actual, run(reference, **batch()))


@pytest.mark.parametrize("changes", [{"attention_dropout": 0.5}, {"head_dim": 136}, {"head_dim": 20}], ids=str)
def test_what_cudnn_cannot_do_runs_elsewhere(changes, calls):
    reference, model = both(**changes)
    results = []
    for each in (reference, model):
        torch.manual_seed(5)
        results.append(run(each, **batch()))
    assert not calls
    assert_same(results[1], results[0])


def test_masks_and_packed_rows_run_on_flash_attention(calls, flash_calls):
    reference, model = both()
    mask = torch.ones(3, 21, dtype=torch.int64)
    mask[1, 15:] = 0
    inputs = {**batch(), "attention_mask": mask}
    inputs["labels"] = inputs["labels"].masked_fill(mask == 0, -100)
    for each in (inputs, packed()):
        assert_same(run(model, **each), run(reference, **each | {"use_cache": False}))
    assert not calls and flash_calls[:2] == 2 * [[0, 21, 36, 57, 64]] and len(flash_calls) == 4


def test_a_given_mask_runs_elsewhere(calls, flash_calls):
    """Logits are asked for, so padding is computed, with a mask of transformers' making."""
    reference, model = both()
    ids = batch()["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    actual, expected = (each(ids, attention_mask=mask).logits for each in (model, reference))
    torch.testing.assert_close(actual[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-4)
    assert not calls and not flash_calls


def test_windows_run_on_flash_attention(calls, flash_calls):
    windows = both("Mistral", sliding_window=4)
    assert_same(run(windows[1], **batch()), run(windows[0], **batch()))
    assert not calls and flash_calls == 2 * [[0, 21, 42, 63]]


def test_a_window_of_some_layers(calls, flash_calls):
    kinds = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    reference, model = both("Gemma3", **kinds)
    expected = run(reference, **batch())
    differ(expected, run(build("Gemma3", **kinds | {"sliding_window": 64}), **batch()))
    assert_same(run(model, **batch()), expected)
    assert len(calls) == len(flash_calls) == 1


def test_cudnn_is_for_round_lengths(calls, flash_calls, monkeypatch):
    """Whatever came before, and computed again by checkpointing: else it would save other tensors than at first."""
    monkeypatch.setattr(attention, "_ROUND", 7)
    reference, model = both()
    model.gradient_checkpointing_enable()
    for rows, length in ((3, 21), (3, 20), (2, 14), (3, 21)):
        assert_same(run(model, **batch(rows, length)), run(reference, **batch(rows, length)))
    assert len(calls) == 3 * 4 and len(flash_calls) == 4


def test_deterministic_algorithms_run_on_flash_attention(calls, flash_calls):
    """cuDNN adds up the gradient of q in any order; a warning is not enough for torch to choose another."""
    _, model = both()
    try:
        torch.use_deterministic_algorithms(True)
        run(model, **batch())
        assert not calls and len(flash_calls) == 2
        torch.use_deterministic_algorithms(True, warn_only=True)
        run(model, **batch())
        assert len(calls) == 2 and len(flash_calls) == 2
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_filled_cache_runs_elsewhere(calls):
    reference, model = both()
    ids, labels = batch()["input_ids"], batch()["labels"]
    results = []
    for each in (reference, model):
        cache = prefix_of(each, ids[:, :8])
        calls.clear()
        each.train()
        results.append(run(each, input_ids=ids[:, 8:], labels=labels[:, 8:], past_key_values=cache))
    assert_same(results[1], results[0])
    assert not calls


def test_one_token_at_a_time(calls):
    reference, model = both()
    prompt = batch()["input_ids"][:, :7]
    actual = [each.eval().generate(prompt, max_new_tokens=5, do_sample=False) for each in (reference, model)]
    assert torch.equal(*actual)
    assert {shape[2] for shape in calls} <= {7}


def test_both_ways_run_elsewhere(calls):
    reference, model = both()
    for each in (reference, model):
        each.config.is_causal = False
        for layer in each.model.layers:
            layer.self_attn.is_causal = False
    assert_same(run(model, **batch()), run(reference, **batch()))
    assert not calls


@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (1, 9), (1, 1)])
def test_queries_that_are_not_as_many_as_keys_run_elsewhere(queries, keys, calls, flash_calls):
    """Where causal begins is a matter of taste then, and cuDNN's is not torch's."""
    layer = build().model.layers[0].self_attn
    q, k, v = (torch.randn(2, heads, n, 16) for heads, n in ((4, queries), (2, keys), (2, keys)))
    out, _ = attention.attention(layer, q, k, v, None, scaling=0.3)
    assert not calls and not flash_calls and out.shape == (2, queries, 4, 16)
