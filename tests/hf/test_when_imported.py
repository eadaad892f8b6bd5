"""Modules of other libraries that are changed when they are imported."""

import importlib
import sys

import pytest

from octavo.hf.when_imported import when_imported


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A function that writes a module, which is not imported yet."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    names = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        names.append(name)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_now_or_later(module):
    name, seen = module("octavo_later", "value = 1"), []
    before = len(sys.meta_path)
    for number in (1, 2):
        when_imported(name, lambda found, number=number: seen.append((number, found.value)))
    assert not seen
    found = importlib.import_module(name)
    assert seen == [(1, 1), (2, 1)] and len(sys.meta_path) == before
    when_imported(name, lambda again: seen.append(again is found))
    assert seen[-1] is True
    assert importlib.reload(found).value == 1


def test_modules_that_fail_or_are_not_there(module):
    name, seen = module("octavo_broken", "raise OSError('broken')"), []
    when_imported(name, seen.append)
    with pytest.raises(OSError, match="broken"):
        importlib.import_module(name)
    when_imported("octavo_nowhere", seen.append)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("octavo_nowhere")
    assert not seen
