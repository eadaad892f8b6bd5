"""The tables in docs/benchmarks.md and the picture of the README are those of the result files."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import picture  # noqa: E402
import tables  # noqa: E402


def test_the_page_is_current():
    page = tables.PAGE.read_text()
    assert tables.with_tables(page) == page, "run python benchmarks/tables.py"


def test_the_picture_is_current():
    assert picture.draw() == picture.PICTURE.read_text(), "run python benchmarks/picture.py"


def test_every_result_file_is_read(monkeypatch):
    read = set()
    original = tables.read
    monkeypatch.setattr(tables, "read", lambda pattern: read.update(tables.RESULTS.glob(pattern)) or original(pattern))
    for name, make in tables.TABLES.items():
        if name != "steps":  # which looks at all files, and takes those of steps
            make()
    steps = {path for path in tables.RESULTS.glob("*.json") if '"kind": "step"' in path.read_text()}
    assert read | steps == set(tables.RESULTS.iterdir())


@pytest.mark.parametrize(
    "page", ["", "<!-- steps:begin -->", "<!-- steps:end --><!-- steps:begin -->"], ids=["none", "one", "order"]
)
def test_markers_are_needed(page):
    with pytest.raises(ValueError, match="steps:begin"):
        tables.with_tables(page)


def test_an_unknown_marker_is_refused():
    with pytest.raises(ValueError, match="no table is called speeds"):
        tables.with_tables(tables.PAGE.read_text() + "<!-- speeds:begin -->")
