"""The README keeps its word: its code runs, its commands, options and paths exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN_EACH = """
import os, sys
import accelerate, octavo, peft
from transformers import LlamaForCausalLM
for code in sys.argv[1:]:
    if not os.fork():
        exec(code, {"__name__": "__main__"})
        sys.exit()
    if os.wait()[1]:
        sys.exit("This example failed:\\n" + code)
"""


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_runs():
    """Each example in a process of its own; they share what took longest, the imports."""
    run = subprocess.run([sys.executable, "-c", RUN_EACH, *blocks("python")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_first_example_is_eight_lines_around_the_model():
    example = blocks("python")[0]
    assert len(example.strip().splitlines()) <= 11


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make ([a-z-]+)", " ".join(p.read_text() for p in PAGES)))
    assert named and named <= targets


def test_options_exist(invoke):
    lines = "\n".join(blocks("sh")).splitlines()
    for command in ("train", "bench", "plan"):
        code, help_text, _ = invoke(command, "--help")
        assert code == 0
        options = {o for line in lines if f"octavo {command}" in line for o in re.findall(r"(--[a-z0-9-]+)", line)}
        assert options and all(option in help_text for option in options)


def test_the_plan_shown_is_what_is_printed(invoke):
    assert "octavo plan 8b --mode lora --gpu 24 " in README
    code, printed, _ = invoke("plan", "8b", "--mode", "lora", "--gpu", "24")
    assert code == 0
    (shown,) = blocks("text")
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_paths_exist(page):
    paths = re.findall(r"`((?:octavo|tests|docs|examples|benchmarks)/[\w./-]+)`", page.read_text())
    for path in paths:
        assert (ROOT / path).exists(), path


def test_continuous_integration_runs_the_test_command():
    assert "make test" in (ROOT / ".ci" / "run").read_text()
