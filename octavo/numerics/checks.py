"""Checks at the boundary: every message names the field, the value and what is allowed."""

from collections.abc import Collection
from typing import Any


def check_choice(field: str, value: Any, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(f"{field}={value!r}: choose one of {', '.join(choices)}")


def check_percentile(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 100:
        raise ValueError(f"{field}={value!r}: a number in (0, 100], such as 99.99")


def check_positive_int(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{field}={value!r}: a whole number of at least 1")
