"""The folder of a run: recognised by its marker, locked while a process trains in it, and nothing else ever removed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_cases import curve, rows, run

from octavo.training import checkpoint, run_folder
from octavo.training.errors import RunError, UserError
from octavo.training.learner import Learner


def hugging_face_folder(folder: Path) -> Path:
    (folder / "checkpoint-500").mkdir(parents=True)
    (folder / "checkpoint-100000").mkdir()
    for name in (
        "config.json",
        "model.safetensors",
        "checkpoint-500/model.safetensors",
        "checkpoint-100000/optimizer.pt",
    ):
        (folder / name).write_bytes(b"{}")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}])
def test_a_folder_of_hugging_face_is_no_run_and_nothing_in_it_changes(
    make_settings: Any, tmp_path: Path, options: dict[str, bool]
) -> None:
    folder = hugging_face_folder(tmp_path / "model")
    before = contents(folder)
    with pytest.raises(UserError, match=r"no.* run of Octavo \(it has no octavo-run\.json\)") as error:
        run(make_settings(), folder, **options)
    assert "\n" not in str(error.value) and error.value.exit_code == 2
    assert contents(folder) == before


@pytest.mark.parametrize("name", [*run_folder.FILES, "checkpoint-000003", "bf16/checkpoint-000003"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_any_file_that_a_run_would_replace_is_safe(
    make_settings: Any, tmp_path: Path, name: str, overwrite: bool
) -> None:
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"mine")
    with pytest.raises(UserError, match=rf"not a run of Octavo .* holds {name}"):
        run(make_settings(), tmp_path / "out", overwrite=overwrite)
    assert contents(tmp_path / "out") == {name: b"mine"}


def test_a_folder_with_other_files_takes_a_run(make_settings: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_bytes(b"mine")
    run(make_settings(steps=1), tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").read_bytes() == b"mine"


def test_overwriting_a_run_keeps_what_someone_put_into_it(make_settings: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(make_settings(steps=1), out)
    mine = hugging_face_folder(out / "inner")
    (out / "checkpoint-500").mkdir()
    (out / "checkpoint-500" / "model.safetensors").write_bytes(b"mine")
    before = contents(mine)
    run(make_settings(steps=2), out, overwrite=True)
    assert contents(mine) == before and len(rows(out)) == 2
    assert (out / "checkpoint-500" / "model.safetensors").read_bytes() == b"mine"

    (out / "checkpoint-100000").mkdir()
    (out / "checkpoint-100000" / "optimizer.pt").write_bytes(b"mine")
    with pytest.raises(
        UserError, match=r"checkpoint-100000/optimizer.pt was not written by a run: nothing was touched"
    ):
        run(make_settings(steps=2), out, overwrite=True)
    assert len(rows(out)) == 2


def test_saving_removes_no_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-000001").mkdir()
    (tmp_path / "checkpoint-000001" / "optimizer.pt").write_bytes(b"mine")
    for step in (2, 3, 4):
        checkpoint.save_checkpoint(tmp_path, step, {}, {"step": step})
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == [
        "checkpoint-000001",
        "checkpoint-000003",
        "checkpoint-000004",
    ]


class Killed(BaseException):
    """Stands for kill -9: nothing in the library handles it."""


@pytest.mark.parametrize("survived", [0, 1, 2, 8, 10])
def test_a_killed_overwrite_never_continues_the_old_run(
    make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    """Killed between any two removals, the next plain start trains its own data from its own step 1, or refuses."""
    out, other = tmp_path / "run", tmp_path / "other.txt"
    other.write_bytes(bytes(reversed(b"def hatch(egg):\n    return egg.dragon\n")) * 80)
    run(make_settings(compare=True, steps=4), out)
    new = make_settings(data=str(other), steps=4)
    run(new, tmp_path / "alone")
    left = survived

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return call(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", deadly(Path.unlink))
        patch.setattr(run_folder.shutil, "rmtree", deadly(run_folder.shutil.rmtree))
        patch.setattr(run_folder, "write_json", deadly(run_folder.write_json))
        with pytest.raises(Killed):
            run(new, out, overwrite=True)

    with pytest.raises(UserError, match=r"it has no config\.json" if survived else "does not hold the bytes"):
        run(new, out, resume=True)
    try:
        run(new, out)
    except UserError as error:
        assert "--overwrite" in str(error)
        run(new, out, overwrite=True)
    assert curve(out) == curve(tmp_path / "alone")


def test_a_lost_config_never_continues_the_old_run(make_settings: Any, tmp_path: Path) -> None:
    run(make_settings(), tmp_path / "run")
    (tmp_path / "run" / "config.json").unlink()
    before = contents(tmp_path / "run")
    with pytest.raises(UserError, match=r"what is left of a run.*--resume.*--overwrite"):
        run(make_settings(seed=3), tmp_path / "run")
    with pytest.raises(UserError, match=r"it has no config\.json"):
        run(make_settings(), tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == before
    run(make_settings(seed=3), tmp_path / "run", overwrite=True)
    run(make_settings(seed=3), tmp_path / "alone")
    assert curve(tmp_path / "run") == curve(tmp_path / "alone")


def test_a_refused_resume_leaves_the_settings_as_they_were(make_settings: Any, tmp_path: Path) -> None:
    run(make_settings(schedule="constant"), tmp_path / "run")
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(UserError, match="steps=2"):
        run(make_settings(schedule="constant", steps=2), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "config.json").read_bytes() == before


HOLD = """
import sys, fcntl, os, time
descriptor = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(600)
"""


def test_a_second_process_is_refused_until_the_first_has_died(make_settings: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(make_settings(), out)
    before = contents(out)
    command = [sys.executable, "-c", HOLD, str(out / run_folder.MARKER)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "locked\n"
            for options in ({"resume": True}, {"overwrite": True}):
                with pytest.raises(UserError, match="run is in use: another process trains in it") as error:
                    run(make_settings(), out, **options)
                assert "\n" not in str(error.value)
            assert contents(out) == before
        finally:
            os.kill(other.pid, signal.SIGKILL)
    run(make_settings(), out, resume=True)


def test_a_run_holds_the_lock_from_the_first_step_to_the_last(
    make_settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flock belongs to the open file: another `train` in this very process is another one too."""
    real, refused = Learner.step, []

    def step(self: Learner, number: int) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(Learner, "step", real)
            for options in ({"overwrite": True}, {"resume": True}):
                with pytest.raises(UserError, match="is in use") as error:
                    run(make_settings(), tmp_path / "run", **options)
                refused.append(str(error.value))
        return real(self, number)

    monkeypatch.setattr(Learner, "step", step)
    run(make_settings(), tmp_path / "run")
    assert len(refused) == 2 * 8
    monkeypatch.undo()
    run(make_settings(), tmp_path / "alone")
    assert curve(tmp_path / "run") == curve(tmp_path / "alone")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "3", '{"fp8": 3}', '{"fp8": {"memory": 3}}', '{"fp8": {"memory": {}}}']
)
def test_a_damaged_summary_is_named(make_settings: Any, tmp_path: Path, content: str) -> None:
    run(make_settings(), tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text(content)
    with pytest.raises(RunError, match=r"summary\.json .*delete it") as error:
        run(make_settings(), tmp_path / "run", resume=True)
    assert "\n" not in str(error.value)
    (tmp_path / "run" / "summary.json").unlink()
    run(make_settings(), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, {"x": 1}, -1, [1, 2, 3]])
def test_a_damaged_config_is_named(make_settings: Any, tmp_path: Path, value: Any) -> None:
    """Every setting in turn replaced: read as it was meant, or refused in one line."""
    run(make_settings(steps=1), tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    good = json.loads(path.read_text())
    for name in run_folder.read_settings(tmp_path / "run").to_dict():
        path.write_text(json.dumps({**good, name: value}))
        try:
            run_folder.read_settings(tmp_path / "run")
        except RunError as error:
            assert "config.json has changed" in str(error) and "\n" not in str(error), name
