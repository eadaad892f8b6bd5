"""Texts that end completions: against a plain search, `generate` of transformers, and through every entry."""

import json
import random
import re
from types import SimpleNamespace

import pytest
import torch
import trl
from rl_cases import adapted as adapted_over_bytes
from rollout_cases import PROMPTS, adapted, frozen
from test_attach import left_padded
from test_trainer import trainer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from trainer_cases import byte_tokenizer
from transformers import PreTrainedTokenizerFast

from octavo.grpo.run import train_grpo
from octavo.grpo.settings import settings_from_options
from octavo.rl import NativeEngine, Sampling, attach, attached, detach, fallbacks
from octavo.rl.completions import Completion
from octavo.rl.fast import _FastGenerate
from octavo.rl.stops import StopTexts
from octavo.rl.trl_vllm import take_trainers_own_vllm

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


def word_piece():
    """Tokens that are written in another way at the beginning."""
    words = ["[UNK]", "the", "answer", "##s", "##wer", "an", "##a", "##e", "e", "is", "#", "<", ">", "/"]
    tokenizer = Tokenizer(models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="<|end|>")


def search_by_steps(stops, tokens, stride):
    """Search as an engine does: after a first token, then after each `stride`, in no more tokens than it needs."""
    for now in [*range(1, len(tokens), stride), len(tokens)]:
        if stops.are_in(tokens[:now][-(stride + stops.reach) :]):
            end = stops.end(tokens[:now], stride)
            if end is not None:
                return end
    return None


@pytest.mark.parametrize("make", [byte_level, metaspace, word_piece, byte_tokenizer])
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


@pytest.mark.parametrize("wrong", ["", ["a", ""], [7], 7, []])
def test_texts_that_are_none(wrong):
    with pytest.raises(ValueError, match=r"a completion cannot end at .*: give a text of one character or more"):
        StopTexts(None, wrong)


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
    prompt = tokenizer.decode(PROMPTS[1])
    begun = {
        "stop_strings": [prompt[-2:] + texts[1][0], prompt],
        "tokenizer": tokenizer,
    }  # in the prompt, and all of it
    detach(model)
    expected = model.generate(**left_padded(), **options | begun)
    assert (expected[1, length + 1 :] == 0).all() and (expected[0, length + 1 :] != 0).any()
    attach(model, NativeEngine(model, slots=3))
    assert torch.equal(model.generate(**left_padded(), **options | begun), expected)
    for wrong in (3, [3], [""]):
        with pytest.raises(ValueError, match=r"a completion cannot end at .*: give a text of one character or more"):
            model.generate(**left_padded(), **options | {"stop_strings": wrong})
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
    with pytest.raises(ValueError, match=r"generation_kwargs=.*, and stops at generation_kwargs\['stop_strings'\]"):
        trainer(tmp_path, generation_kwargs={"stop": "a"})


def test_stock_trl_says_who_stops_at_texts(tmp_path):
    def stock(model, **given):
        attach(model, NativeEngine(model))
        take_trainers_own_vllm()
        return trl.GRPOTrainer(model, **given)

    with pytest.raises(ValueError, match=r"GRPOTrainer hands generate no tokenizer for it; use .*OctavoGRPOTrainer"):
        trainer(tmp_path, generation_kwargs={"stop_strings": "a"}, cls=stock)


def fast_generate(model, tokenizer, **options):
    params = SimpleNamespace(**{"n": 1, "max_tokens": 12, "temperature": 0.0} | options)
    return _FastGenerate(tokenizer)(model, "say", params)[0].outputs[0]


def test_fast_generate(tmp_path):
    model, tokenizer = adapted_over_bytes(tmp_path)
    attach(model, NativeEngine(model))
    whole = fast_generate(model, tokenizer, skip_special_tokens=False)
    stop = tokenizer.decode(whole.token_ids[2:5])
    k = plain_search(tokenizer, [stop], whole.token_ids)
    for included in (False, True):
        options = {"stop": [stop, "never"], "include_stop_str_in_output": included, "skip_special_tokens": False}
        ended = fast_generate(model, tokenizer, **options)
        assert ended.token_ids == whole.token_ids[:k] and ended.finish_reason == "stop"
        assert ended.text == whole.text[: whole.text.index(stop) + included * len(stop)]
    assert fast_generate(model, tokenizer, stop=[]).finish_reason == "length"
    with pytest.raises(ValueError, match="a completion cannot end at 3"):
        fast_generate(model, tokenizer, stop=3)


@pytest.mark.parametrize("special", [False, True])
def test_a_stop_that_is_a_token_of_its_own(special):
    """The model may write it in other tokens, too; and a special one is not in the text that is shown."""

    class Written:
        name, max_length = "written", None

        def generate(self, _prompts, _n, sampling):
            end = sampling.stop_texts.end(self.tokens, len(self.tokens))
            return [Completion(0, self.tokens[:end], [0.0] * end, True)]

    tokenizer = byte_tokenizer()
    pieces = tokenizer("so </answer> and", add_special_tokens=False)["input_ids"]
    tokenizer.add_tokens(["</answer>", "<|go|>"], special_tokens=special)
    token, go = tokenizer.convert_tokens_to_ids(["</answer>", "<|go|>"])
    model = adapted(frozen())
    attach(model, Written())
    gone = [*pieces[:2], go, *pieces[2:]]
    for tokens, stop, text, whole in (
        (pieces, "</answer>", "so ", "so </answer>"),
        ([*pieces[:3], token, *pieces[-4:]], "</answer>", "so ", "so " if special else "so </answer>"),
        (gone, "</answer>", "so " if special else "so<|go|> ", "so </answer>" if special else "so<|go|> </answer>"),
        (gone, "o<|go|> ", "s", "so " if special else "so<|go|> "),
        (gone, "go|>", "so" if special else "so<|", "so" if special else "so<|go|>"),
        (gone, "<|g", "so", "so" if special else "so<|g"),
    ):
        attached(model).tokens = tokens
        for included, expected in ((False, text), (True, whole)):
            found = fast_generate(model, tokenizer, stop=stop, include_stop_str_in_output=included)
            assert (found.text, found.finish_reason) == (expected, "stop")
