"""The README keeps its word: its code runs, its commands, options and paths exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.split("\n")[3][:40])
def test_python_runs(code):
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_first_example_is_eight_lines_around_the_model():
    example = blocks("python")[0]
    assert len(example.strip().splitlines()) <= 11


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make ([a-z-]+)", " ".join(p.read_text() for p in PAGES)))
    assert named and named <= targets


def test_options_exist():
    lines = "\n".join(blocks("sh")).splitlines()
    for command in ("train", "bench", "plan"):
        help_text = subprocess.run(
            [sys.executable, "-m", "octavo.cli", command, "--help"], capture_output=True, text=True, check=True
        ).stdout
        options = {o for line in lines if f"octavo {command}" in line for o in re.findall(r"(--[a-z0-9-]+)", line)}
        assert options and all(option in help_text for option in options)


def test_the_plan_shown_is_what_is_printed():
    command = [sys.executable, "-m", "octavo.cli", "plan", "8b", "--mode", "lora", "--gpu", "24"]
    assert "octavo plan 8b --mode lora --gpu 24 " in README
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (shown,) = blocks("text")
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_paths_exist(page):
    paths = re.findall(r"`((?:octavo|tests|docs|examples|benchmarks)/[\w./-]+)`", page.read_text())
    for path in paths:
        assert (ROOT / path).exists(), path


def test_continuous_integration_runs_the_test_command():
    assert "make test" in (ROOT / ".ci" / "run").read_text()
