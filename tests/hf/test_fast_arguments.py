"""What scripts bring to `FastLanguageModel` from elsewhere: it works, or the answer names the fix."""

import copy

import huggingface_hub
import pytest
import torch
from bounds import cosine
from small import small_llama, tokens
from torch import nn
from trainer_cases import BYTES, SETTINGS, byte_tokenizer, texts
from transformers import AutoModelForCausalLM, TrainingArguments

from octavo import FastLanguageModel, FP8Linear, FP8TrainingConfig
from octavo.nn.frozen import FP8FrozenLinear

trl = pytest.importorskip("trl")
POSITIONS = 4096


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    shape = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}  # whole blocks, for transformers' own reader
    small_llama(vocab_size=BYTES, max_position_embeddings=POSITIONS, **shape).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


def load(folder, **options):
    return FastLanguageModel.from_pretrained(folder, **{"load_in_fp8": True} | options)


def settings(folder, **more):
    return SETTINGS | {"output_dir": str(folder), "max_steps": 1, "bf16": False} | more


def long_texts():
    one = texts().select(range(4))
    return one.map(lambda row: {"text": (row["text"] * 400)[: POSITIONS + 1000]})


@pytest.mark.parametrize("kind", ["LoRA", "full"])
def test_the_length_asked_for_reaches_the_trainer(folder, tmp_path, kind):
    model, tokenizer = load(folder, max_seq_length=2048, full_finetuning=kind == "full")
    assert model.max_seq_length == tokenizer.model_max_length == 2048
    if kind == "LoRA":
        model = FastLanguageModel.get_peft_model(model, r=4)
    config = trl.SFTConfig(**settings(tmp_path))
    trainer = trl.SFTTrainer(model=model, tokenizer=tokenizer, args=config, train_dataset=long_texts())
    assert trainer.args.max_length == 2048 and trainer.processing_class is tokenizer
    assert {len(row["input_ids"]) for row in trainer.train_dataset} == {2048}


def test_who_has_the_last_word_about_length(folder, tmp_path):
    model, tokenizer = load(folder, max_seq_length=2048)
    model = FastLanguageModel.get_peft_model(model, r=4)
    shared = {"train_dataset": long_texts(), "processing_class": tokenizer}

    def length(model, **more):
        return trl.SFTTrainer(model, **shared | more).args.max_length

    assert length(model, args=trl.SFTConfig(**settings(tmp_path), max_length=512)) == 512  # the trainer's own
    assert length(model, args=trl.SFTConfig(**settings(tmp_path), max_length=None)) is None
    with pytest.raises(ValueError, match=r"TrainingArguments, which has no max_length .* SFTConfig\(max_length=2048"):
        length(model, args=TrainingArguments(**settings(tmp_path)))
    nobody_asked, _ = load(folder)
    assert nobody_asked.max_seq_length == 2048 and tokenizer.model_max_length == 2048
    adapted = FastLanguageModel.get_peft_model(nobody_asked, r=4)
    assert length(adapted, args=trl.SFTConfig(**settings(tmp_path))) == 1024
    adapted = FastLanguageModel.get_peft_model(load(folder)[0], r=4, max_seq_length=300)
    assert length(adapted, args=trl.SFTConfig(**settings(tmp_path))) == 300
    dpo = trl.DPOConfig(**settings(tmp_path))
    pairs = long_texts().map(lambda row: {"prompt": "a", "chosen": row["text"], "rejected": "b"}, remove_columns="text")
    assert trl.DPOTrainer(model, args=dpo, train_dataset=pairs, tokenizer=tokenizer).args.max_length == 2048


def test_words_of_other_versions_of_trl_are_answered(folder, tmp_path):
    model, tokenizer = load(folder, max_seq_length=256)
    model = FastLanguageModel.get_peft_model(model, r=4)
    shared = {"model": model, "train_dataset": texts(), "args": trl.SFTConfig(**settings(tmp_path))}
    with pytest.raises(TypeError, match="the second is the new name of the first"):
        trl.SFTTrainer(**shared, tokenizer=tokenizer, processing_class=tokenizer)
    with pytest.raises(TypeError, match=r"SFTConfig\(max_length=2048"):
        trl.SFTTrainer(**shared, max_seq_length=2048)
    with pytest.raises(TypeError, match=r"packing=True: SFTTrainer takes it as a field of its configuration"):
        trl.SFTTrainer(**shared, packing=True)
    with pytest.raises(TypeError, match="no_such_thing"):  # TRL's own
        trl.SFTTrainer(**shared, no_such_thing=True)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("load_in_fp8", [False, True, "transformers"])
def test_a_loss_that_nothing_is_trained_for_says_so(folder, load_in_fp8, training):
    """Also as the model comes, in evaluation mode, and of a family that nothing is fused of."""
    if load_in_fp8 == "transformers":
        from octavo import OctavoConfig

        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=OctavoConfig())
    else:
        model, _ = load(folder, load_in_fp8=load_in_fp8)
    assert not model.training
    with pytest.raises(ValueError, match=r"none of its weights is trained: .*get_peft_model"):
        model.train(training)(input_ids=tokens(), labels=tokens()).loss.backward()
    loss = model.eval()(input_ids=tokens(), labels=tokens()).loss
    loss /= 2  # as for gradients of several batches
    with pytest.raises(ValueError, match="none of its weights is trained"):
        loss.backward()
    with torch.no_grad():
        assert not model(input_ids=tokens(), labels=tokens()).loss.requires_grad
    again = copy.deepcopy(model).eval()
    assert float(again(input_ids=tokens(), labels=tokens()).loss) > 0
    assert again(input_ids=tokens()).loss is None
    model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False).eval()
    model(input_ids=tokens(), labels=tokens()).loss.backward()  # adapters train in evaluation mode, too
    assert any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_in_fp9": True}, "load_in_fp9=True: no argument of .*; load_in_fp8 is meant?"),
        ({"use_cash": True}, "use_cash=True: no argument of FastLanguageModel.from_pretrained"),
        ({"load_in_fp8": False, "random_state": 3407}, "random_state=3407: no argument of"),
    ],
)
def test_arguments_that_nobody_takes_are_named(folder, options, message):
    with pytest.raises(TypeError, match=message):
        load(folder, **options)
    assert load(folder, use_cache=False)[0].config.use_cache is False  # one that the configuration takes


@pytest.mark.parametrize("tokenizer", [True, False])
def test_a_model_that_is_not_there(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name, words in (
        ("nobody/no-such-model", "no folder here, and no model on the Hub that can be had"),
        ("/nowhere/at/all", "there is no such folder"),
        ("some/where/else", "there is no such folder"),
        (str(tmp_path), "a folder without config.json"),
    ):
        with pytest.raises(ValueError, match=f"model_name='{name}': {words}") as error:
            load(name, tokenizer=tokenizer)
        assert "tokenizer" not in str(error.value)


def test_saving_by_a_method_of_the_model(folder, tmp_path):
    model, tokenizer = load(folder)
    adapted = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    expected = adapted(tokens()).logits
    for method, bound in (("merged_16bit", 0.99), ("merged_fp8", 0.97)):
        written = adapted.save_pretrained_merged(tmp_path / method, tokenizer, save_method=method)
        again = AutoModelForCausalLM.from_pretrained(written, dtype=torch.bfloat16)
        assert cosine(again(tokens()).logits, expected) > bound
        assert (written / "tokenizer_config.json").exists()
    full, _ = load(folder, full_finetuning=True)
    full.save_pretrained_merged(str(tmp_path / "full"))
    assert (tmp_path / "full" / "model.safetensors").exists()
    for name in ("save_pretrained_gguf", "push_to_hub_gguf", "push_to_hub_merged"):
        with pytest.raises(NotImplementedError, match=f"{name}: .*save_pretrained_merged"):
            getattr(adapted, name)("somewhere", tokenizer, quantization_method="q4_k_m")
    with pytest.raises(ValueError, match="save_method='merged_4bit'"):
        adapted.save_pretrained_merged(tmp_path / "4bit", save_method="merged_4bit")


def test_what_true_means(folder):
    """The fastest recipe that is safe: see the table of `octavo/hf/fast.py`."""
    frozen = {m.granularity for m in load(folder)[0].modules() if isinstance(m, FP8FrozenLinear)}
    trained = [m for m in load(folder, full_finetuning=True)[0].modules() if isinstance(m, FP8Linear)]
    assert frozen == {"channel"} and {m.config for m in trained} == {FP8TrainingConfig.from_recipe("delayed")}


def test_two_words_about_the_scales_of_trained_weights(folder):
    config = FP8TrainingConfig.from_recipe("block")
    with pytest.raises(ValueError, match=r"load_in_fp8='channel' with fp8_config.granularity='block'"):
        load(folder, load_in_fp8="channel", full_finetuning=True, fp8_config=config)
    model, _ = load(folder, load_in_fp8="block", full_finetuning=True, fp8_config=config, skip="o_proj")
    assert type(model.model.layers[0].self_attn.o_proj) is nn.Linear
    assert model.model.layers[0].mlp.up_proj.config.granularity == "block"
