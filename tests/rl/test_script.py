"""The script that people bring: FP8, `fast_inference=True`, adapters on seven linears, TRL's GRPOTrainer.

It is theirs but for `use_cpu=True`: TRL asks for BF16, which transformers refuses without a GPU.
"""

import copy
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from decoder_cases import build
from trainer_cases import BYTES, byte_tokenizer

from octavo import FastLanguageModel, FP8TrainingConfig
from octavo.hf.fast import Rollouts
from octavo.nn.frozen import FP8FrozenLinear
from octavo.rl import NativeEngine, attached, detach, fallbacks, vllm
from octavo.rl.fast import StandingBy, start_engine
from octavo.rl.loras import adapters_for

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

PROMPTS = ["1 + 1 =", "2 + 3 =", "the sum of 4 and 5 is", "9"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    build(hidden_size=128, intermediate_size=256, head_dim=32, vocab_size=BYTES, max_position_embeddings=128,
          eos_token_id=BYTES - 1).save_pretrained(path)  # fmt: skip
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def no_vllm(monkeypatch):
    monkeypatch.setattr(vllm, "is_installed", lambda: False)
    for name in ("OCTAVO_STANDBY", "UNSLOTH_VLLM_STANDBY"):
        monkeypatch.delenv(name, raising=False)


def load(folder, **options):
    settings = {"max_seq_length": 96, "load_in_fp8": True, "fast_inference": True, "max_lora_rank": 64}
    return FastLanguageModel.from_pretrained(folder, **settings | {"gpu_memory_utilization": 0.6} | options)


def vowels(completions, **_):
    return [sum(text.count(letter) for letter in "aeiou") / 8 for text in completions]


def brevity(prompts, completions, **_):
    assert len(prompts) == len(completions)
    return [-len(text) / 100 for text in completions]


@pytest.mark.usefixtures("no_vllm")
@pytest.mark.parametrize("standby", [False, True])
def test_the_script(folder, tmp_path, monkeypatch, caplog, standby):
    if standby:
        monkeypatch.setenv("UNSLOTH_VLLM_STANDBY", "1")
    model, tokenizer = load(folder)
    assert "rollouts by the native engine: vLLM is not installed" in caplog.text
    model = FastLanguageModel.get_peft_model(
        model,
        r=64,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        lora_alpha=64,
        use_gradient_checkpointing="unsloth",
        random_state=3407,
    )
    prefills = []
    engine = attached(model)
    generate = NativeEngine.generate

    def counted(self, prompts, n, sampling):
        done = generate(self, prompts, n, sampling)
        assert len(prompts) * n == 8 and len({tuple(prompt) for prompt in prompts}) == 2
        prefills.append(self.statistics()["prefills"])
        return done

    monkeypatch.setattr(NativeEngine, "generate", counted)
    trainer = trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[vowels, brevity],
        args=trl.GRPOConfig(
            use_cpu=True,
            learning_rate=5e-6,
            weight_decay=0.1,
            warmup_steps=1,
            lr_scheduler_type="cosine",
            logging_steps=1,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=1,
            num_generations=4,
            max_completion_length=12,
            max_steps=3,
            max_grad_norm=0.1,
            report_to="none",
            output_dir=str(tmp_path),
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    trainer.train()
    assert prefills == [2.0, 2.0, 2.0]  # two prompts a step, four completions of each: one prefill for each prompt
    assert not fallbacks(model)
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)
    log = trainer.state.log_history[0]
    assert {"rewards/vowels/mean", "rewards/brevity/mean", "completions/mean_length"} <= log.keys()
    assert isinstance(engine, StandingBy) == standby
    native = engine.engine if standby else engine
    assert (native._cache is None) == standby  # freed after each rollout, or kept


@pytest.mark.usefixtures("no_vllm")
def test_which_engine_it_is(folder, monkeypatch, caplog):
    model, _ = load(folder, engine="native")
    assert isinstance(attached(model), NativeEngine) and attached(model).memory_share == 0.6
    assert attached(model).max_length == model.config.max_position_embeddings  # its cache is as large as a rollout
    assert "engine='native'" in caplog.text and "rollouts by the native engine" in str(model.octavo_report)
    with pytest.raises(ModuleNotFoundError, match="engine='vllm': vLLM is not installed"):
        load(folder, engine="vllm")
    monkeypatch.setattr(vllm, "is_installed", lambda: True)
    engine, why = start_engine(model, Rollouts(memory_share=0.3, standby=True))
    assert (engine.name, why) == ("vllm", "vLLM is installed") and engine.memory_share == 0.3
    assert engine.max_length == 96
    assert start_engine(model, Rollouts(engine="native"))[0].name == "native"


@pytest.mark.usefixtures("no_vllm")
def test_a_trainer_computes_forward_as_its_rollouts(folder, tmp_path, monkeypatch):
    """Log-probabilities with FP8 products in forward are further from the rollout's, which stock TRL does not show."""

    def products(model):
        frozen = [module for module in model.modules() if isinstance(module, FP8FrozenLinear)]
        (found,) = {(module.fp8_products, module.fp8_forward) for module in frozen}
        return found

    model, tokenizer = load(folder)
    assert products(model) == (True, False)
    assert "FP8 products in backward alone, as rollouts compute (14)" in model.octavo_report.fused
    assert all("backward alone" in entry.reason for entry in model.octavo_report.in_fp8)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "saved")
    assert products(load(tmp_path / "saved")[0]) == (True, False)
    assert products(load(tmp_path / "saved", fast_inference=False)[0]) == (True, True)
    assert products(load(folder, fast_inference=False)[0]) == (True, True)
    named = {"fp8_products": True}, {"fp8_config": FP8TrainingConfig.from_recipe("channel")}
    for options in named:
        assert products(load(folder, **options)[0]) == (True, True)
    for part in load(folder, fp8_products=True):
        part.save_pretrained(tmp_path / "named")
    assert products(load(tmp_path / "named")[0]) == (True, True)
    assert products(load(folder, fp8_products=False)[0]) == (False, True)
    monkeypatch.setattr("octavo.hf.quantizer.has_fp8_tensor_cores", lambda _device: True)
    small, _ = load(folder)  # as a GPU has it, where FP8 does not pay for so small a model
    assert products(small) == (False, True) and "as rollouts" not in str(small.octavo_report.fused)


@pytest.mark.usefixtures("no_vllm")
def test_ranks_shares_and_the_environment(folder, monkeypatch):
    model, _ = load(folder, max_lora_rank=8)
    with pytest.raises(ValueError, match=r"r=16 with max_lora_rank=8: .*load it with max_lora_rank=16"):
        FastLanguageModel.get_peft_model(model, r=16)
    assert attached(FastLanguageModel.get_peft_model(model, r=8)) is attached(model)
    with pytest.raises(ValueError, match=r"GiB are free .*memory_share=1e-07"):
        small, _ = load(folder, gpu_memory_utilization=1e-7)
        small.generate(torch.tensor([[5, 6]]), max_new_tokens=4)
    with pytest.raises(ValueError, match="granularity='tensor'"):
        load(folder, load_in_fp8="tensor")
    for name in ("OCTAVO_STANDBY", "UNSLOTH_VLLM_STANDBY"):
        with monkeypatch.context() as changed:
            changed.setenv(name, "1")
            assert isinstance(attached(load(folder)[0]), StandingBy)
            changed.setenv(name, "yes")
            with pytest.raises(ValueError, match=f"{name}=yes"):
                load(folder)
    assert isinstance(attached(load(folder)[0]), NativeEngine)


def test_the_class_that_only_loads_says_where_engines_are(folder):
    from octavo.hf.fast import FastLanguageModel as Loader

    with pytest.raises(ValueError, match=r"octavo\.FastLanguageModel has rollout engines"):
        Loader.from_pretrained(folder, load_in_fp8=True, fast_inference=True)


class Params:
    """As much of vLLM's SamplingParams as scripts set."""

    n, max_tokens, temperature, top_k, top_p, seed = 2, 5, 0.8, -1, 1.0, 3

    def __init__(self, **fields):
        self.__dict__.update(fields)


@pytest.mark.usefixtures("no_vllm")
def test_adapters_of_fast_generate(folder, tmp_path):
    """Notebooks that people bring end like this: the base alone, then the adapters that were saved."""
    model, _ = load(folder, dtype=torch.float32, fp8_products=False)

    def tokens(**request):
        (output,) = model.fast_generate(PROMPTS[2], Params(n=1, max_tokens=12, temperature=0.0), **request)
        return output.outputs[0].token_ids

    base = tokens()
    model = FastLanguageModel.get_peft_model(model, r=4, modules_to_save=["lm_head"], use_gradient_checkpointing=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        torch.nn.init.normal_(parameter, std=0.3)
    adapted = tokens()
    assert adapted != base == tokens(lora_request=None)
    model.save_lora(tmp_path / "lora")
    for parameter in trained:
        torch.nn.init.normal_(parameter, std=0.3)
    values = [parameter.clone() for parameter in trained]
    assert tokens(lora_request=model.load_lora(str(tmp_path / "lora"))) == adapted != tokens()
    assert all(map(torch.equal, trained, values))
    assert [p for p in model.parameters() if p.requires_grad] == trained
    assert not any(getattr(module, "disable_adapters", None) is True for module in model.modules())
    with pytest.raises(ValueError, match=r"load_lora\('nowhere'\): no adapter_config.json"):
        model.load_lora("nowhere")
    other, _ = load(folder)
    other = FastLanguageModel.get_peft_model(other, r=8, use_gradient_checkpointing=False)
    with pytest.raises(ValueError, match=r"adapters with r=4, where those of the model have 8"):
        other.load_lora(tmp_path / "lora")


@pytest.mark.usefixtures("no_vllm")
def test_the_base_alone_has_the_same_modules(folder):
    """vLLM's CUDA graphs are of modules as they were when it started, adapters and all."""
    model, _ = load(folder)
    params = Params(n=1, max_tokens=12, temperature=0.0)
    base = model.fast_generate(PROMPTS, params)
    model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        torch.nn.init.normal_(parameter, std=0.3)
    values, versions = [parameter.clone() for parameter in trained], [parameter._version for parameter in trained]
    policy = attached(model).policy
    with policy.rollout("weights"):
        state = policy.state()
    with adapters_for(model, None), policy.rollout("weights"), ThreadPoolExecutor() as other:
        assert policy.state() == state
        assert other.submit(policy.lock.acquire, blocking=False).result() is False  # rollouts of other threads wait
    assert model.fast_generate(PROMPTS, params, lora_request=None) == base != model.fast_generate(PROMPTS, params)
    with pytest.raises(KeyError), adapters_for(model, None):
        raise KeyError
    assert all(map(torch.equal, trained, values)) and versions == [parameter._version for parameter in trained]


@pytest.mark.usefixtures("no_vllm")
def test_saved_adapters_of_a_model_with_two_that_moves(folder, tmp_path):
    model, _ = load(folder, dtype=torch.float32, fp8_products=False)
    model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, use_gradient_checkpointing=False)
    model.add_adapter("other", copy.copy(model.peft_config["default"]))

    def tokens(**request):
        (output,) = model.fast_generate(PROMPTS[2], Params(n=1, max_tokens=12, temperature=0.0), **request)
        return output.outputs[0].token_ids

    def change():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            torch.nn.init.normal_(parameter, std=0.3)

    saved, adapted = {}, {}
    for name in ("default", "other"):
        model.set_adapter(name)
        change()
        adapted[name] = tokens()
    model.save_lora(tmp_path / "lora")
    for name in ("default", "other"):
        model.set_adapter(name)
        change()
        saved[name] = model.load_lora(tmp_path / "lora")
        assert tokens(lora_request=saved[name]) == adapted[name] != tokens()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # as `model.to` another device does
    assert tokens(lora_request=saved["other"]) == adapted["other"] != adapted["default"]
    with pytest.raises(ValueError, match=r"was for the adapter 'default', and the model computes with 'other' now"):
        tokens(lora_request=saved["default"])


@pytest.mark.usefixtures("no_vllm")
def test_fast_generate(folder, caplog):
    caplog.set_level(logging.ERROR)
    model, tokenizer = load(folder, dtype=torch.float32, fp8_products=False)
    adapted = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False)
    one, two = adapted.fast_generate(PROMPTS[:2], sampling_params=Params())
    assert one.prompt == PROMPTS[0] and [len(part.token_ids) for part in one.outputs] == [5, 5]
    assert two.outputs[1].text == tokenizer.decode(two.outputs[1].token_ids, skip_special_tokens=True)
    greedy = adapted.fast_generate(PROMPTS[0], sampling_params=Params(n=1, temperature=0.0))[0]
    ids = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    assert greedy.outputs[0].token_ids == adapted.generate(ids, max_new_tokens=5)[0, ids.shape[1] :].tolist()
    stop = tokenizer.convert_ids_to_tokens(greedy.outputs[0].token_ids[1])
    ended = adapted.fast_generate(PROMPTS[0], Params(n=1, temperature=0.0, stop=[stop]))[0].outputs[0]
    assert ended.finish_reason == "stop" and len(ended.token_ids) <= 2
    assert ended.text == tokenizer.decode(ended.token_ids[:-1], skip_special_tokens=True)
    shown = Params(n=1, temperature=0.0, stop=stop, include_stop_str_in_output=True, skip_special_tokens=False)
    assert adapted.fast_generate(PROMPTS[0], shown)[0].outputs[0].text == tokenizer.decode(ended.token_ids)
    tokens = greedy.outputs[0].token_ids
    assert adapted.fast_generate(PROMPTS[0], Params(n=1, min_p=1.0))[0].outputs[0].token_ids == tokens
    model.generation_config.eos_token_id = tokens[1]  # ends a completion besides what is named, as in vLLM
    whole = tokens.index(tokens[1]) + 1, len(tokens)
    for ignored, length in zip((False, True), whole, strict=True):
        params = Params(n=1, temperature=0.0, stop_token_ids=[next(iter({0, 2, 3, 4, 5, 6} - set(tokens)))])
        params.ignore_eos = ignored
        assert len(adapted.fast_generate(PROMPTS[0], params)[0].outputs[0].token_ids) == length
    for fields, message in (
        ({"presence_penalty": 0.1}, "presence_penalty=0.1: the engine samples by .* and min_p"),
        ({"min_p": 2}, "min_p=2 must be from 0 to 1"),
        ({"stop": [""]}, "a completion cannot end at .*: give a text of one character or more"),
        ({"logits_processors": [print]}, "sampling_params.logits_processors="),
        ({"n": 2.5}, "sampling_params.n=2.5: a whole number of at least 1"),
        ({"n": 0}, "sampling_params.n=0: a whole number of at least 1"),
        ({"top_p": 2}, "top_p=2 must be above 0 and at most 1"),
        ({"top_k": -5}, "top_k=-5 must be a positive integer, or None"),
    ):
        with pytest.raises(ValueError, match=message):
            adapted.fast_generate(PROMPTS, Params(**fields))
    rest = adapted.fast_generate(PROMPTS[0], Params(n=1, max_tokens=None, stop_token_ids=[], ignore_eos=True))[0]
    assert len(rest.prompt_token_ids) + len(rest.outputs[0].token_ids) == model.config.max_position_embeddings
    for wrong in ([Params(), Params()], {"max_tokens": 3}, transformers.GenerationConfig()):
        with pytest.raises(TypeError, match=r"takes one vllm\.SamplingParams for all prompts"):
            adapted.fast_generate(PROMPTS[:2], wrong)
    for wrong in ({"prompt": "hello"}, [{"prompt": "hello"}], [[1, 2]]):
        with pytest.raises(TypeError, match="takes a text, or a list of texts"):
            adapted.fast_generate(wrong, Params())
    assert adapted.fast_generate(PROMPTS[0], Params(), use_tqdm=False)[0].prompt == PROMPTS[0]
    with pytest.raises(TypeError, match=r"max_tokens: not an argument of fast_generate; .*sampling_params"):
        adapted.fast_generate(PROMPTS[0], max_tokens=64)
    with pytest.raises(ValueError, match=r"lora_request=<object .*leave it out"):
        adapted.fast_generate(PROMPTS, Params(), lora_request=object())
    with pytest.raises(ValueError, match="no engine is attached"):
        copy.deepcopy(model).fast_generate(PROMPTS)
    detach(adapted)
    assert pickle.loads(pickle.dumps(adapted)).fast_generate is not adapted.fast_generate
