"""The pages of documentation and the code in them, for the tests that hold them to their word."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
HUGGING_FACE = re.compile(r"\b(transformers|accelerate|peft|trl|datasets|FastLanguageModel|OctavoCallback)\b")
# The examples share what takes longest, the imports; each runs in a process and a folder of its own.
RUN_EACH = """
import importlib, os, sys, tempfile
for name in {imports!r}:
    importlib.import_module(name)
for code in sys.argv[1:]:
    if not os.fork():
        os.chdir(tempfile.mkdtemp())
        exec(code, {{"__name__": "__main__"}})
        sys.exit()
    if os.wait()[1]:
        sys.exit("This example failed:\\n" + code)
"""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def examples(*, hugging_face: bool) -> list[str]:
    """Python code of all pages: those that need Hugging Face's libraries, or those that do not."""
    actual = [code for page in PAGES for code in blocks(page, "python")]
    return [code for code in actual if bool(HUGGING_FACE.search(code)) == hugging_face]


def run_each(codes: list[str], imports: tuple[str, ...]) -> None:
    """Run every example; the first that fails fails the test, with its traceback."""
    command = [sys.executable, "-c", RUN_EACH.format(imports=imports), *codes]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
