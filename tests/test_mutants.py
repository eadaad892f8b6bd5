"""The planted bugs of tests/mutants still fit the code. `python tests/mutants/run.py` says whether tests catch them."""

import shutil

import pytest
from mutants.run import ROOT, load

MUTANTS = load()


def test_names_differ():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_edit_applies_and_its_tests_exist(mutant, tmp_path):
    (tmp_path / mutant.file).parent.mkdir(parents=True)
    shutil.copy(ROOT / mutant.file, tmp_path / mutant.file)
    mutant.apply(tmp_path)
    compile((tmp_path / mutant.file).read_text(), mutant.file, "exec")
    files = [test.partition("::")[0] for test in mutant.tests if test.startswith("tests/")]
    assert files and all((ROOT / file).exists() for file in files)
