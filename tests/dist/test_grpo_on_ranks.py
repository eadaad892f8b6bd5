"""TRL's GRPOTrainer with rollouts by the native engine, on two ranks."""

import pytest
from decoder_cases import build
from ranks import on_ranks
from torch.distributed.fsdp import fully_shard
from trainer_cases import BYTES, byte_tokenizer

from octavo import FastLanguageModel
from octavo.rl import NativeEngine, Sampling

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

PROMPTS = ["1 + 1 =", "2 + 3 =", "the sum of 4 and 5 is", "9"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    build(vocab_size=BYTES, max_position_embeddings=64, eos_token_id=BYTES - 1).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


def train(_rank, folder, output):
    model, tokenizer = FastLanguageModel.from_pretrained(
        folder, max_seq_length=48, load_in_fp8=True, fast_inference=True, engine="native", max_lora_rank=4
    )
    model = FastLanguageModel.get_peft_model(model, r=4, random_state=1)
    written = []

    def vowels(completions, **_):
        written.append(completions)
        return [sum(text.count(letter) for letter in "aeiou") + len(text) / 50 for text in completions]

    arguments = trl.GRPOConfig(
        str(output), per_device_train_batch_size=4, num_generations=4, max_completion_length=12, max_steps=2,
        learning_rate=1e-3, beta=0.0, use_cpu=True, bf16=False, report_to=[], logging_steps=1, save_strategy="no",
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model,
        vowels,
        arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
    )
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return norms, {n: p.detach().numpy() for n, p in model.named_parameters() if "lora_" in n}, written


def test_each_rank_samples_its_own_and_all_take_the_same_steps(folder, tmp_path):
    (norms, adapters, one), (others, same, two) = on_ranks(2, train, folder, tmp_path)
    assert norms == others and len(norms) == 2 and all(norms)
    assert all((adapters[name] == same[name]).all() for name in adapters)
    assert any((value != 0).any() for name, value in adapters.items() if "lora_B" in name)
    assert one != two


def generate_on_shards(_rank, folder):
    model, _ = FastLanguageModel.from_pretrained(folder, load_in_fp8=True)
    engine = NativeEngine(model, max_length=32, slots=2)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with pytest.raises(ValueError, match=r"is a shard, and an engine needs whole weights: train under DDP"):
        engine.generate([[1, 2, 3]], 2, Sampling(max_new_tokens=4))


def test_shards_are_refused(folder):
    on_ranks(2, generate_on_shards, folder)
