"""Adapters that are there already: which calls of get_peft_model keep them, and where those of the Hub come from."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import peft
import pytest
import torch
from small import small_llama
from trainer_cases import BYTES, byte_tokenizer

from octavo import FastLanguageModel
from octavo.hf import reading
from octavo.hf.fast import LINEARS

NAMES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
         "mlp.down_proj")  # fmt: skip
PATTERN = r".*\.(q|k|v|o|gate|up|down)_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    small_llama(vocab_size=BYTES).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


def load(name, **options):
    return FastLanguageModel.from_pretrained(str(name), **{"load_in_fp8": True, "tokenizer": False} | options)[0]


def with_adapters(folder, **options):
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM", "target_modules": LINEARS} | options
    )
    return peft.get_peft_model(load(folder), config)


def asked(model, **options):
    return FastLanguageModel.get_peft_model(model, **{"r": 4, "use_gradient_checkpointing": False} | options)


@pytest.mark.parametrize(
    ("own", "call"),
    [
        ({}, {"loftq_config": None, "rank_pattern": {}}),
        ({}, {"target_modules": "all-linear"}),
        ({}, {"target_modules": PATTERN}),
        ({}, {"target_modules": [f"model.layers.{i}.{name}" for i in range(2) for name in NAMES]}),
        ({"target_modules": "all-linear"}, {}),
        ({"target_modules": PATTERN}, {"target_modules": tuple(LINEARS)}),
        ({"target_modules": LINEARS, "layers_to_transform": [0]}, {"layers_to_transform": [0]}),
        ({"target_modules": "all-linear", "modules_to_save": ["lm_head"]}, {"modules_to_save": ("lm_head",)}),
        ({"target_modules": ["q_proj"], "init_lora_weights": "gaussian"}, {"target_modules": ["q_proj"]}),
    ],
)
def test_calls_for_the_same_adapters_keep_them(folder, own, call):
    model = with_adapters(folder, **own)
    values = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}
    assert asked(model, **call) is model
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters() if name in values)


@pytest.mark.parametrize(
    ("own", "call", "words"),
    [
        ({"layers_to_transform": [0]}, {}, r"7 adapters; model\.layers\.1\.mlp\.down_proj has none"),
        ({"target_modules": [f"model.layers.0.{name}" for name in NAMES]}, {}, "7 adapters; .* has none"),
        ({}, {"target_modules": ["q_proj"]}, r"target_modules=\['q_proj'\]: .* 14 adapters; .*down_proj has one"),
        ({}, {"layers_to_transform": [0]}, r"14 adapters; model\.layers\.1\.mlp\.down_proj has one"),
        ({"use_rslora": True}, {}, "use_rslora=False: this model has adapters already, with use_rslora=True"),
        ({"rank_pattern": {"q_proj": 8}}, {}, r"rank_pattern=\{\}: .* with rank_pattern=\{'q_proj': 8\}"),
        ({"alpha_pattern": {"q_proj": 8}}, {}, r"alpha_pattern=\{\}: "),
        ({"modules_to_save": ["lm_head"]}, {}, r"modules_to_save=None: .* modules_to_save=\['lm_head'\]"),
        ({}, {"r": 8}, "r=8: .* with r=4; leave"),
        ({"lora_dropout": 0.1}, {}, "lora_dropout=0.0: .* with lora_dropout=0.1"),
    ],
)
def test_calls_for_other_adapters_say_what_differs(folder, own, call, words):
    with pytest.raises(ValueError, match=words):
        asked(with_adapters(folder, **own), **call)


def test_adapters_of_another_kind(folder):
    prompted = peft.get_peft_model(load(folder), peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="LoRA: this model has adapters already, with PROMPT_TUNING"):
        asked(prompted)


def test_a_call_sets_length_and_checkpointing_of_kept_adapters(folder):
    model = asked(with_adapters(folder), use_gradient_checkpointing=True, max_seq_length=64)
    base = model.get_base_model()
    assert base.is_gradient_checkpointing and base.max_seq_length == base.octavo_asked_length == 64
    asked(model)
    assert not base.is_gradient_checkpointing and base.octavo_checkpointing is False
    new = asked(load(folder), max_seq_length=32).get_base_model()
    assert new.max_seq_length == new.octavo_asked_length == 32
    for wrong, words in (
        (10**6, f"max_seq_length={10**6}: LlamaForCausalLM of .* positions"),
        ("2048", "whole number"),
    ):
        with pytest.raises(ValueError, match=words):
            asked(load(folder), max_seq_length=wrong)


@pytest.fixture(scope="module")
def hub(tmp_path_factory, folder):
    """A cache of the Hub with a model, and adapters for it whose revision v2 has other values."""
    hub = tmp_path_factory.mktemp("hub")

    def repository(name, **revisions):
        place = hub / f"models--{name.replace('/', '--')}"
        (place / "refs").mkdir(parents=True)
        for number, (revision, source) in enumerate(revisions.items()):
            commit = str(number + 1) * 40
            (place / "refs" / revision).write_text(commit)
            shutil.copytree(source, place / "snapshots" / commit)

    other = tmp_path_factory.mktemp("base")
    small_llama(vocab_size=BYTES, rms_norm_eps=0.5).save_pretrained(other)
    repository("me/base", main=Path(folder), v1=other)
    places = {}
    for revision, value in (("main", 1.0), ("v2", 2.0)):
        model = with_adapters(folder)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(parameter, value)
        places[revision] = tmp_path_factory.mktemp(revision)
        model.save_pretrained(places[revision])
        path = places[revision] / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "me/base"}))
    repository("me/bare", **places)
    pinned = tmp_path_factory.mktemp("pinned")
    shutil.copytree(places["main"], pinned, dirs_exist_ok=True)
    path = pinned / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"revision": "v1"}))
    repository("me/pinned", v2=pinned)
    for place in places.values():
        byte_tokenizer().save_pretrained(place)
    repository("me/lora", **places)
    return str(hub)


@pytest.mark.parametrize(("revision", "value"), [(None, 1.0), ("v2", 2.0)])
def test_adapters_of_a_revision_in_a_cache(hub, revision, value, monkeypatch):
    """The model that they are for has no such revision."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    options = {"cache_dir": hub, "local_files_only": True} | ({} if revision is None else {"revision": revision})
    model = load("me/lora", **options)
    found = {float(p.flatten()[0]) for name, p in model.named_parameters() if "lora_B" in name}
    assert found == {value}
    # Without a connection, AutoTokenizer takes no repository that has no config.json; so this looks at what is asked.
    asked = []
    monkeypatch.setattr(reading, "read_tokenizer", lambda *given: asked.append(given))
    for name in ("me/lora", "me/bare"):
        FastLanguageModel.from_pretrained(name, load_in_fp8=True, **options)
    without = {name: value for name, value in options.items() if name != "revision"}
    assert asked == [("me/lora", options), ("me/base", without)]


def test_adapters_name_the_revision_of_their_model(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model = asked(load("me/base", cache_dir=hub, revision="v1"))
    assert model.config.rms_norm_eps == 0.5
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["revision"] == "v1"
    assert load(tmp_path, cache_dir=hub).config.rms_norm_eps == 0.5
    assert load("me/pinned", cache_dir=hub, revision="v2").config.rms_norm_eps == 0.5
    assert load("me/lora", cache_dir=hub).config.rms_norm_eps != 0.5


@pytest.mark.parametrize("content", ["[]", "{", "7"])
def test_a_configuration_of_adapters_that_is_damaged(folder, tmp_path, content):
    shutil.copytree(folder, tmp_path / "llama")
    (tmp_path / "llama" / "adapter_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"llama': its adapter_config.json is no JSON object; restore it"):
        load(tmp_path / "llama")


def test_the_folder_of_a_run_names_what_is_in_it(tmp_path):
    for file in ("octavo-run.json", "config.json"):
        (tmp_path / file).write_text("{}")
    with pytest.raises(ValueError, match="the folder of a run of Octavo, which has no model yet"):
        load(tmp_path)
    (tmp_path / "adapter").mkdir()
    with pytest.raises(
        ValueError, match=f"the folder of a run of Octavo; what it has trained is in {tmp_path}/adapter"
    ):
        load(tmp_path)


def test_names_from_the_home_folder(folder, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "llama")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert type(load("~/llama")).__name__ == "LlamaForCausalLM"
    monkeypatch.chdir(tmp_path)
    assert type(load("./llama")).__name__ == "LlamaForCausalLM"
