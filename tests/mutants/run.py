"""Plant known bugs, one at a time, and see that a test catches each.

    python tests/mutants/run.py                    # all of them
    python tests/mutants/run.py --only mask,eps    # those whose name has one of these in it
    python tests/mutants/run.py --jobs 2

A mutant is an edit of one file of `octavo`, and the tests that must fail with it. They are in the `*.toml` files beside
this script: `name`, `file`, `old` (which occurs once), `new`, `tests`. The edit is made in a copy, never in place. Not
part of `make test`: each mutant takes as long as its tests do. `tests/test_mutants.py` sees to it that every edit still
applies.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TESTS_FAILED = 1  # pytest's exit status; others mean that it could not run them


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {text.count(self.old)} times in {self.file}, not once")
        path.write_text(text.replace(self.old, self.new))


def load() -> list[Mutant]:
    """Read every mutant."""
    actual = []
    for path in sorted(HERE.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            actual.append(Mutant(**{**entry, "tests": tuple(entry["tests"])}))
    return actual


def verdict(mutant: Mutant) -> str:
    """Run the mutant's tests against a copy of the library with the bug in it."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copytree(ROOT / "octavo", root / "octavo", ignore=shutil.ignore_patterns("__pycache__"))
        mutant.apply(root)
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}  # not the library in this folder
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:warnings"]
        done = subprocess.run(
            [*command, *mutant.tests], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode == TESTS_FAILED:
        return "caught"
    if done.returncode == 0:
        return "SURVIVED"
    return f"pytest ended with {done.returncode}: {done.stdout[-400:]}{done.stderr[-400:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    wanted = options.only.split(",")
    mutants = [mutant for mutant in load() if any(part in mutant.name for part in wanted)]
    if not mutants:
        sys.exit(f"--only {options.only}: no mutant has that in its name")
    caught = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, actual in zip(mutants, pool.map(verdict, mutants), strict=True):
            caught += actual == "caught"
            print(f"{actual:10} {mutant.name}", flush=True)
    print(f"{caught} of {len(mutants)} caught")
    sys.exit(caught != len(mutants))


if __name__ == "__main__":
    main()
