"""Modules that are changed when they are imported, and the import machinery that stays as it was."""

import importlib
import importlib.util
import inspect
import sys
import zipfile
from pathlib import Path

import pytest

from octavo.hf import when_imported as room
from octavo.hf.when_imported import when_imported


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Write a module that nothing has imported yet."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(room._FINDER, "changes", {})

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()

    yield write
    for name in [name for name in sys.modules if name.startswith("octavo_")]:
        del sys.modules[name]


def test_a_module_is_changed_before_anyone_has_it(make):
    make("octavo_late", "value = 1")
    seen = []
    for number in (1, 2):
        when_imported("octavo_late", lambda found, number=number: seen.append((number, found.value)))
    assert not seen and "octavo_late" not in sys.modules
    found = importlib.import_module("octavo_late")
    assert seen == [(1, 1), (2, 1)]
    when_imported("octavo_late", lambda again: seen.append(again is found))
    assert seen[-1] is True
    assert inspect.getsource(found).strip() == Path(found.__spec__.origin).read_text()
    assert type(found.__loader__) is type(found.__spec__.loader) is type(sys.modules["inspect"].__loader__)


def test_looking_for_a_module_does_not_use_the_change_up(make):
    make("octavo_sought", "value = 1")
    seen = []
    when_imported("octavo_sought", seen.append)
    assert importlib.util.find_spec("octavo_sought").origin and not seen
    assert importlib.import_module("octavo_sought") in seen


def test_a_module_that_fails_is_changed_when_it_no_longer_does(make):
    make("octavo_failing", "import octavo_missing\nvalue = 1")
    seen = []
    when_imported("octavo_failing", lambda found: seen.append(found.value))
    with pytest.raises(ModuleNotFoundError, match="octavo_missing"):
        importlib.import_module("octavo_failing")
    assert not seen
    make("octavo_missing", "")
    importlib.import_module("octavo_failing")
    assert seen == [1]


def test_a_module_that_is_loaded_again_is_changed_again(make):
    make("octavo_again", "value = 1")
    when_imported("octavo_again", lambda found: setattr(found, "value", found.value + 1))
    found = importlib.import_module("octavo_again")
    assert importlib.reload(found).value == 2


def test_a_loader_of_several_modules(make, tmp_path):
    """One that reads archives has all modules of a folder."""
    make("octavo_other", "")
    with zipfile.ZipFile(tmp_path / "octavo.zip", "w") as archive:
        for name in ("__init__", "one", "two"):
            archive.writestr(f"octavo_zipped/{name}.py", f"{name} = 1")
    sys.path.insert(0, str(tmp_path / "octavo.zip"))
    seen = []
    when_imported("octavo_zipped.one", lambda found: seen.append(found.one))
    for name in ("one", "two"):
        importlib.import_module(f"octavo_zipped.{name}")
    assert seen == [1]
    sys.path.pop(0)


def test_a_module_that_there_is_not(make):
    make("octavo_other", "")
    seen = []
    when_imported("octavo_nowhere", seen.append)
    with pytest.raises(ModuleNotFoundError, match="octavo_nowhere"):
        importlib.import_module("octavo_nowhere")
    assert importlib.util.find_spec("octavo_nowhere") is None and not seen
