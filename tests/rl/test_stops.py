"""Texts that end completions: against a plain search, `generate` of transformers, and through every entry."""

import json
import random
import re

import pytest
import torch
from rl_cases import adapted as adapted_over_bytes
from rollout_cases import PROMPTS, adapted, frozen
from test_attach import left_padded
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from trainer_cases import byte_tokenizer
from transformers import PreTrainedTokenizerFast

from octavo.grpo.run import train_grpo
from octavo.grpo.settings import settings_from_options
from octavo.rl import NativeEngine, Sampling, attach, fallbacks
from octavo.rl.stops import StopTexts, stops_of

TEXT = "The answer is <answer> 42 </answer>. Größe, 東京, naïve; the end of the answer. </answers> \n\n " * 4


def byte_level():
    """Tokens of several bytes, some of them parts of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def metaspace():
    """Tokens with the space before a word, which decoding leaves out at the beginning, as in Llama 2."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator([TEXT], trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", unk_token="<unk>")


def plain_search(tokenizer, texts, tokens):
    for k in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:k], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if any(stop in text for stop in texts):
            return k
    return None


def search_by_steps(stops, tokens, stride):
    """As an engine looks: after a first token, and after `stride` more each time, at no more tokens than it has to."""
    for now in [*range(1, len(tokens), stride), len(tokens)]:
        tail = tokens[:now][-(stride + stops.reach) :]
        end = stops.end(tail, stride)
        if end is not None:
            return now - len(tail) + end
    return None


@pytest.mark.parametrize("make", [byte_level, metaspace, byte_tokenizer])
def test_a_stop_is_found_where_a_plain_search_finds_it(make):
    tokenizer, draw = make(), random.Random(0)
    found = 0
    for _ in range(300):
        # Half are pieces of text, and half are tokens of any order, such as parts of a character.
        ids = tokenizer(TEXT[(start := draw.randrange(len(TEXT))) :], add_special_tokens=False)["input_ids"]
        tokens = ids[: draw.randrange(1, 40)]
        if draw.random() < 0.5:
            draw.shuffle(tokens)
        text = tokenizer.decode(tokens)
        places = [draw.randrange(len(text)) for _ in range(draw.randrange(1, 3))] if text else []
        texts = [text[p : p + draw.randrange(1, 12)].replace("\ufffd", "") for p in places]
        texts = [stop for stop in texts if stop] or ["</answer>"]
        stops = StopTexts(tokenizer, texts)
        expected = plain_search(tokenizer, texts, tokens)
        found += expected is not None
        for stride in (1, 3, 8):
            assert search_by_steps(stops, tokens, stride) == expected, (start, texts, tokens)
    assert found > 150


def test_the_text_of_a_completion():
    stops = StopTexts(None, ["</a>", "a>!"])
    assert stops.cut("so: </a>!", with_stop=True) == "so: </a>"
    assert stops.cut("so: </a>!", with_stop=False) == "so: "
    assert stops.cut("so: <a>", with_stop=False) == "so: <a>"


def test_tokens_that_are_never_split():
    tokenizer = byte_level()
    ids, texts = stops_of(tokenizer, ["<|end|>", "</answer>"])
    assert ids == [tokenizer.eos_token_id] and texts.texts == ("</answer>",)
    assert stops_of(tokenizer, "<|end|>")[1] is None and stops_of(tokenizer, ()) == ([], None)
    for wrong in ("", ["a", ""], [7]):
        with pytest.raises(ValueError, match="give texts of one character or more"):
            stops_of(tokenizer, wrong)


class Letters:
    """Every token is a letter and its number: no text is in another by chance."""

    @staticmethod
    def decode(tokens, **_):
        return "".join(f"t{token}," for token in tokens)


@pytest.mark.parametrize("stride", [1, 8])
@pytest.mark.parametrize("slots", [3, 4])
def test_an_engine_ends_completions(monkeypatch, stride, slots):
    """Greedy, so that slots which are refilled at other steps write the same."""
    monkeypatch.setattr(NativeEngine, "_stride", stride)
    model = adapted(frozen(products=False))
    engine = NativeEngine(model, slots=slots)
    options = {"max_new_tokens": 20, "temperature": 0.0, "stop_ids": ()}
    whole = engine.generate(PROMPTS, 2, Sampling(**options))
    assert not whole[0].stopped
    pair, first = whole[0].tokens[9:11], whole[2].tokens[0]
    texts = StopTexts(Letters, [Letters.decode(pair), Letters.decode([first])])
    ended = engine.generate(PROMPTS, 2, Sampling(**options, stop_texts=texts))
    for completion, longer in zip(ended, whole, strict=True):
        k = plain_search(Letters, texts.texts, longer.tokens)
        assert completion.tokens == longer.tokens[:k] and completion.stopped == (k is not None)
        assert completion.logprobs == pytest.approx(longer.logprobs[:k], abs=1e-5)
    assert len(ended[0].tokens) <= 11 and len(ended[2].tokens) == 1
    assert engine.statistics()["no_stop_ids"] == 0
    assert [c.tokens for c in engine.generate(PROMPTS, 2, Sampling(**options))] == [c.tokens for c in whole]


def test_generate_with_stop_strings():
    """Rows of transformers' own generate, which has another way to find a stop."""
    tokenizer = byte_tokenizer()
    model = adapted(frozen(products=False)).eval()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1}
    plain_rows = model.generate(**left_padded(), **options)
    length = left_padded()["input_ids"].shape[1]
    texts = [tokenizer.decode(row[length:]) for row in plain_rows]
    stops = [match[0] for text in texts if (match := re.search(r"(?<=.)[!-~]{1,2}", text))]
    assert len(stops) > 1 and max(map(len, stops)) > 1
    options |= {"stop_strings": stops, "tokenizer": tokenizer}
    expected = model.generate(**left_padded(), **options)
    assert not torch.equal(expected, plain_rows)
    attach(model, NativeEngine(model, slots=3))
    assert torch.equal(model.generate(**left_padded(), **options), expected)
    assert torch.equal(model.generate(**left_padded(), **options | {"stop_strings": stops[0]})[0], expected[0])
    assert not fallbacks(model)
    with pytest.raises(ValueError, match="tokenizer"):  # in transformers' words
        model.generate(**left_padded(), **options | {"tokenizer": None})


def test_octavo_grpo(byte_model, prompts, rewards, tmp_path):
    options = {
        "model": byte_model, "task": prompts, "rewards": rewards, "steps": 2, "prompts": 2, "completions": 2,
        "max_new_tokens": 8, "rank": 4, "lr": 1e-3, "device": "cpu",
    }  # fmt: skip
    train_grpo(settings_from_options(options), out=tmp_path / "without")
    shown = json.loads((tmp_path / "without" / "samples.json").read_text())["samples"]
    found = (re.search(r"(?<=.)[!-~]{2}", sample["before"]["text"]) for sample in shown)
    stop = next(match for match in found if match is not None)[0]
    train_grpo(settings_from_options(options | {"stop": [stop, "no such text"]}), out=tmp_path / "with")
    ended = json.loads((tmp_path / "with" / "samples.json").read_text())["samples"]
    texts = [(a["before"]["text"], b["before"]["text"]) for a, b in zip(shown, ended, strict=True)]
    assert any(before != after for before, after in texts)
    assert all(after == (before[: before.index(stop) + 2] if stop in before else before) for before, after in texts)


def test_a_stop_of_no_text(byte_model):
    for wrong in ("", ["a", ""], [7]):
        with pytest.raises(ValueError, match=r"stop=.*: texts of one character or more"):
            settings_from_options({"model": byte_model, "task": "chain_sum", "stop": wrong})


def test_trl(tmp_path):
    from test_trainer import trainer

    seen = []

    def look(completions, **_):
        seen.extend(completions)
        return [float(len(text)) for text in completions]

    stops = list("abcdefghijklmnopqrstuvwxyz0123456789")
    run = trainer(tmp_path, look, generation_kwargs={"stop_strings": stops}, max_completion_length=12)
    run.train()
    assert any(len(text) < 12 for text in seen)
    assert all(letter not in stops for text in seen for letter in text[:-1])
    with pytest.raises(ValueError, match="mask_truncated_completions=True with stop_strings"):
        trainer(tmp_path, generation_kwargs={"stop_strings": "a"}, mask_truncated_completions=True)


def test_fast_generate(tmp_path):
    from types import SimpleNamespace

    from octavo.rl.fast import _FastGenerate

    model, tokenizer = adapted_over_bytes(tmp_path)
    attach(model, NativeEngine(model))
    generate = _FastGenerate(tokenizer)
    options = {"n": 1, "max_tokens": 12, "temperature": 0.0, "skip_special_tokens": False}
    whole = generate(model, "say", SimpleNamespace(**options))[0].outputs[0]
    stop = tokenizer.decode(whole.token_ids[2:5])
    k = plain_search(tokenizer, [stop], whole.token_ids)
    for included in (False, True):
        params = SimpleNamespace(**options, stop=[stop], include_stop_str_in_output=included)
        ended = generate(model, "say", params)[0].outputs[0]
        assert ended.token_ids == whole.token_ids[:k] and ended.finish_reason == "stop"
        assert ended.text == whole.text[: whole.text.index(stop) + included * len(stop)]
