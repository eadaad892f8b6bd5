"""Checks at the boundary: every message names the field, the value and what is allowed."""

from collections.abc import Collection
from typing import Any


def check_choice(field: str, value: Any, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(f"{field}={value!r}: choose one of {', '.join(choices)}")


def checked_percentile(field: str, value: Any) -> float:
    """Return the percentage meant by 99.99 or by 0.9999; an ambiguous value, such as 1, is an error."""
    if not isinstance(value, bool) and isinstance(value, int | float):
        if 50 <= value <= 100:
            return float(value)
        if 0.5 <= value < 1:
            return float(f"{value * 100:.12g}")  # 0.9999 and 99.99 are to be equal
    raise ValueError(f"{field}={value!r}: a percentage from 50 to 100, such as 99.99, or a share from 0.5 to below 1")


def check_positive_int(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{field}={value!r}: a whole number of at least 1")
