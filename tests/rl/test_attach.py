"""`model.generate` by the engine: the calls of scripts and of stock TRL, and those that stay transformers'."""

import copy
import logging
import pickle

import numpy as np
import peft
import pytest
import torch
import transformers
from rollout_cases import PROMPTS, adapted, frozen, plain

from octavo.rl import NativeEngine, Sampling, attach, attached, detach, fallbacks

PAD = 0


def left_padded(prompts=PROMPTS):
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def model():
    return adapted(frozen(products=False)).eval()


def test_greedy_rows_are_those_of_generate(model):
    expected = model.generate(**left_padded(), max_new_tokens=10, do_sample=False)
    engine = NativeEngine(model, slots=3)
    attach(model, engine)
    assert attached(model) is engine and attached(model.get_base_model()) is engine
    assert torch.equal(model.generate(**left_padded(), max_new_tokens=10, do_sample=False), expected)
    assert engine.statistics()["prefills"] == len(PROMPTS)
    assert not fallbacks(model)
    detach(model)
    detach(model)
    assert attached(model) is None
    assert torch.equal(model.generate(**left_padded(), max_new_tokens=10, do_sample=False), expected)


def test_ends_are_padded_as_by_generate(model):
    plain_rows = model.generate(**left_padded(), max_new_tokens=10, do_sample=False)
    stop = int(plain_rows[1, -6])
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": [stop], "pad_token_id": 155}
    expected = model.generate(**left_padded(), **options)
    attach(model, NativeEngine(model, slots=3))
    assert (expected == 155).any()
    assert torch.equal(model.generate(**left_padded(), **options), expected)


def test_the_call_of_stock_trl(model):
    """Prompts are repeated for their group; the configuration is TRL's."""
    engine = NativeEngine(model, slots=8)
    attach(model, engine)
    config = transformers.GenerationConfig(
        max_new_tokens=6, do_sample=True, pad_token_id=PAD, bos_token_id=1, eos_token_id=[2], temperature=0.9,
        top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0, cache_implementation=None, disable_compile=True,
    )  # fmt: skip
    batch = {name: x.repeat_interleave(4, dim=0) for name, x in left_padded().items()}
    rows = model.generate(**batch, generation_config=config)
    assert not fallbacks(model)
    assert engine.statistics()["prefills"] == len(PROMPTS)
    assert torch.equal(rows[:, : batch["input_ids"].shape[1]], batch["input_ids"])
    assert len({tuple(row) for row in rows.tolist()}) > 8


def test_samples_by_the_settings_of_the_call(model, monkeypatch):
    engine = NativeEngine(model)
    attach(model, engine)
    asked = []
    original = engine.generate
    monkeypatch.setattr(engine, "generate", lambda p, n, s: asked.append((n, s)) or original(p, n, s))
    model.generation_config.temperature = 0.5
    model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=True, num_return_sequences=3)
    assert asked.pop() == (3, Sampling(max_new_tokens=2, temperature=0.5, top_k=50, stop_ids=()))
    model.generate(input_ids=torch.tensor([[5, 6]]), max_length=5, do_sample=True, top_k=0, top_p=0.5)
    assert asked.pop() == (1, Sampling(max_new_tokens=3, temperature=0.5, top_p=0.5, stop_ids=()))
    model.generate(torch.tensor([[5]]), max_new_tokens=2, do_sample=True, temperature=None, top_k=None, top_p=None)
    assert asked.pop() == (1, Sampling(max_new_tokens=2, temperature=1.0, stop_ids=()))
    config = transformers.GenerationConfig(temperature=0.7, do_sample=True, top_k=7, eos_token_id=4)
    model.generate(input_ids=torch.tensor([[5, 6]]), generation_config=config)
    assert asked.pop() == (1, Sampling(max_new_tokens=20, temperature=0.7, top_k=7, stop_ids=(4,)))
    for share, min_p in ((0.1, 0.1), (0.0, None), (None, None)):
        model.generate(input_ids=torch.tensor([[5, 6]]), generation_config=config, min_p=share)
        assert asked.pop()[1].min_p == min_p


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"repetition_penalty": 1.3}, "repetition_penalty=1.3"),
        ({"min_new_tokens": 2}, "min_new_tokens=2"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate=True"),
        ({"logits_processor": transformers.LogitsProcessorList([lambda _, scores: scores])}, "logits_processor is"),
        ({"typical_p": 0.5, "do_sample": True}, "typical_p=0.5"),
        ({"forced_eos_token_id": 0}, "forced_eos_token_id=0"),
        ({"forced_bos_token_id": 0}, "forced_bos_token_id=0"),
    ],
)
def test_other_calls_are_transformers_own(model, options, reason, caplog):
    expected = model.generate(**left_padded(), max_new_tokens=4, **options) if "do_sample" not in options else None
    attach(model, NativeEngine(model))
    with caplog.at_level(logging.WARNING, logger="octavo"):
        for _ in range(2):
            found = model.generate(**left_padded(), max_new_tokens=4, **options)
    rows = [x if isinstance(x, torch.Tensor) else x.sequences for x in (found, expected) if x is not None]
    assert expected is None or torch.equal(*rows)
    assert [text for text in fallbacks(model) if text.startswith(reason)]
    assert sum("runs without the engine" in r.getMessage() for r in caplog.records) == 1


def test_padding_that_is_not_on_the_left(model):
    attach(model, NativeEngine(model))
    ids = torch.tensor([[5, 6, PAD], [5, 6, 7]])
    model.generate(ids, attention_mask=(ids != PAD).int(), max_new_tokens=2)
    model.generate(ids, pad_token_id=PAD, max_new_tokens=2)
    assert fallbacks(model) == {"rows are not padded on the left alone": 2}


def test_padding_without_a_mask_is_what_transformers_takes_it_for(model):
    ids = torch.tensor([[PAD, 6, 7], [5, 6, 7], [5, PAD, PAD]])
    for rows, options in ((ids[:2], {}), (ids, {"eos_token_id": [PAD, 9]}), (ids[1:2], {})):
        call = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": PAD, **options}
        expected = model.generate(rows, **call)
        attach(model, NativeEngine(model))
        assert torch.equal(model.generate(rows, **call), expected) and not fallbacks(model)
        detach(model)


def test_a_prompt_that_is_too_long_is_an_error(model):
    attach(model, NativeEngine(model))
    with pytest.raises(ValueError, match="prompt 0 has 64 tokens, and 64 positions leaves no room"):
        model.generate(torch.ones(1, 64, dtype=torch.int64), max_new_tokens=4)


def test_completions_that_the_engine_would_cut_are_transformers_own(model):
    """Shorter ones, filled with padding, would count as ended."""
    options = {"max_new_tokens": 10, "do_sample": False}
    expected = model.generate(**left_padded(), **options)
    attach(model, NativeEngine(model, max_length=20))
    assert torch.equal(model.generate(**left_padded(), **options), expected)
    assert list(fallbacks(model)) == ["prompts and new tokens are longer than the engine's 20"]
    assert torch.equal(model.generate(**left_padded(), **options | {"max_new_tokens": 9}), expected[:, :-1])
    with pytest.raises(ValueError, match="max_new_tokens"):  # in transformers' words
        model.generate(**left_padded(), max_new_tokens=0)
    assert fallbacks(model).total() == 2


def test_no_rows_are_transformers_own(model):
    attach(model, NativeEngine(model))
    with pytest.raises(RuntimeError):  # in transformers' words
        model.generate(torch.zeros(0, 4, dtype=torch.int64), max_new_tokens=2)
    assert list(fallbacks(model)) == ["input_ids is empty"]


def test_rows_that_are_not_too_long_are_the_engines(model):
    attach(model, NativeEngine(model, max_length=20))
    asked, generate = [], NativeEngine.generate
    attached(model).generate = lambda prompts, n, sampling: (
        asked.append(prompts) or generate(attached(model), prompts, n, sampling)
    )
    ids = torch.full((3, 12), PAD)
    for row, length in enumerate((5, 12, 9)):
        ids[row, -length:] = torch.arange(length) + 20 + row
    call = {"max_new_tokens": 10, "do_sample": False, "num_return_sequences": 1, "attention_mask": (ids != PAD).int()}
    found = model.generate(ids, **call)
    assert [len(prompt) for prompt in asked.pop()] == [5, 9] and fallbacks(model).total() == 1
    detach(model)
    assert torch.equal(found, model.generate(ids, **call))


def test_sampling_that_the_engine_refuses_is_transformers_own(model):
    """Temperatures so low, and a top_p of 0, which leave one token; transformers takes them, and refuses others."""
    call = {**left_padded(), "max_new_tokens": 4, "do_sample": True}
    attach(model, NativeEngine(model))
    found = [model.generate(**call, **options) for options in ({"temperature": 1e-7}, {"top_p": 0.0})]
    with pytest.raises(ValueError, match="has to be a strictly positive float"):  # in transformers' words
        model.generate(**call, temperature=-1.0)
    assert [reason.split(" ")[0] for reason in fallbacks(model)] == [
        "temperature=1e-07",
        "top_p=0.0",
        "temperature=-1.0",
    ]
    detach(model)
    greedy = model.generate(**left_padded(), max_new_tokens=4, do_sample=False)
    assert all(torch.equal(rows, greedy) for rows in found)


def test_a_row_of_padding_alone(model):
    rows = left_padded()
    rows["attention_mask"][1] = 0
    expected = model.generate(**rows, max_new_tokens=4, do_sample=False)
    attach(model, NativeEngine(model))
    assert torch.equal(model.generate(**rows, max_new_tokens=4, do_sample=False), expected)
    assert list(fallbacks(model)) == ["a row is padding alone"]


def test_ends_of_every_kind(model):
    plain_rows = model.generate(**left_padded(), max_new_tokens=10, do_sample=False)
    stops = plain_rows[1:3, -6].tolist()
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 155}
    expected = model.generate(**left_padded(), **options, eos_token_id=stops)
    attach(model, NativeEngine(model))
    for ends in (stops, torch.tensor(stops), list(np.array(stops)), [*stops, 10**6], [-1, *stops]):
        assert torch.equal(model.generate(**left_padded(), **options, eos_token_id=ends), expected)
    assert not fallbacks(model)


def test_what_calls_a_model_in_another_way(model):
    """Adapters that learn a prompt, hooks on the whole model, another forward: the engine calls its parts."""
    options = {"max_new_tokens": 6, "do_sample": False}
    base = plain().eval()
    attach(base, NativeEngine(base))
    tuned = peft.get_peft_model(base, peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    found = tuned.generate(**left_padded(), **options)
    assert [reason for reason in fallbacks(base) if "learn a prompt" in reason]
    detach(base)
    assert torch.equal(tuned.generate(**left_padded(), **options), found)

    inner = model.get_base_model()
    attach(model, NativeEngine(model))
    handle = inner.register_forward_hook(lambda _module, _given, output: output.__setitem__("logits", -output.logits))
    hooked = model.generate(**left_padded(), **options)
    assert fallbacks(model).total() == 1
    handle.remove()
    original = inner.forward
    inner.forward = lambda *args, **kwargs: original(*args, **kwargs)
    forwarded = model.generate(**left_padded(), **options)
    assert fallbacks(model).total() == 2
    del inner.forward
    assert torch.equal(model.generate(**left_padded(), **options), forwarded)
    assert fallbacks(model).total() == 2 and not torch.equal(hooked, forwarded)


def test_adapters_may_come_after_the_engine():
    base = frozen(products=False)
    engine = NativeEngine(base, slots=3)
    attach(base, engine)
    without = base.generate(**left_padded(), max_new_tokens=8, do_sample=False)
    model = adapted(base).eval()
    assert attached(model) is engine
    found = model.generate(**left_padded(), max_new_tokens=8, do_sample=False)
    assert not torch.equal(found, without)
    detach(model)
    assert torch.equal(model.generate(**left_padded(), max_new_tokens=8, do_sample=False), found)


def test_copies_have_a_generate_of_their_own():
    model = plain().eval()
    engine = NativeEngine(model)
    attach(model, engine)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.neg_()
    before = engine.statistics()
    rows = copied.generate(**left_padded(), max_new_tokens=4, do_sample=False)
    assert engine.statistics() == before
    assert not torch.equal(rows, model.generate(**left_padded(), max_new_tokens=4, do_sample=False))
    with pytest.raises(TypeError, match=r"cannot be pickled: call octavo.rl.detach\(model\)"):
        pickle.dumps(model)
    detach(model)
    pickle.dumps(model)


def test_attaching_to_something_else():
    with pytest.raises(ValueError, match="Linear has no generate"):
        attach(torch.nn.Linear(2, 2), NativeEngine(plain()))
