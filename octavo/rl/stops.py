"""Texts that end a completion, such as "</answer>". They are found on the host, in the text of its tokens.

    k = min {k : decode(t₁ … tₖ) contains one of the texts}

is the number of tokens of a completion t that is ended by a text. Its last token may go on behind the text.

A text of b bytes lies in at most b tokens, so that b tokens before those that are new can belong to it. One more is
decoded: some tokenizers leave the space of the first one out.
"""

from collections.abc import Sequence
from typing import Any


class StopTexts:
    """Texts that end a completion, and the tokenizer that decodes it."""

    def __init__(self, tokenizer: Any, texts: str | Sequence[str]) -> None:
        self.tokenizer, self.texts = tokenizer, _checked(texts)

    @property
    def reach(self) -> int:
        """How many tokens before the new ones have to be known."""
        return max(len(text.encode()) for text in self.texts) + 1

    def end(self, tokens: Sequence[int], new: int) -> int | None:
        """Return with how many of the tokens a completion is complete, None if it is not.

        `tokens`: the last ones of a completion. `new`: so many of these have not been looked at.
        """
        known = max(len(tokens) - new, 0)
        first = max(known - self.reach, 0)
        if not self._is_in(tokens[first:]):
            return None
        return next(k for k in range(known + 1, len(tokens) + 1) if self._is_in(tokens[first:k]))

    def cut(self, text: str, *, with_stop: bool) -> str:
        """Return the text of a completion up to the stop in it, with or without that."""
        found = [(text.index(stop), stop) for stop in self.texts if stop in text]
        if not found:
            return text
        place, stop = min(found)
        return text[: place + len(stop) if with_stop else place]

    def _is_in(self, tokens: Sequence[int]) -> bool:
        text = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self.texts)


def stops_of(tokenizer: Any, texts: str | Sequence[str]) -> tuple[list[int], StopTexts | None]:
    """Return the tokens among texts that a tokenizer does not split, such as "<|im_end|>", and the other texts."""
    whole: dict[str, int] = tokenizer.get_added_vocab()
    others = [text for text in _checked(texts) if text not in whole]
    return [whole[text] for text in _checked(texts) if text in whole], StopTexts(tokenizer, others) if others else None


def _checked(texts: str | Sequence[str]) -> tuple[str, ...]:
    given = (texts,) if isinstance(texts, str) else tuple(texts)
    for text in given:
        if not isinstance(text, str) or not text:
            raise ValueError(f"a completion cannot end at {text!r}: give texts of one character or more")
    return given
