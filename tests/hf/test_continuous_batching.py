"""transformers' continuous batching on fused models: `generate_batch` gives what `generate` gives."""

import pytest
import torch
from decoder_cases import SIZES, build
from trainer_cases import BYTES, byte_tokenizer

from octavo import FastLanguageModel, convert_to_fp8
from octavo.decoders.attention import NAME
from octavo.numerics.attention import varlen_attention

transformers = pytest.importorskip("transformers")
CACHE = {"num_blocks": 16, "max_batch_tokens": 64}  # else it takes a share of all memory
PROMPTS = [[5, 9, 33], [7, 8, 2, 61, 90, 14, 3], [44], list(range(20, 33))]  # ragged


def loaded(folder, family, **changes):
    build(family, **changes).save_pretrained(folder)
    model, _ = FastLanguageModel.from_pretrained(
        str(folder), dtype=torch.float32, load_in_fp8="block", fp8_products=False, tokenizer=False
    )
    model.generation_config.eos_token_id = None
    return model


def one_by_one(model, new=12):
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        outputs.append(model.generate(ids, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :].tolist())
    return outputs


def in_one_batch(model, new=12):
    config = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    cache = transformers.ContinuousBatchingConfig(**CACHE)
    outputs = model.generate_batch(PROMPTS, generation_config=config, continuous_batching_config=cache)
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Qwen3", {}),
        ("Mistral", {"sliding_window": 5}),
        ("Gemma", {}),
        ("Gemma3", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_it_equals_generate(tmp_path, family, changes):
    model = loaded(tmp_path, family, **changes)
    assert in_one_batch(model) == one_by_one(model)
    assert model.config._attn_implementation == NAME  # put back
    assert len({tuple(x) for x in one_by_one(model)}) == len(PROMPTS)  # not the same for every prompt


def test_with_adapters_and_through_peft(tmp_path):
    model = FastLanguageModel.get_peft_model(loaded(tmp_path, "Llama"), r=4, use_gradient_checkpointing=False).eval()
    before = in_one_batch(model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    assert in_one_batch(model) == one_by_one(model) != before


def test_a_trained_model():
    """Products in FP8: other batch-mates, other sums, so tokens may differ; it runs, and puts everything back."""
    model = build()
    convert_to_fp8(model)
    model.generation_config.pad_token_id = 0
    assert [len(x) for x in in_one_batch(model.eval(), new=3)] == [3] * len(PROMPTS)
    assert model.config._attn_implementation == NAME


def test_queries_that_are_the_last_tokens_of_their_sequences():
    """Attention over keys from a cache is that of the whole sequence, of which the last rows are taken."""
    torch.manual_seed(0)
    lengths, new = [7, 1, 12], [2, 1, 12]
    q, k, v = (torch.randn(sum(lengths), heads, 16) for heads in (4, 2, 2))
    keys = torch.tensor([0, *lengths]).cumsum(0)
    last = torch.cat([torch.arange(end - n, end) for end, n in zip(keys[1:].tolist(), new, strict=True)])
    for window in (None, 1, 3, 50):
        whole = varlen_attention(q, k, v, keys, window=window)
        part = varlen_attention(q[last], k, v, torch.tensor([0, *new]).cumsum(0), keys, window=window)
        torch.testing.assert_close(part, whole[last])


def test_trl_with_continuous_batching(tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    sizes = {"hidden_size": 64, "vocab_size": BYTES}
    model = loaded(tmp_path / "model", "Llama", **sizes)
    model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False)
    config = trl.GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, max_steps=1, per_device_train_batch_size=4,
        num_generations=4, max_completion_length=6, report_to=[], use_transformers_continuous_batching=True,
        transformers_continuous_batching_config=CACHE,
        disable_tqdm=True, save_strategy="no", logging_steps=1,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model, lambda completions, **_: [float(len(set(text))) for text in completions], config,
        Dataset.from_dict({"prompt": ["ab", "cd"]}), processing_class=byte_tokenizer(),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[0]["completions/mean_length"] > 0
    assert SIZES["vocab_size"] < BYTES and model.config._attn_implementation == NAME
