"""Padded and packed batches on the GPU: flash attention over sequences, against one sequence at a time."""

import pytest
import torch
from bounds import cosine

from octavo import FP8TrainingConfig, convert_to_fp8
from octavo.decoders import attention
from octavo.numerics.attention import causal_mask, varlen_attention

transformers = pytest.importorskip("transformers")

LENGTHS = (513, 1, 700, 64, 129)
FAMILIES = {
    "Llama": (transformers.LlamaConfig, {}),
    "Qwen3": (transformers.Qwen3Config, {"head_dim": 128}),
    "Mistral": (transformers.MistralConfig, {"sliding_window": 100}),
    "Gemma": (transformers.GemmaConfig, {"head_dim": 256}),
    "Gemma3": (transformers.Gemma3TextConfig, {"head_dim": 256, "sliding_window": 100}),
}


def build(family="Llama", dtype=torch.bfloat16, **changes):
    torch.manual_seed(0)
    kind, own = FAMILIES[family]
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 2000,
        "max_position_embeddings": 2048,
    }
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(
            kind(**sizes | own | changes), dtype=dtype, attn_implementation="sdpa"
        ).train()


def sequences():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(1, 2000, (length,), generator=generator).cuda() for length in LENGTHS]


def padded(parts, side="right"):
    length = max(map(len, parts))
    ids, mask, labels = (torch.full((len(parts), length), fill, device="cuda") for fill in (0, 0, -100))
    for row, part in enumerate(parts):
        place = slice(0, len(part)) if side == "right" else slice(length - len(part), length)
        ids[row, place], mask[row, place], labels[row, place] = part, 1, part
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def packed(parts):
    ids = torch.cat(parts)[None]
    positions = torch.cat([torch.arange(len(part), device="cuda") for part in parts])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.where(positions > 0, -100)}


def run(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def one_by_one(model, parts):
    model.zero_grad()
    count = sum(len(part) - 1 for part in parts)
    total = 0.0
    for part in parts:
        if len(part) > 1:
            loss = model(input_ids=part[None], labels=part[None]).loss * (len(part) - 1) / count
            loss.backward()
            total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_as_one_by_one(family):
    """Against FP32, BF16 is no further off when batches are flat than when each sequence is computed alone."""
    exact_loss, exact = one_by_one(build(family, torch.float32), sequences())
    model = build(family)
    convert_to_fp8(model, precision="bf16")
    alone_loss, alone = one_by_one(model, sequences())
    for inputs in (padded(sequences()), padded(sequences(), "left"), packed(sequences())):
        loss, gradients = run(model, **inputs)
        assert abs(loss - exact_loss) <= 2 * abs(alone_loss - exact_loss) + 2e-3
        for name, gradient in gradients.items():
            error, alone_error = ((g.float() - exact[name]).norm() for g in (gradient, alone[name]))
            assert error <= 1.5 * alone_error + 1e-6, name
    assert model.octavo_report.padded == {}


@pytest.mark.parametrize("recipe", ["delayed", "channel", "block"])
@pytest.mark.parametrize("compiled", [False, True])
def test_recipes(recipe, compiled):
    expected_loss, expected = one_by_one(build(), sequences())
    model = build()
    convert_to_fp8(model, FP8TrainingConfig.from_recipe(recipe))
    if compiled:
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    for inputs in (padded(sequences()), packed(sequences()), padded(sequences()[:3])):
        loss, gradients = run(model, **inputs)
        if "attention_mask" in inputs and len(inputs["input_ids"]) == 3:
            continue  # another number of tokens, which must run
        assert abs(loss / expected_loss - 1) < 0.01
        assert all(cosine(g, expected[name]) > 0.97 for name, g in gradients.items() if g.dim() == 2)


@pytest.mark.parametrize("length", [384, 300])
def test_rows_of_one_length(length):
    """cuDNN for round lengths, flash attention for others and for windows: as FP32 has it."""
    q, k, v = (torch.randn(2, heads, length, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 4, 4))
    mask, module = attention.plainly_causal(q), torch.nn.Module()
    for window in (None, 50):
        visible = causal_mask(length, window, q.device)
        exact = torch.nn.functional.scaled_dot_product_attention(
            q.float(), k.float(), v.float(), attn_mask=visible, enable_gqa=True
        ).transpose(1, 2)
        actual = attention.attention(module, q, k, v, mask, scaling=64**-0.5, sliding_window=window)[0]
        assert (actual - exact).norm() < 6e-3 * exact.norm()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    """A layer that is computed again uses the kernels of the first time."""
    model = build(num_hidden_layers=3)
    convert_to_fp8(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for length in (256, 200, 256, 200):
        ids = torch.randint(1, 2000, (2, length), device="cuda")
        run(model, input_ids=ids, labels=ids)
    run(model, **padded(sequences()))


@pytest.mark.parametrize("window", [None, 100])
def test_attention_over_pages(window):
    """New tokens of several sequences, over keys of a cache: flash attention against the specification."""
    new = (5, 1, 700, 64, 1)
    keys, queries = (torch.tensor([0, *x], device="cuda").cumsum(0) for x in (LENGTHS, new))
    q = torch.randn(1, 8, sum(new), 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(sum(LENGTHS), 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    class Pages:
        def update(self, **_):
            return k, v

    module = torch.nn.Module()
    module.layer_idx = 0
    out, _ = attention.paged_attention(
        module, q, k, v, None, cache=Pages(), cu_seq_lens_q=queries, cu_seq_lens_k=keys, max_seqlen_q=max(new),
        max_seqlen_k=max(LENGTHS), read_index=[], write_index=[], sliding_window=window,
    )  # fmt: skip
    expected = varlen_attention(q[0].transpose(0, 1).float(), k.float(), v.float(), queries, keys, window=window)
    assert (out[0] - expected).abs().max() < 0.02  # BF16 products of values around 1
