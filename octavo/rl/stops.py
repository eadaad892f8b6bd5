"""Texts that end a completion, such as "</answer>". They are found on the host, in the text of its tokens.

    k = min {k : decode(t₁ … tₖ) contains one of the texts}

is the number of tokens of a completion t that is ended by a text. Its last token may go on behind the text.

While a completion is written, its newest tokens are looked at. A text of b bytes lies in at most b tokens, so that b
tokens before those that are new can belong to it. One more is decoded: some tokenizers leave the space of the first one
out. What is found there is looked for once more in the whole completion, where the formula holds to the letter: some
write a token in another way if it is the first.
"""

from collections.abc import Sequence
from typing import Any


class StopTexts:
    """Texts that end a completion, and the tokenizer that decodes it."""

    def __init__(self, tokenizer: Any, texts: str | Sequence[str]) -> None:
        given = (texts,) if isinstance(texts, str) else texts
        if not isinstance(given, list | tuple) or not given or not all(isinstance(x, str) and x for x in given):
            raise ValueError(f"a completion cannot end at {texts!r}: give a text of one character or more, or a list")
        self.tokenizer, self.texts = tokenizer, tuple(given)

    @property
    def reach(self) -> int:
        """How many tokens before the new ones have to be known."""
        return max(len(text.encode()) for text in self.texts) + 1

    def are_in(self, tokens: Sequence[int]) -> bool:
        """Whether the text of tokens contains one of the texts."""
        decoded = self._decode(tokens)
        return any(text in decoded for text in self.texts)

    def end(self, tokens: Sequence[int], new: int) -> int | None:
        """Return how many tokens of a completion come to a text, None if there is none in it.

        `new`: so many of the last tokens have not been looked at.
        """
        if not self.are_in(tokens):
            return None
        first = max(len(tokens) - new, 0) + 1
        return next(k for k in range(first, len(tokens) + 1) if self.are_in(tokens[:k]))

    def end_from(self, prompt: Sequence[int], tokens: Sequence[int]) -> int | None:
        """Return how many tokens of a completion come to a text that begins in its prompt."""
        head = list(prompt[-self.reach :])
        before = len(self._decode(head))
        for k in range(1, min(len(tokens), self.reach) + 1):
            decoded = self._decode([*head, *tokens[:k]])
            if any(text in decoded[max(before - len(text) + 1, 0) :] for text in self.texts):
                return k
        return None

    def cut(self, tokens: Sequence[int], *, with_stop: bool) -> tuple[int, str]:
        """Return how many tokens come before the stop in them, or before its end, and what the next one adds."""
        decoded = self._decode(tokens)
        place, stop = min((decoded.index(stop), stop) for stop in self.texts if stop in decoded)
        end = place + len(stop) if with_stop else place
        lengths = ((k, len(self._decode(tokens[:k]))) for k in range(len(tokens), -1, -1))
        whole, length = next((k, length) for k, length in lengths if length <= end)
        return whole, decoded[length:end]

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
