"""Helpers to declare the options of commands."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from octavo.training.errors import UserError

# These repeat octavo.numerics, which takes long to import; a test compares them.
RECIPES = ("delayed", "current", "channel", "block", "mx")
GRANULARITIES = ("tensor", "channel", "block", "mx")


def option(panel: str, name: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel, show_default=False)


def _per_operand(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser of `value`, or of `x,w,g` with a value each."""

    def parse(text: str) -> Any:
        values = [kind(part.strip()) for part in text.split(",")]
        return values[0] if len(values) == 1 else values

    return parse


def operand_option(name: str, text: str, kind: Callable[[str], Any]) -> Any:
    return typer.Option(
        name, help=text, rich_help_panel="FP8", show_default=False, parser=_per_operand(kind), metavar="<x,w,g>"
    )


def in_words(choices: Sequence[str]) -> str:
    """Return `one, two or three`."""
    return f"{', '.join(choices[:-1])} or {choices[-1]}"


def names(text: str) -> list[str]:
    """Parse `one,two`."""
    return [name.strip() for name in text.split(",")]


def check_mode(mode: str, allowed: Sequence[str]) -> None:
    """Raise for a mode that a command does not have."""
    if mode not in allowed:
        raise UserError(f"mode={mode!r}: choose one of {', '.join(allowed)}")


def refuse(options: Mapping[str, Any], why: str) -> None:
    """Raise for the first option that was given."""
    for name, value in options.items():
        if value is not None:
            typed = f"--no-{name}" if value is False else f"--{name}" if value is True else f"--{name} {value}"
            raise UserError(f"{typed}: {why}")
