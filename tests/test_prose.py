"""Docstrings that stand alone: the first line is all that `help()`, an IDE or an index shows of most of them."""

import ast
import re
from pathlib import Path

import pytest

import octavo

ROOT = Path(octavo.__file__).parent
# Openings that continue the name of the function, and say nothing without it.
DANGLING = re.compile(r"(Of|As|By|That of|What)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def first_lines(source: str):
    """Every docstring's first line, with the line of the code it belongs to."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text.splitlines()[0]


def test_first_lines_stand_alone():
    dangling = [
        f"{path.relative_to(ROOT.parent)}:{number}: {line}"
        for path in sorted(ROOT.rglob("*.py"))
        for number, line in first_lines(path.read_text())
        if DANGLING.match(line)
    ]
    assert not dangling, "\n".join(dangling)


@pytest.mark.parametrize("opening", ["Of one number.", "As one string.", "By name.", "That of x.", "What there is."])
def test_the_rule_knows_its_openings(opening):
    source = f'def f():\n    """{opening}"""\n'
    assert [(number, bool(DANGLING.match(line))) for number, line in first_lines(source)] == [(1, True)]


@pytest.mark.parametrize("line", ["Offset of a row.", "Assign rows.", "Bytes of one number.", "Whatever it is."])
def test_other_words_may_begin_like_them(line):
    assert not DANGLING.match(line)
