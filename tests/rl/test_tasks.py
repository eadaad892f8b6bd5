"""Tasks and rewards: where prompts come from, and what reward functions do wrong."""

import math
import sys
from pathlib import Path

import pytest
import torch

from octavo.grpo.settings import settings_from_options
from octavo.rl.rewards import Rewards
from octavo.rl.tasks import matches_answer, read_rewards, read_task
from octavo.training.errors import RunError, UserError


def score(*functions, weights=None, texts=("a", "b", "c"), **columns):
    prompts, ids = ["p"] * len(texts), [[1]] * len(texts)
    return Rewards(functions, weights).score(prompts, list(texts), ids, columns)


def failing(**_):
    raise KeyError("answer")


def wanting(completions, solution):
    return [float(text == solution) for text in completions]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (failing, r"reward function failing raised KeyError: 'answer' \(test_tasks.py:\d+\); mend it"),
        (lambda completions, **_: (1 / 0 for _ in completions), r"raised ZeroDivisionError: .*\(test_tasks.py:\d+\)"),
        (lambda **_: [10**400] * 3, "gave 1000.* for a completion: a number, or None"),
        (lambda **_: [1.0], "returned 1 rewards for 3 completions"),
        (lambda **_: None, "returned None: a list with a number for each completion"),
        (lambda **_: "111", "returned '111': a list with a number"),
        (lambda **_: {0: 1.0, 1: 0.5, 2: 0.0}, "returned {0: 1.0, 1: 0.5, 2: 0.0}: a list with a number"),
        (lambda **_: {0.0, 0.5, 1.0}, "returned {0.0, 0.5, 1.0}: a list with a number"),
        (wanting, "wanting asks for 'solution'; there are prompts, completions, completion_ids: give the rows"),
        (lambda **_: 1.0, "returned 1.0: a list with a number"),
        (lambda **_: ["good", 1, 1], "gave 'good' for a completion: a number, or None"),
        (lambda **_: [None] * 3, "no completion has a reward: .* gave None or NaN for all 3"),
        (lambda **_: [math.nan] * 3, "no completion has a reward: .* gave None or NaN for all 3"),
    ],
)
def test_what_reward_functions_do_wrong(function, words):
    with pytest.raises(RunError, match=words):
        score(function)


def test_lists_and_dictionaries_are_each_functions_own():
    """A function that changes them changes neither the task, nor the tokens to train on, nor other completions."""
    chat, meta, ids = [{"role": "user", "content": "2?"}], {"seen": 0}, [[5, 6], [7, 8]]

    def judging(prompts, completions, completion_ids, meta):
        for prompt, completion, tokens, one in zip(prompts, completions, completion_ids, meta, strict=True):
            prompt += completion
            prompt[0]["content"] += "!"
            tokens.pop()
            one["seen"] += 1
        return [
            len(prompt) + len(prompt[0]["content"]) + one["seen"] for prompt, one in zip(prompts, meta, strict=True)
        ]

    answers = [[{"role": "assistant", "content": text}] for text in "ab"]
    scores = Rewards([judging, judging]).score([chat, chat], answers, ids, {"meta": [meta, meta]})
    assert scores.rewards.tolist() == [12.0, 12.0]
    assert (chat, meta, ids) == ([{"role": "user", "content": "2?"}], {"seen": 0}, [[5, 6], [7, 8]])


def test_gradients_stay_enabled():
    def careless(**_):
        torch.set_grad_enabled(False)
        return [0.0, 1.0, 2.0]

    with torch.enable_grad():
        score(careless)
        assert torch.is_grad_enabled()


async def later(completions):
    return [0.0 for _ in completions]


class Later:
    async def __call__(self, completions):
        return [0.0 for _ in completions]


@pytest.mark.parametrize("function", [later, Later()], ids=["function", "object"])
def test_async_functions_are_refused(function):
    name = "later" if function is later else "Later"
    with pytest.raises(ValueError, match=f"reward function {name} is async, .*: define it with def"):
        Rewards([function])


def test_a_python_file_imports_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_the_rewards.py").write_text("LENGTH = 2\n")
    (tmp_path / "used_later.py").write_text("LENGTH = 3\n")
    (tmp_path / "rewards.py").write_text(
        "from beside_the_rewards import LENGTH\n"
        "def f(completions):\n    import used_later\n"
        "    return [float(len(c) in (LENGTH, used_later.LENGTH)) for c in completions]\n"
    )
    before = list(sys.path)
    rewards = read_rewards(tmp_path / "rewards.py")
    assert sys.path == [*before, str(tmp_path)]  # hides nothing
    assert rewards.score(["p"] * 3, ["a", "ab", "abc"], [[1]] * 3, {}).rewards.tolist() == [0.0, 1.0, 1.0]
    for name in ("beside_the_rewards", "used_later"):
        sys.modules.pop(name)


def test_rewards_are_weighed_and_none_is_no_opinion():
    scores = score(
        lambda **_: [1.0, None, 1.0],
        lambda **_: torch.tensor([2.0, 3.0, math.nan]),
        weights=[1.0, 0.5],
    )
    assert scores.rewards[:2].tolist() == [2.0, 1.5] and math.isnan(scores.rewards[2]) and scores.unscored == 1
    assert list(scores.means.values()) == [1.0, 2.5]


def test_a_function_without_any_opinion_has_no_mean():
    scores = score(lambda **_: [None] * 3, lambda **_: [1.0, 2.0, 1e200])
    assert next(iter(scores.means.values())) is None and scores.rewards.tolist() == [1.0, 2.0, 1e200]


def test_texts_with_separators_of_lines_that_json_does_not_know(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + '{"prompt": "a\u2028b\x85c", "answer": 0}\r\n{"prompt": "d", "answer": 1}\n'.encode()
    )
    assert [row["prompt"] for row in read_task(str(path)).rows] == ["a\u2028b\x85c", "d"]


def test_a_jsonl_with_answers(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text(
        '{"prompt": "1+1=", "answer": 2, "level": 1}\n\n{"prompt": [{"role": "user", "content": "x"}], "answer": "y"}\n'
    )
    task = read_task(str(path))
    assert len(task.rows) == 2 and task.columns(task.rows) == {"answer": [2, "y"], "level": [1, None]}
    assert matches_answer([" 2\n", [{"role": "assistant", "content": "z"}]], [2, "y"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "p.jsonl",
            '{"prompt": "a"}\n',
            "entry 1 has no answer, and completions are compared with a text or a number; give",
        ),
        ("p.jsonl", '{"prompt": "a", "answer": 1}\n{"text": "b"}\n', "p.jsonl:2: no prompt in it"),
        ("p.jsonl", "{", "p.jsonl:1: "),
        ("p.jsonl", "", "p: no prompts in it"),
        (
            "p.jsonl",
            '{"prompt": "a", "answer": ["1"]}\n',
            r"entry 1 has an answer that is \['1'\], and completions are",
        ),
        ("p.jsonl", '{"prompt": [{"content": "a"}], "answer": 1}\n', "messages with role and content"),
        ("p.jsonl", '{"prompt": "a", "answer": 1, "completions": "b"}\n', "a column is named 'completions'.*rename"),
        ("p.py", "PROMPTS = ['a']\n", "no reward function in it"),
        (
            "p.py",
            "def PROMPTS(): return 1 / 0\ndef f(completions): return []\n",
            "PROMPTS gives no list .*ZeroDivision",
        ),
        ("p.py", "PROMPTS = 3\ndef f(completions): return []\n", "PROMPTS gives no list of prompts: TypeError"),
        (
            "p.py",
            "PROMPTS = ['a']\ndef f(completions): return []\nREWARDS = f\n",
            "rewards=<function.*: a list of functions",
        ),
        ("p.py", "PROMPTS = ['a']\nREWARDS = [1]\n", r"rewards=\[1\]: a list of functions"),
        ("p.py", "PROMPTS = ['a']\ndef f(completions): return []\nWEIGHTS = 1.0\n", "weights=1.0: a list"),
        ("p.py", "def f(completions): return []\n", "no PROMPTS in it"),
        ("p.py", "import nothing_of_the_kind\n", "does not load: ModuleNotFoundError"),
        ("p.py", "PROMPTS = [3]\ndef f(completions): return []\n", "PROMPTS, entry 1: no prompt"),
    ],
)
def test_tasks_that_cannot_be_read(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words):
        read_task(str(tmp_path / name))


def test_a_python_file(tmp_path):
    path = tmp_path / "task.py"
    path.write_text(
        "from math import sqrt\nWEIGHTS = [2]\ndef _rows(): return ['a', {'prompt': 'b', 'x': 1}]\nPROMPTS = _rows\n"
        "def f(completions, **_): return [sqrt(len(c)) for c in completions]\n"
    )
    task = read_task(str(path))
    assert task.rewards.names == ["f"] and [row["prompt"] for row in task.rows] == ["a", "b"]
    assert task.rewards.score(["a"], ["1234"], [[1]], {}).rewards.tolist() == [4.0]


def test_a_python_file_that_exits(tmp_path):
    for name, content in (("a.py", "import sys\nsys.exit('no key')\n"), ("b.py", "def PROMPTS(): raise SystemExit\n")):
        (tmp_path / name).write_text(content + "def f(completions): return [0.0 for _ in completions]\n")
        with pytest.raises(UserError, match=f"{name}.*SystemExit"):
            read_task(str(tmp_path / name))


def test_a_python_file_with_a_dataclass(tmp_path):
    path = tmp_path / "classes.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Row:\n    x: int\n"
        "PROMPTS = [str(Row(1).x)]\ndef f(completions): return [0.0 for _ in completions]\n"
    )
    assert [row["prompt"] for row in read_task(str(path)).rows] == ["1"]


def test_names_that_are_too_long_for_a_file():
    long = "x" * 300
    for source in (f"{long}.py", f"{long}.jsonl"):
        with pytest.raises(UserError, match=r"no such file|File name too long"):
            read_task(source)
    with pytest.raises(UserError, match="no such file"):
        read_rewards(Path(long))
    given = dict.fromkeys(("model", "task", "rewards"), long)
    assert {name: getattr(settings_from_options(given), name) for name in given} == given
    assert settings_from_options({"model": "m", "task": ""}).task == ""  # and not the current folder
