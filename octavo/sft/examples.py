"""Rows to examples: tokens, and labels that are −100 where there is no loss.

    text                  all tokens, and the end of text
    prompt, completion    both as they are, one after the other, and the end of text; or lists of messages
    messages              a conversation, by the tokenizer's chat template

The loss is that of completions: of `completion`, and in a conversation of what the assistant says. The tokens of the
latter come from the template's generation markers, where it has them or TRL knows them for it; else they are what the
template adds for that turn, provided that it renders the turns before it alike.

An example of more than `seq` tokens is cut at the end, and counted. One that has nothing to predict then is left out,
and counted. If all are too long, that is an error: it is the setting that is wrong, then. Continuous text is cut into
pieces of `seq` tokens instead, and nothing is lost.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.sft.settings import SFTSettings
from octavo.sft.sources import Row, Source
from octavo.training.errors import UserError

IGNORED = -100
FORMS = (("messages",), ("prompt", "completion"), ("text",))  # what is looked for, in this order
MOST_HELD_OUT = 512  # examples, if a share of the data is held out

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Example:
    """Tokens of one example, and their labels."""

    input_ids: Tokens
    labels: Tokens

    @property
    def trains(self) -> bool:
        """Whether there is a token to predict; the first one is not."""
        return bool((self.labels[1:] != IGNORED).any())


@dataclass(frozen=True)
class Examples:
    """Examples of a source. `cut`: how many are shortened; `left_out`: those with nothing to predict."""

    examples: list[Example]
    cut: int = 0
    left_out: int = 0
    continuous: bool = False

    @property
    def tokens(self) -> int:
        return sum(len(example.input_ids) for example in self.examples)

    @property
    def digest(self) -> str:
        """Checksum of all tokens and labels, in their order."""
        whole = hashlib.sha256()
        for example in self.examples:
            whole.update(len(example.input_ids).to_bytes(8, "little"))
            whole.update(example.input_ids.tobytes() + example.labels.tobytes())
        return whole.hexdigest()

    def dataset(self) -> Any:
        """Return a `datasets.Dataset`, which TRL takes as already tokenised."""
        from datasets import Dataset

        columns = {name: [getattr(e, name) for e in self.examples] for name in ("input_ids", "labels")}
        return Dataset.from_dict(columns)


@dataclass(frozen=True)
class Data:
    """Examples to train on and to evaluate on, and what they were made of."""

    train: Examples
    held_out: Examples | None
    description: str

    def __str__(self) -> str:
        text = f"{len(self.train.examples):,} examples with {self.train.tokens:,} tokens from {self.description}"
        if self.held_out is not None:
            text += f"; {len(self.held_out.examples):,} held out"
        if self.train.cut:
            text += f"; {self.train.cut:,} cut, as they are longer than --seq"
        if self.train.left_out:
            text += f"; {self.train.left_out:,} left out, with nothing to predict within --seq"
        return text


def make_examples(
    source: Source,
    tokenizer: Any,
    settings: SFTSettings,
    seq: int,
    option: str = "DATA",
    positions: int | None = None,
) -> Examples:
    """Tokenise all rows of a source. `option`: what the user calls it; `positions`: those of the model, if known."""
    form = _form(source.rows[0], dict(settings.columns), option)
    conversation = Conversation(tokenizer, settings.loss)
    examples: list[Example] = []
    cut = left_out = 0
    shortest = None
    for row in source.rows:
        values = _values(row, form, dict(settings.columns))
        example = _example(values, row, conversation, settings)
        shortest = min(shortest or len(example.input_ids), len(example.input_ids))
        pieces = list(_pieces(example, seq)) if row.continuous else [_first(example, seq)]
        cut += not row.continuous and len(example.input_ids) > seq
        left_out += sum(not piece.trains for piece in pieces)
        examples += [piece for piece in pieces if piece.trains]
    if cut == len(source.rows):
        raise UserError(
            f"{option} {source.description}: every example has more than --seq {seq} tokens, the shortest "
            f"{shortest:,}; {_remedy(shortest or 0, positions)}"
        )
    if not examples:
        roles = _roles(source, form, dict(settings.columns))
        if roles and "assistant" not in roles and settings.loss == "completion":
            raise UserError(
                f"{option} {source.description}: no message has the role assistant, so that there is nothing to "
                f"predict; there are {', '.join(roles)}; rename them, or give --loss all"
            )
        raise UserError(f"{option} {source.description}: no example has a token to predict within --seq {seq}")
    return Examples(examples, cut, left_out, any(row.continuous for row in source.rows))


def _remedy(shortest: int, positions: int | None) -> str:
    if positions is None or shortest <= positions:
        return f"give --seq {shortest} or more, or shorter examples"
    return f"the model has {positions:,} positions, so give shorter examples, or a model with more"


def _roles(source: Source, form: Sequence[str], columns: Mapping[str, str]) -> list[str]:
    """Return the roles of all messages, sorted; none if rows are no conversations."""
    found = (_values(row, form, columns)["messages"] for row in source.rows) if "messages" in form else ()
    return sorted({str(message["role"]) for messages in found for message in messages})


def split(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples | None]:
    """Return examples to train on and to evaluate on: chosen at random, or the end of continuous text."""
    if share == 0:
        return examples, None
    order = list(range(len(examples.examples)))
    if len(order) < 2:
        raise UserError(
            f"held_out={share:g}: a single example cannot be split; give more data, --eval-data, or --held-out 0 for "
            "no evaluation"
        )
    if not examples.continuous:
        random.Random(seed).shuffle(order)
    count = min(max(round(len(order) * share), 1), MOST_HELD_OUT)
    chosen = set(order[-count:])
    train, held_out = (
        [example for i, example in enumerate(examples.examples) if (i in chosen) == wanted] for wanted in (False, True)
    )
    return Examples(train, examples.cut, examples.left_out, examples.continuous), Examples(held_out)


class Conversation:
    """Conversations as tokens, by a tokenizer's chat template."""

    def __init__(self, tokenizer: Any, loss: str) -> None:
        self.tokenizer = tokenizer
        self.masked = loss == "completion"
        self._marked: str | None = None  # a template with generation markers
        self._looked = False
        self._tools: list[Any] | None = None  # of the conversation at hand

    def _require_tools_known(self, messages: Sequence[Mapping[str, Any]], tools: Any, where: str) -> None:
        """Raise if the template would leave out the tools of a conversation, or calls of them."""
        template = str(self.tokenizer.chat_template)
        called = any("tool_calls" in message for message in messages)
        for there, name in ((called, "tool_calls"), (bool(tools), "tools")):
            if there and name not in template:
                raise UserError(
                    f"{where}: the conversation has {name}, which the chat template leaves out: take a model whose "
                    "template knows them, or give --chat-template FILE"
                )

    def example(
        self, messages: Sequence[Mapping[str, Any]], prompt: int, where: str, tools: list[Any] | None = None
    ) -> Example:
        """Return a conversation of which the first `prompt` messages are not predicted. `tools`: for the template."""
        if not self.tokenizer.chat_template:
            raise UserError(
                f"{where} is a conversation, and the model's tokenizer has no chat template: take a model that was "
                "trained for chats, or give --chat-template FILE"
            )
        self._require_tools_known(messages, tools, where)
        self._tools = tools
        marked = self._marked_template() if self.masked and not prompt else None
        if marked is not None:
            tokens = self._render(messages, where, chat_template=marked, return_assistant_tokens_mask=True)
            ids, mask = tokens["input_ids"], tokens["assistant_masks"]
            return _masked(ids, [bool(bit) for bit in mask])
        ids = self._render(messages, where)["input_ids"]
        if not self.masked:
            return _masked(ids, [True] * len(ids))
        return _masked(ids, self._predicted(messages, ids, prompt, where))

    def _predicted(self, messages: Sequence[Mapping[str, Any]], ids: list[int], prompt: int, where: str) -> list[bool]:
        """Return which tokens belong to turns of the assistant, the first `prompt` messages apart."""
        mask = [False] * len(ids)
        for i, message in enumerate(messages):
            if i < prompt or message["role"] != "assistant":
                continue
            before, start = self._shared(messages[:i], ids, where), 0
            if before is not None and i:
                start = _common_prefix(self._render(messages[:i], where, add_generation_prompt=True)["input_ids"], ids)
            stop = self._shared(messages[: i + 1], ids, where)
            if before is None or stop is None or stop <= start:
                raise UserError(
                    f"{where}: the chat template renders the first {i + 1} messages differently once others follow, so "
                    f"that the tokens of message {i + 1} cannot be told from the rest; give --loss all, or a "
                    "--chat-template with generation markers"
                )
            mask[start:stop] = [True] * (stop - start)
        return mask

    def _shared(self, messages: Sequence[Mapping[str, Any]], ids: list[int], where: str) -> int | None:
        """Return how many tokens the beginning of a conversation has; None if all of it does not begin with them."""
        if not messages:
            return 0
        beginning = self._render(messages, where)["input_ids"]
        shared = _common_prefix(beginning, ids)
        return shared if shared >= len(beginning) - 1 else None  # the last token may merge with what follows

    def _render(self, messages: Sequence[Mapping[str, Any]], where: str, **options: Any) -> Any:
        from jinja2 import TemplateError

        try:
            options = {"tokenize": True, "return_dict": True, "tools": self._tools, **options}
            return self.tokenizer.apply_chat_template(list(messages), **options)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{where}: the chat template does not take this conversation: {error}") from error

    def _marked_template(self) -> str | None:
        if not self._looked:
            from trl.chat_template_utils import get_training_chat_template

            self._looked = True
            try:
                self._marked = get_training_chat_template(self.tokenizer) or self.tokenizer.chat_template
            except ValueError:  # no markers, and not a template that TRL knows
                self._marked = None
        return self._marked


def _form(row: Row, columns: Mapping[str, str], option: str) -> tuple[str, ...]:
    """Return the columns that the data has, by its first row."""
    for form in FORMS:
        if all(columns.get(name, name) in row.values for name in form):
            return form
    there = ", ".join(map(str, row.values)) or "none"
    renamed = next((theirs for theirs in columns.values() if theirs not in row.values), None)
    if renamed is not None:
        raise UserError(f"{row.where}: no column {renamed!r}, which --columns names; there are {there}")
    raise UserError(
        f"{row.where}: {option} needs a column text, messages, or prompt and completion; there are {there}; rename "
        "them with --columns prompt=…,completion=…"
    )


def _values(row: Row, form: Sequence[str], columns: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name in form:
        column = columns.get(name, name)
        value = row.values.get(column)
        if isinstance(value, str) and name == "messages":
            value = _from_json(value, row.where)  # CSV has no lists
        if column not in row.values:
            there = ", ".join(map(str, row.values))
            raise UserError(f"{row.where}: column {column!r} is missing; there are {there}")
        if value is None or value in ("", []):
            raise UserError(f"{row.where}: column {column!r} is empty")
        if not isinstance(value, (str, list)):
            needed = "a list of messages" if name == "messages" else "text; in JSON, put it in quotes"
            raise UserError(f"{row.where}: column {column!r} is {_kind(value)}, {value!r:.40}; it has to be {needed}")
        values[name] = value
    return values


def _kind(value: Any) -> str:
    kinds = ((bool, "a truth value"), ((int, float), "a number"), (dict, "an object"), (list, "a list"))
    return next((words for types, words in kinds if isinstance(value, types)), f"a {type(value).__name__}")


def _from_json(text: str, where: str, column: str = "messages") -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: {column} is text, and not a JSON list: {error}") from error


def _example(values: Mapping[str, Any], row: Row, conversation: Conversation, settings: SFTSettings) -> Example:
    if "messages" in values:
        return conversation.example(_checked(values["messages"], row.where), 0, row.where, _tools(row))
    tokenizer = conversation.tokenizer
    if "text" in values:
        if not isinstance(values["text"], str):
            raise UserError(f"{row.where}: text is a {type(values['text']).__name__}; it has to be a string")
        ids = _ended(tokenizer(values["text"], verbose=False)["input_ids"], tokenizer)
        return _masked(ids, [True] * len(ids))
    prompt, completion = values["prompt"], values["completion"]
    if isinstance(prompt, str) and isinstance(completion, str) and settings.chat:
        prompt, completion = [{"role": "user", "content": prompt}], [{"role": "assistant", "content": completion}]
    if isinstance(prompt, list) and isinstance(completion, list):
        prompt, completion = _checked(prompt, row.where), _checked(completion, row.where)
        return conversation.example([*prompt, *completion], len(prompt), row.where, _tools(row))
    if not (isinstance(prompt, str) and isinstance(completion, str)):
        raise UserError(f"{row.where}: prompt and completion have to be two strings, or two lists of messages")
    ids = _ended(tokenizer(prompt + completion, verbose=False)["input_ids"], tokenizer)
    start = _common_prefix(tokenizer(prompt, verbose=False)["input_ids"], ids) if conversation.masked else 0
    return _masked(ids, [i >= start for i in range(len(ids))])


def _checked(messages: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: messages have to be a list of objects with role and content")
    return [_message(message, f"{where}: message {number}") for number, message in enumerate(messages, 1)]


def _message(message: Any, where: str) -> dict[str, Any]:
    """Return a message with its content as text, and without fields that are null, as tables have them."""
    given = {name: x for name, x in message.items() if x is not None} if isinstance(message, dict) else {}
    if given.get("tool_calls"):
        given.setdefault("content", "")
    if "role" not in given or "content" not in given:
        raise UserError(f"{where} has to be an object with role and content, not {message!r:.80}")
    content = given["content"]
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return given | {"content": "".join(part["text"] for part in content)}
    if not isinstance(content, str):
        raise UserError(f"{where}: content is {_kind(content)}, {content!r:.40}; it has to be text")
    return given


def _tools(row: Row) -> list[Any] | None:
    """Return the functions that a conversation may call, by its column `tools`, as TRL names it."""
    tools = row.values.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _from_json(tools, row.where, "tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise UserError(f"{row.where}: column 'tools' is {_kind(tools)}, {tools!r:.40}; it has to be a list")
    return tools


def _ended(ids: list[int], tokenizer: Any) -> list[int]:
    """Return the tokens of a text with the end of text after them."""
    end = tokenizer.eos_token_id
    return ids if end is None or (ids and ids[-1] == end) else [*ids, end]


def _masked(ids: Sequence[int], predicted: Sequence[bool]) -> Example:
    tokens = np.array(ids, dtype=np.int32)
    return Example(tokens, np.where(np.array(predicted, dtype=bool), tokens, np.int32(IGNORED)))


def _first(example: Example, seq: int) -> Example:
    return Example(example.input_ids[:seq], example.labels[:seq])


def _pieces(example: Example, seq: int) -> Iterator[Example]:
    for start in range(0, len(example.input_ids), seq):
        yield Example(example.input_ids[start : start + seq], example.labels[start : start + seq])


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
