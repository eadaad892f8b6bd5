"""What an engine refuses, each in one line that names the fix."""

import peft
import pytest
import torch
import transformers
from rollout_cases import PROMPTS, frozen, plain
from torch import nn

import octavo
from octavo.rl import NativeEngine, Sampling
from octavo.rl import engine as engine_module

SAMPLING = Sampling(max_new_tokens=4)


@pytest.fixture(scope="module")
def engine():
    return NativeEngine(plain(), slots=4)


@pytest.mark.parametrize(
    ("prompts", "match"),
    [
        ([[5], []], r"prompt 1 is empty: give it at least one token"),
        ([[5, 160]], r"prompt 0 has the token 160; the model's vocabulary is 0 to 159: is this the tokenizer of"),
        ([[5, -1]], r"prompt 0 has the token -1; the model's vocabulary"),
        ([[5, 1.5]], r"prompt 0 has the token 1.5; the model's vocabulary"),
        ([[5] * 64], r"prompt 0 has 64 tokens, and 64 positions leaves no room for a completion: shorten it"),
        ([[3], [5] * 100], r"prompt 1 has 100 tokens, and 64 positions"),
    ],
)
def test_prompts(engine, prompts, match):
    with pytest.raises(ValueError, match=match) as error:
        engine.generate(prompts, 1, SAMPLING)
    assert "\n" not in str(error.value)


def test_a_prompt_beyond_max_length():
    engine = NativeEngine(plain(), max_length=8)
    with pytest.raises(ValueError, match="prompt 0 has 8 tokens, and max_length=8 leaves no room"):
        engine.generate([[5] * 8], 1, SAMPLING)
    with pytest.raises(ValueError, match="max_length=65: the model has 64 positions"):
        NativeEngine(plain(), max_length=65)


def test_no_prompts(engine):
    assert engine.generate([], 4, SAMPLING) == []
    assert engine.statistics()["tokens"] == 0


@pytest.mark.parametrize("n", [0, -1, 1.5])
def test_n(engine, n):
    with pytest.raises(ValueError, match="n"):
        engine.generate(PROMPTS, n, SAMPLING)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"slots": 0}, "slots"),
        ({"max_length": 0}, "max_length"),
        ({"kv_dtype": "int8"}, "kv_dtype"),
        ({"products": "bf16"}, "products"),
        ({"memory_share": 0.0}, "memory_share=0.0: a share of the memory"),
        ({"graphs": True}, "graphs=True: the model is on cpu; CUDA graphs are for a GPU"),
    ],
)
def test_options(options, match):
    with pytest.raises(ValueError, match=match):
        NativeEngine(plain(), **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be a positive integer"),
        ({"max_new_tokens": True}, "max_new_tokens=True must be"),
        ({"temperature": -1.0}, "temperature=-1.0 must be a finite number of at least 0"),
        ({"temperature": float("nan")}, "temperature=nan must be"),
        ({"temperature": 1e-45}, "temperature=1e-45 is below 1e-06, .* set 0, which takes the likeliest token"),
        ({"top_k": 0}, "top_k=0 must be a positive integer, or None"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"stop_ids": (-1,)}, "stop_ids"),
        ({"seed": -1}, "seed=-1 must be"),
    ],
)
def test_sampling(options, match):
    with pytest.raises(ValueError, match=match):
        Sampling(**options)


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_exact_logprobs_refuse_truncation(options):
    engine = NativeEngine(plain(), exact_logprobs=True)
    with pytest.raises(ValueError, match=r"^(top_k=5|top_p=0.9|min_p=0.1) with exact_logprobs=True: .* leave them out"):
        engine.generate(PROMPTS, 1, Sampling(max_new_tokens=2, **options))
    engine.generate(PROMPTS, 1, Sampling(max_new_tokens=2, top_p=1.0))
    engine.generate(PROMPTS, 1, Sampling(max_new_tokens=2, temperature=0, top_k=5))  # greedy leaves nothing out


def test_a_stop_token_outside_the_vocabulary(engine):
    with pytest.raises(ValueError, match="stop token 160: the model's vocabulary is 0 to 159"):
        engine.generate(PROMPTS, 1, Sampling(max_new_tokens=2, stop_ids=(160,)))


def test_a_cache_that_does_not_fit(monkeypatch):
    engine = NativeEngine(plain(), slots=4, memory_share=0.5)
    monkeypatch.setattr(engine_module, "_room", lambda _, share: share * 2**16)
    with pytest.raises(
        ValueError, match=r"a cache of 4 slots of 64 tokens and 1 prompts of 64 takes 0.00 GiB"
    ) as error:
        engine.generate([[5]], 4, Sampling(max_new_tokens=60))
    for name in ("slots=4", "max_length=64", "max_new_tokens", "kv_dtype='fp8'"):
        assert name in str(error.value)
    assert engine._cache is None
    monkeypatch.undo()
    assert len(engine.generate([[5]], 4, Sampling(max_new_tokens=60))) == 4


def test_nan_is_not_sampled_from():
    model = plain()
    model.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="a completion of prompt 0 has a log-probability that is NaN"):
        NativeEngine(model).generate(PROMPTS, 1, SAMPLING)


def test_unknown_models():
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32)
    with pytest.raises(ValueError, match="GPT2LMHeadModel is no causal language model that the native engine knows"):
        NativeEngine(transformers.GPT2LMHeadModel(config))
    with pytest.raises(ValueError, match="Linear is no causal language model"):
        NativeEngine(nn.Linear(2, 2))
    model = plain()
    model.model.layers[1].self_attn = nn.Identity()
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has 2 layers and attentions of layers \[0\]"):
        NativeEngine(model)


def test_rotation_that_depends_on_length():
    model = plain()
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="rope_type='dynamic' rotates by the length of the longest sequence"):
        NativeEngine(model)


def test_prompt_learning():
    model = peft.get_peft_model(plain(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="learns a prompt"):
        NativeEngine(model)


def test_one_scale_per_tensor_is_refused():
    with pytest.raises(
        ValueError, match=r"granularity='tensor': .* use 'channel' or 'block' \(load_in_fp8='channel'\)"
    ):
        NativeEngine(frozen("Llama", "tensor"))
    model = plain().requires_grad_(True)
    octavo.convert_to_fp8(model, "delayed")
    with pytest.raises(
        ValueError, match=r"q_proj is in FP8 with granularity='tensor'.* load_in_fp8=True means 'tensor'"
    ):
        NativeEngine(model)
    model = plain().requires_grad_(True)
    octavo.convert_to_fp8(model, "channel")  # what load_in_fp8="channel", full_finetuning=True does
    NativeEngine(model)


def test_models_on_no_device_or_several():
    with pytest.raises(ValueError, match="the weights are on meta: the native engine takes a model on one device"):
        NativeEngine(plain().to("meta"))
