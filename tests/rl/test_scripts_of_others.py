"""What scripts for other libraries do: each is right, or an error that says what to do instead."""

import json
import logging
import shutil
import subprocess
import sys
from dataclasses import make_dataclass
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from decoder_cases import build
from safetensors.torch import load_file
from tokenizers import processors
from trainer_cases import BYTES, byte_tokenizer

from octavo import FastLanguageModel
from octavo.rl import NativeEngine, attached, vllm

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from octavo.rl.trainer import OctavoGRPOTrainer  # noqa: E402

PROMPTS = ["1 + 1 =", "2 + 3 ="]
EXACT = {"dtype": torch.float32, "fp8_products": False}
GREEDY = SimpleNamespace(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    model = build(vocab_size=BYTES, max_position_embeddings=128, eos_token_id=BYTES - 1, **sizes)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch):
    monkeypatch.setattr(vllm, "is_installed", lambda: False)


def load(name, **options):
    return FastLanguageModel.from_pretrained(str(name), **{"load_in_fp8": True, "fast_inference": True} | options)


def adapted(model, **options):
    return FastLanguageModel.get_peft_model(model, **{"r": 4, "use_gradient_checkpointing": False} | options)


def with_values(model):
    """Adapters with an effect."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def completion(model, **options):
    return model.fast_generate(PROMPTS[0], GREEDY, **options)[0].outputs[0].token_ids


def grpo(tmp_path, **options):
    return trl.GRPOConfig(
        str(tmp_path / "run"), use_cpu=True, max_steps=1, per_device_train_batch_size=4, num_generations=2,
        max_completion_length=4, report_to=[], save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip


def trainer(model, args, **options):
    data = datasets.Dataset.from_dict({"prompt": PROMPTS})
    reward = {"reward_funcs": lambda completions, **_: [float(len(set(text))) for text in completions]}
    return trl.GRPOTrainer(**{"model": model, "args": args, "train_dataset": data, **reward, **options})


def test_a_folder_of_adapters_goes_on_to_be_trained(folder, tmp_path):
    model = with_values(adapted(load(folder, **EXACT)[0]))
    expected = completion(model)
    model.save_lora(tmp_path / "lora")
    again, tokenizer = load(tmp_path / "lora", **EXACT)
    assert isinstance(again, peft.PeftModel) and tokenizer.bos_token == byte_tokenizer().bos_token
    assert completion(again) == expected != completion(again, lora_request=None)
    trained = {name for name, p in again.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert adapted(again) is again and completion(again) == expected
    for options, words in (({"r": 8}, "r=8: .* with r=4; leave"), ({"lora_alpha": 32}, "lora_alpha=32: .*=16"),
                           ({"target_modules": ["q_proj"]}, "target_modules=.'q_proj'.: .*down_proj")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            adapted(again, **options)
    assert completion(again) == expected
    with pytest.raises(ValueError, match=r"r=4, and max_lora_rank=2; load with max_lora_rank=4"):
        load(tmp_path / "lora", max_lora_rank=2)
    with pytest.raises(ValueError, match="full_finetuning=True: these are adapters; merge them first"):
        load(tmp_path / "lora", full_finetuning=True, load_in_fp8="channel")
    plain, _ = load(tmp_path / "lora", fast_inference=False, load_in_fp8=False)
    assert isinstance(plain, peft.PeftModel) and not hasattr(plain, "save_lora")


def test_adapters_that_are_added_twice_keep_their_values(folder):
    model = with_values(adapted(load(folder, **EXACT)[0]))
    expected = completion(model)
    model.requires_grad_(False)
    assert adapted(model, use_gradient_checkpointing=True) is model and completion(model) == expected
    assert any(p.requires_grad for p in model.parameters()) and model.get_base_model().is_gradient_checkpointing


def test_adapters_by_peft_itself_have_methods(folder, tmp_path):
    base, _ = load(folder, **EXACT)
    model = with_values(peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear")))
    expected = completion(model)
    model.save_lora(tmp_path / "lora")
    assert completion(model, lora_request=model.load_lora(tmp_path / "lora", load_tensors=True)) == expected
    other = peft.get_peft_model(build(), peft.LoraConfig(r=4, target_modules="all-linear"))
    assert not hasattr(other, "save_lora")


def test_adapters_are_saved_by_the_method_of_the_model(folder, tmp_path):
    model = with_values(adapted(load(folder, **EXACT)[0]))
    expected = completion(model)
    model.save_pretrained_merged(tmp_path / "lora", byte_tokenizer(), save_method="lora")
    model.save_pretrained_merged(tmp_path / "merged", byte_tokenizer(), save_method="merged_16bit")
    assert {path.name for path in (tmp_path / "lora").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert completion(load(tmp_path / "lora", **EXACT)[0]) == expected
    assert (tmp_path / "merged" / "model.safetensors").exists()
    with pytest.raises(ValueError, match="it has no adapters of PEFT's"):
        model.get_base_model().save_pretrained_merged(tmp_path / "none", save_method="lora")
    with pytest.raises(ValueError, match="has adapters in it already: give get_peft_model the model around it"):
        adapted(model.get_base_model())
    assert isinstance(adapted(model.merge_and_unload()), peft.PeftModel)  # adapters that are gone are no obstacle


def test_completions_that_the_engine_cuts_are_said_once(folder, tmp_path, caplog):
    model = adapted(load(folder)[0])
    data = datasets.Dataset.from_dict({"prompt": ["a" * 126, "b"]})
    args = grpo(tmp_path)
    args.max_steps = 2
    with caplog.at_level(logging.WARNING, logger="octavo"):
        run = OctavoGRPOTrainer(model, lambda completions, **_: [0.0] * len(completions), args, data)
        run.train()
    said = [record.getMessage() for record in caplog.records if "max_completion_length" in record.getMessage()]
    assert said == ["octavo: a prompt of 126 tokens leaves less than max_completion_length=4 of the engine's 128: such "
                    "completions end there, and count as cut off"]  # fmt: skip


def test_a_model_needs_neither_peft_nor_trls_trainers(folder):
    """Importing TRL's GRPOTrainer imports vLLM, too, where it is installed."""
    code = f"""
import importlib.util, sys
sys.modules["peft"], find = None, importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("peft", "vllm") else find(name, *more)
from octavo import FastLanguageModel
model, _ = FastLanguageModel.from_pretrained({folder!r}, load_in_fp8=True, fast_inference=True)
print(type(model).__name__, [name for name in sys.modules if name.startswith("trl.trainer.")])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.splitlines()[-1:] == ["LlamaForCausalLM []"], run.stderr


def test_a_chat_template_has_begun_the_sequence(folder):
    model, tokenizer = load(folder)
    start = tokenizer.bos_token = tokenizer.eos_token
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, tokenizer.bos_token_id)]
    )
    asked, engine = [], attached(model)
    engine.generate = lambda prompts, n, sampling: (
        asked.extend(prompts) or NativeEngine.generate(engine, prompts, n, sampling)
    )
    model.fast_generate([f"{start}ab", "ab", ""], GREEDY)
    ab = tokenizer("ab", add_special_tokens=False)["input_ids"]
    assert asked == [[tokenizer.bos_token_id, *ab]] * 2 + [[tokenizer.bos_token_id]]


@pytest.mark.parametrize("field", ["max_token", "guided_decoding", "best_of", "repetition_penalty", "logit_bias"])
def test_sampling_fields_without_effect_are_refused(folder, field):
    model, _ = load(folder)
    neutral = SimpleNamespace(max_tokens=2, best_of=1, guided_decoding=None, logprobs=5, detokenize=True, seed=None)
    assert len(model.fast_generate(PROMPTS, neutral)) == 2
    with pytest.raises(ValueError, match=rf"sampling_params\.{field}=5: the engine samples by"):
        model.fast_generate(PROMPTS, SimpleNamespace(max_tokens=2, **{field: 5}))


def test_sampling_fields_of_every_kind_of_object(folder):
    """A model of pydantic has much more in it than its fields."""
    pydantic = pytest.importorskip("pydantic")
    model, _ = load(folder)
    kinds = (
        pydantic.create_model("Params", max_tokens=(int, 2), top_p=(float, 1.0), presence_penalty=(float, 0.0)),
        make_dataclass("Params", [("max_tokens", int, 2), ("presence_penalty", float, 0.0)], slots=True),
        make_dataclass("Params", [("max_tokens", int, 2), ("presence_penalty", float, 0.0)]),
    )
    for kind in kinds:
        assert len(model.fast_generate(PROMPTS, kind())) == 2
        with pytest.raises(ValueError, match=r"sampling_params\.presence_penalty=0\.5: the engine samples by"):
            model.fast_generate(PROMPTS, kind(presence_penalty=0.5))


def test_trls_own_vllm_is_the_engine(folder, tmp_path, caplog):
    model = adapted(load(folder)[0])
    args = grpo(tmp_path, use_vllm=True)
    with caplog.at_level(logging.WARNING, logger="octavo"):
        run = trainer(model, args)
    assert not run.use_vllm and "rollouts are by the native engine on the model's own weights" in caplog.text
    run.train()
    assert attached(model).statistics()["tokens"] > 0


@pytest.mark.parametrize("checkpointing", [True, False])
def test_grpo_of_nothing(folder, tmp_path, checkpointing):
    for model in (load(folder, load_in_fp8=False)[0], adapted(load(folder)[0]).requires_grad_(False)):
        with pytest.raises(ValueError, match=r"by rewards, but none of its weights is trained: .*get_peft_model"):
            trainer(model, grpo(tmp_path, gradient_checkpointing=checkpointing))
    model, _ = load(folder)
    config = peft.LoraConfig(r=4, target_modules="all-linear")
    run = trainer(model, grpo(tmp_path, gradient_checkpointing=checkpointing), peft_config=config)
    run.train()
    run.model.save_lora(tmp_path / "lora")
    assert any(
        x.any() for name, x in load_file(tmp_path / "lora" / "adapter_model.safetensors").items() if "_B" in name
    )


@pytest.mark.parametrize("asked", ["unsloth", True, False])
def test_checkpointing_is_as_asked_for(folder, tmp_path, monkeypatch, asked):
    """TRL turns it on by default, and off and on again around each rollout, always without offload."""
    model = adapted(load(folder)[0], use_gradient_checkpointing=asked)
    run = trainer(model, grpo(tmp_path))
    assert run.args.gradient_checkpointing is (asked is not False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    base = model.get_base_model()
    with monkeypatch.context() as patching:
        patching.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.gradient_checkpointing_disable()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    function = base.model.layers[0]._gradient_checkpointing_func.func
    assert (function.__name__ == "checkpoint_func") is (asked == "unsloth")  # that one offloads
    base.gradient_checkpointing_disable()
    assert not base.is_gradient_checkpointing


def test_a_family_that_no_engine_knows_is_refused_before_it_is_loaded(tmp_path):
    config = transformers.Phi3Config(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    config.architectures = ["Phi3ForCausalLM"]
    config.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the native engine does not know Phi3ForCausalLM \(Llama"):
        load(tmp_path)  # there are no weights


@pytest.mark.parametrize("architecture", ["FSDPLlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification", None])
def test_a_family_is_told_by_what_is_loaded(folder, tmp_path, architecture):
    """As AutoModelForCausalLM does, whatever class has written the checkpoint."""
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": architecture and [architecture]}))
    assert attached(load(path.parent)[0]).name == "native"


def test_arguments_for_adapters_of_other_libraries(folder, tmp_path):
    neutral = {
        "finetune_vision_layers": False,
        "finetune_mlp_modules": True,
        "qat_scheme": None,
        "task_type": "CAUSAL_LM",
    }
    model = adapted(load(folder)[0], temporary_location="nowhere", **neutral)
    assert FastLanguageModel.for_training(model, use_gradient_checkpointing="unsloth") is model
    model.save_pretrained_merged(tmp_path / "merged", save_method="merged_16bit", maximum_memory_usage=0.5)
    model, _ = load(folder)
    for options, words in (
        ({"finetune_attention_modules": False}, "finetune_attention_modules=False: .* target_modules"),
        ({"qat_scheme": "int4"}, "qat_scheme='int4': .*leave it out"),
        ({"random_state": None}, "random_state=None: a whole number"),
    ):
        with pytest.raises(ValueError, match=words):
            adapted(model, **options)


@pytest.mark.parametrize(
    ("config", "field", "words"),
    [
        (trl.GRPOConfig, "max_prompt_length", "TRL truncates no prompts"),
        (trl.GRPOConfig, "vllm_sampling_params", "leave it out: temperature"),
        (trl.GRPOConfig, "warmup_ratio", "warmup_steps takes it"),
        (trl.GRPOConfig, "max_seq_length", "max_completion_length is that of completions"),
        (trl.SFTConfig, "max_seq_length", "it is called max_length"),
        (trl.DPOConfig, "max_prompt_length", "max_length is that of prompts and answers together"),
    ],
)
def test_fields_that_are_gone(folder, tmp_path, config, field, words):
    load(folder)
    with pytest.raises(TypeError, match=rf"{field}=0.1: no field of {config.__name__}; {words}"):
        config(str(tmp_path), use_cpu=True, **{field: 0.1})


def test_the_old_name_of_the_tokenizer(folder, tmp_path):
    model, tokenizer = load(folder)
    model = adapted(model)
    assert trainer(model, grpo(tmp_path), tokenizer=tokenizer).processing_class is tokenizer
    with pytest.raises(TypeError, match=r"max_completion_length=4: GRPOTrainer takes it as a field of its config"):
        trainer(model, grpo(tmp_path), max_completion_length=4)
    data = datasets.Dataset.from_dict({"prompt": PROMPTS})
    args = grpo(tmp_path, use_vllm=True)  # which means the engine that the model has, here, too
    run = OctavoGRPOTrainer(model, lambda **_: [0.0], args, data, tokenizer=tokenizer)
    assert run.processing_class is tokenizer and run.engine is attached(model)
