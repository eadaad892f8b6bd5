"""README and docs keep their word: their code runs, their commands, options, paths and links exist."""

import re

import pytest
from pages import PAGES, README, ROOT, blocks, examples, run_each

PLAN = ROOT / "docs" / "plan.md"
LOGS = [page for page in PAGES if page.name == "LOG.md" or page.parent.name == "log"]


def test_python_runs():
    """Examples that need Hugging Face's libraries run in `tests/hf/test_docs.py`."""
    codes = examples(hugging_face=False)
    assert len(codes) > 5
    run_each(codes, imports=("octavo.nn", "octavo.optim", "octavo.models"))


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 220
    for example in blocks(README, "python"):
        assert len(example.strip().splitlines()) <= 20


def test_readme_figures_name_no_commit():
    assert not re.search(r"-dirty|\+[0-9a-f]{7}\b", README.read_text())


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make ((?:test|train|lint|types|clean)[a-z-]*)", " ".join(p.read_text() for p in PAGES)))
    assert named and named <= targets


def test_options_exist(invoke):
    lines = "\n".join(code for page in PAGES for code in blocks(page, "sh")).splitlines()
    for command in ("train", "sft", "grpo", "bench", "plan", "generate"):
        code, help_text, _ = invoke(command, "--help")
        assert code == 0
        options = {o for line in lines if f"octavo {command}" in line for o in re.findall(r"(--[a-z0-9-]+)", line)}
        assert options and all(option in help_text for option in options)


def test_the_plan_shown_is_what_is_printed(invoke):
    assert "octavo plan 8b --mode lora --gpu 24 " in PLAN.read_text()
    code, printed, _ = invoke("plan", "8b", "--mode", "lora", "--gpu", "24")
    assert code == 0
    shown, on_several = blocks(PLAN, "text")
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()
    assert "octavo plan 8b --gpus 64 --batch 1 " in PLAN.read_text()
    printed = invoke("plan", "8b", "--gpus", "64", "--batch", "1")[1]
    assert [line.rstrip() for line in printed.splitlines()] == on_several.splitlines()


@pytest.mark.parametrize("page", [page for page in PAGES if page not in LOGS], ids=lambda p: p.name)
def test_paths_exist(page):
    paths = re.findall(r"(?<![\w/])((?:octavo|tests|docs|examples|benchmarks)/[\w./-]*\w)", page.read_text())
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([\w./-]*)(#[\w-]+)?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            anchors = {"#" + re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{target}{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_lines_are_short(page):
    """Prose and code; tables, commands and what is generated are as long as they are."""
    text = re.sub(r"<!-- ([\w-]+):begin -->.*?<!-- \1:end -->", "", page.read_text(), flags=re.DOTALL)
    long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith(("|", "`octavo "))]
    assert not long, long[0]


def test_continuous_integration_runs_the_test_command():
    assert "make test" in (ROOT / ".ci" / "run").read_text()
