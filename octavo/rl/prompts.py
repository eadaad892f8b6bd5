"""The prompts of a task as tokens, and which of them a step takes.

Everything that can be wrong with them is found before a run begins: a tokenizer that has more tokens than the model,
prompts that leave no room for a completion. The prompts of a step depend on the seed and the step alone, so that a
resumed run takes those that it would have taken.
"""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.rl.learner import Learner
from octavo.rl.settings import GRPOSettings, seed_of
from octavo.rl.tasks import Task
from octavo.training.errors import UserError


@dataclass(frozen=True)
class Prompt:
    """A row of a task, its prompt as text and as tokens."""

    row: dict[str, Any]
    text: str
    ids: Sequence[int]


class Prompts:
    """The prompts that a model can take. `too_long`: how many were left out, for want of positions."""

    def __init__(self, task: Task, tokenizer: Any, learner: Learner, settings: GRPOSettings) -> None:
        self.settings = settings
        prompts = [_tokenized(row, tokenizer) for row in task.rows]
        highest = max(max(prompt.ids, default=0) for prompt in prompts)
        if len(tokenizer) > learner.vocabulary or highest >= learner.vocabulary:
            raise UserError(
                f"the tokenizer has {max(len(tokenizer), highest + 1):,} tokens and the model embeddings for "
                f"{learner.vocabulary:,}: they do not belong together; take the model's own tokenizer, or resize the "
                "model's embeddings"
            )
        if any(not prompt.ids for prompt in prompts):
            raise UserError(f"{task.name}: a prompt has no tokens; every prompt needs one at least")
        room = None if learner.positions is None else learner.positions - settings.max_new_tokens
        if room is not None and room < 1:
            raise UserError(
                f"max_new_tokens={settings.max_new_tokens}: the model has {learner.positions:,} positions, for prompt "
                "and completion together; give fewer"
            )
        self.all = [prompt for prompt in prompts if room is None or len(prompt.ids) <= room]
        self.too_long = len(prompts) - len(self.all)
        self.room = room
        if not self.all:
            raise UserError(
                f"{task.name}: every prompt has more than {room:,} tokens, which is what {learner.positions:,} "
                f"positions leave beside max_new_tokens={settings.max_new_tokens}; give fewer of these, or shorter "
                "prompts"
            )

    def of_step(self, number: int) -> list[Prompt]:
        """Return the prompts of a step, counted from 1: each pass over all of them is in an order of its own."""
        count, size = len(self.all), self.settings.prompts
        places = range((number - 1) * size, number * size)
        orders = {place // count: None for place in places}
        shuffled = {passing: self._order(passing) for passing in orders}
        return [self.all[shuffled[place // count][place % count]] for place in places]

    def _order(self, passing: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed_of(self.settings.seed, "prompts", passing))
        order: list[int] = torch.randperm(len(self.all), generator=generator).tolist()
        return order


def _tokenized(row: dict[str, Any], tokenizer: Any) -> Prompt:
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return Prompt(row, prompt, _ids(prompt, tokenizer))
    if tokenizer.chat_template is None:  # what the messages say, one below the other
        contents = [message["content"] for message in prompt]
        if not all(isinstance(content, str) for content in contents):
            raise UserError(
                f"a content of the messages {reprlib.repr(prompt)} is no text, and the tokenizer has no chat template "
                "to make one of it: give texts"
            )
        text = "\n".join(contents) + "\n"
        return Prompt(row, text, _ids(text, tokenizer))
    try:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program of its own, and says in its own way what it does not take
        raise UserError(f"the chat template refuses the messages {reprlib.repr(prompt)}: {error}") from error
    return Prompt(row, text, _ids(text, tokenizer, add_special_tokens=False))


def _ids(text: str, tokenizer: Any, **options: Any) -> Sequence[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can write half of a character, which no tokenizer takes
        raise UserError(f"the prompt {reprlib.repr(text)} is no text: {error.reason}; mend that row") from error
    ids: Sequence[int] = tokenizer(text, **options)["input_ids"]
    return ids
