"""Data of a run without arguments: functions of Python's standard library, and the docstrings their authors wrote."""

import ast
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from octavo.sft.sources import Row, Source
from octavo.training.errors import UserError

ASKED = "Write the docstring of this Python function.\n\n"
SOURCE_CHARACTERS = (40, 320)
DOCSTRING_CHARACTERS = (30, 240)
EXAMPLES = 160


def read_docstrings() -> Source:
    """Return conversations that ask for a docstring, in an order that is always the same."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(root.glob("*.py"))
    random.Random(0).shuffle(paths)
    rows = list(islice((row for path in paths for row in _pairs(path)), EXAMPLES))
    if not rows:
        raise UserError(f"no Python source in {root}: this Python has no standard library in text; give MODEL and DATA")
    return Source(rows, f"docstrings of {len(rows)} functions of the Python standard library")


def _pairs(path: Path) -> Iterator[Row]:
    text = path.read_text("utf-8", errors="replace")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or (docstring := ast.get_docstring(node)) is None:
            continue
        code = _without_docstring(node, lines)
        if _fits(code, SOURCE_CHARACTERS) and _fits(docstring, DOCSTRING_CHARACTERS):
            asked = {"role": "user", "content": f"{ASKED}{code}"}
            yield Row({"messages": [asked, {"role": "assistant", "content": docstring}]}, f"{path}:{node.lineno}")


def _without_docstring(node: ast.FunctionDef, lines: list[str]) -> str:
    end_of_docstring, end = node.body[0].end_lineno or node.lineno, node.end_lineno or node.lineno
    return textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1] + lines[end_of_docstring:end]))


def _fits(text: str, bounds: tuple[int, int]) -> bool:
    return bounds[0] <= len(text) <= bounds[1]
