"""What `make test` leaves out, and that nothing is left out of continuous integration."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from matrix import mark_all_but_samples, sampled

ROOT = Path(__file__).parent.parent
SIZES, NAMES, FLAGS = [[1], [2], [3], [4]], ["a", "b", "c"], [False, True]


def cells_of(*pair):
    """A test with three parameters, two of which come together."""
    marks = {
        "matrix": pytest.mark.matrix(*pair).mark,
        "parametrize": [
            pytest.mark.parametrize("size", SIZES).mark,
            pytest.mark.parametrize("name, flag", [*zip(NAMES, itertools.cycle(FLAGS), strict=False)]).mark,
        ],
    }
    cells = []
    for size, (name, flag) in itertools.product(SIZES, zip(NAMES, itertools.cycle(FLAGS), strict=False)):
        item = SimpleNamespace(path=Path("test.py"), originalname="test", slow=[])
        item.callspec = SimpleNamespace(params={"size": size, "name": name, "flag": flag})
        item.get_closest_marker, item.iter_markers, item.add_marker = marks.get, marks.get, item.slow.append
        cells.append(HashedById(**vars(item)))
    return cells


class HashedById(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def test_every_value_is_in_the_sample():
    actual = [item.callspec.params for item in sampled(cells_of())]
    assert len(actual) == len(SIZES)
    assert [params["size"] for params in actual] == SIZES
    assert {params["name"] for params in actual} == set(NAMES)


def test_every_pair_that_is_named_is_in_the_sample():
    actual = [item.callspec.params for item in sampled(cells_of("size", "flag"))]
    assert {(params["size"][0], params["flag"]) for params in actual} == {*itertools.product(range(1, 5), FLAGS)}
    assert {params["name"] for params in actual} == set(NAMES) and len(actual) < len(SIZES) * len(NAMES)


def test_the_rest_is_slow():
    cells = cells_of()
    mark_all_but_samples(cells)
    assert [item.slow for item in cells].count(["slow"]) == len(cells) - len(sampled(cells))


def test_continuous_integration_leaves_nothing_out():
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert {"make test-all", "make test-hf", "make test-rl"} <= set(commands)
    makefile = (ROOT / "Makefile").read_text()
    assert makefile.count("not slow") == 1 and "test-all: SELECTED :=\n" in makefile
