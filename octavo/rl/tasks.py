"""Tasks: prompts, and the functions that reward their completions.

| source                | prompts                                          | rewards                                |
| --------------------- | ------------------------------------------------ | -------------------------------------- |
| `FILE.jsonl`          | a row each: `prompt`, a text or messages         | a Python file, or `answer` in each row |
| `FILE.py`             | `PROMPTS`: rows, or texts, or a function of them | the functions of the file              |
| `reasoning-gym:NAME`  | from the package; `NAME,max_terms=2` sets options | the package's own score of an answer  |

Other columns of a row are handed to reward functions, as TRL does. In a Python file, the reward functions are those in
the list `REWARDS`, or else all public functions that are defined there; `WEIGHTS` may weigh them.
"""

import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from octavo.rl.gym import Gym
from octavo.rl.rewards import ARGUMENTS, Rewards
from octavo.training.errors import UserError

GYM = "reasoning-gym:"
Watch = Callable[[Iterable[dict[str, Any]], int], Iterable[dict[str, Any]]]
_ASK = "\nGive the final answer between <answer> and </answer>."
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class Task:
    """Prompts and rewards.

    `rows`: each with a `prompt`, and columns for the reward functions. `made`: no file has them, and making them may
    take minutes.
    """

    name: str
    rows: Sequence[dict[str, Any]]
    rewards: Rewards
    description: str = field(default="", compare=False)
    made: bool = False

    def __post_init__(self) -> None:
        if not self.rows:
            raise UserError(f"{self.name}: no prompts in it")
        for name in ARGUMENTS:
            if any(name in row for row in self.rows):
                raise UserError(
                    f"{self.name}: a column is named {name!r}, by which reward functions get what the model wrote or "
                    "read: rename the column"
                )

    def columns(self, rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
        """Return the columns of some rows, without the prompt; None where a row has no such thing."""
        names = {name: None for row in self.rows for name in row if name != "prompt"}
        return {name: [row.get(name) for row in rows] for name in names}


def read_task(
    source: str,
    rewards: Path | None = None,
    seed: int = 0,
    watch: Watch = lambda items, _: items,
    rows: Sequence[dict[str, Any]] | None = None,
) -> Task:
    """Return the task that a user names, with the reward functions of the file `rewards` if it is given.

    `watch(items, number)` yields the items and may show progress: some tasks take minutes to generate. `rows`: of this
    very task, from an earlier time; those that are not in a file are not made again.
    """
    if not source.removeprefix(GYM).strip():
        raise UserError(f"TASK {source!r}: no name in it; give a .jsonl, a .py, or a task such as {GYM}chain_sum")
    path = Path(source)
    functions = None if rewards is None else read_rewards(rewards)
    if source.startswith(GYM):
        return _gym_task(source, functions, seed, watch, rows)
    if path.suffix == ".py":
        return _python_task(path, functions)
    # Path.exists raises for a name that is too long for a file.
    if path.suffix in (".jsonl", ".json") or os.path.exists(path):  # noqa: PTH110
        return _jsonl_task(path, functions)
    return _gym_task(source, functions, seed, watch, rows)


def read_rewards(path: Path) -> Rewards:
    """Return the reward functions of a Python file."""
    return _rewards_of(_load(path), path)


def matches_answer(completions: Sequence[Any], answer: Sequence[Any]) -> list[float]:
    """Give 1 for a completion that is its row's answer, 0 for another; space around it does not count."""
    return [
        float(text_of(completion).strip() == str(expected).strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]


def text_of(completion: Any) -> str:
    """Return the text of a completion, which is text, or the messages of a conversation."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _load(path: Path) -> ModuleType:
    if not os.path.isfile(path):  # noqa: PTH113  # as in read_task
        raise UserError(f"{path}: {'a folder, not a file' if os.path.isdir(path) else 'no such file'}")  # noqa: PTH112
    spec = importlib.util.spec_from_file_location(f"octavo_rewards_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look for the module of a class there
    folder = str(path.parent.absolute())
    sys.path.insert(0, folder)  # as in a script, which imports modules beside it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file may fail in any way, and the line says in which
        raise UserError(f"{path} does not load: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)  # for imports inside functions; last, so that it hides nothing from libraries
    return module


def _rewards_of(module: ModuleType, path: Path) -> Rewards:
    functions = getattr(module, "REWARDS", None)
    if functions is None:
        functions = [
            function
            for name, function in vars(module).items()
            if name != "PROMPTS" and not name.startswith("_")
            if inspect.isfunction(function) and function.__module__ == module.__name__
        ]
    if isinstance(functions, list | tuple) and not functions:
        raise UserError(
            f"{path}: no reward function in it; define one: def f(completions, **columns) -> list of numbers"
        )
    try:
        return Rewards(functions, getattr(module, "WEIGHTS", None))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _python_task(path: Path, rewards: Rewards | None) -> Task:
    module = _load(path)
    prompts = getattr(module, "PROMPTS", None)
    if prompts is None:
        raise UserError(
            f"{path}: no PROMPTS in it; define a list of texts or rows, or give a .jsonl and --rewards {path}"
        )
    try:
        entries = list(prompts() if callable(prompts) else prompts)
    except (Exception, SystemExit) as error:  # as in a file that does not load
        raise UserError(f"{path}: PROMPTS gives no list of prompts: {type(error).__name__}: {error}") from error
    rows = [{"prompt": row} if isinstance(row, str) else row for row in entries]
    for number, row in enumerate(rows, start=1):
        _check_row(row, f"{path}: PROMPTS, entry {number}")
    return Task(path.stem, rows, rewards or _rewards_of(module, path), f"{len(rows):,} prompts of {path.name}")


def _jsonl_task(path: Path, rewards: Rewards | None) -> Task:
    try:
        lines = path.read_text("utf-8-sig").split("\n")  # splitlines would split at U+2028, too, inside of a text
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"TASK {path}: {getattr(error, 'strerror', None) or error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"TASK {path}:{number}: {error}") from error
            _check_row(row, f"TASK {path}:{number}")
            rows.append(row)
    if rewards is None:
        for number, row in enumerate(rows, start=1):
            if not isinstance(row.get("answer"), str | int | float):
                what = f"an answer that is {row['answer']!r}" if "answer" in row else "no answer"
                raise UserError(
                    f"TASK {path}: entry {number} has {what}, and completions are compared with a text or a number; "
                    "give --rewards FILE.py for anything else"
                )
        rewards = Rewards([matches_answer])
    return Task(path.stem, rows, rewards, f"{len(rows):,} prompts of {path.name}")


def _check_row(row: Any, where: str) -> None:
    prompt = row.get("prompt") if isinstance(row, dict) else None
    is_chat = (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
    )
    if not is_chat and not (isinstance(prompt, str) and prompt):
        raise UserError(f"{where}: no prompt in it; a row has a prompt, a text or messages with role and content")


def _gym_task(
    source: str, rewards: Rewards | None, seed: int, watch: Watch, rows: Sequence[dict[str, Any]] | None
) -> Task:
    name = source.removeprefix(GYM)
    if find_spec("reasoning_gym") is None:
        what = "" if source.startswith(GYM) else ": no such file, and as a task of reasoning-gym it"
        raise UserError(f"TASK {name}{what} needs the package reasoning-gym: pip install 'octavo[gym]'")
    gym = Gym(name, seed)

    def score(completions: Sequence[Any], index: Sequence[int], entry: Sequence[dict[str, Any]]) -> list[float]:
        return [
            gym.score(_answer_of(text_of(completion)), number, asked)
            for completion, number, asked in zip(completions, index, entry, strict=True)
        ]

    score.__name__ = gym.name
    rows = rows or [
        {
            "prompt": [{"role": "user", "content": entry["question"] + _ASK}],
            "answer": entry["answer"],
            "entry": entry,
            "index": index,
        }
        for index, entry in enumerate(watch(gym.entries(), gym.size))
    ]
    description = f"{len(rows):,} prompts of reasoning-gym's {gym.name}"
    return Task(gym.name, rows, rewards or Rewards([score]), description, made=True)


def _answer_of(text: str) -> str:
    """Return what stands between the last tags, or else the whole text."""
    found = _ANSWER.findall(text)
    return (found[-1] if found else text).strip()
