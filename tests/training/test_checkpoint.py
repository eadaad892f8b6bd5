"""Checkpoints: complete or not there, checked when read, and never quietly replaced by an older one."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.training import checkpoint
from octavo.training.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from octavo.training.errors import RunError

CPU = torch.device("cpu")


def save(folder: Path, step: int) -> Path:
    model = {"weight": torch.full((3, 5), float(step))}
    return save_checkpoint(
        folder, step, model, {"step": step, "nested": {"values": [torch.arange(step), "text", None]}}
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    model, state = load_checkpoint(save(tmp_path, 7), CPU)
    assert torch.equal(model["weight"], torch.full((3, 5), 7.0))
    assert state["step"] == 7 and torch.equal(state["nested"]["values"][0], torch.arange(7))


def test_the_newest_two_are_kept_and_found_in_order(tmp_path: Path) -> None:
    for step in (5, 999_999, 1_000_000):
        save(tmp_path, step)
    assert names(tmp_path) == ["checkpoint-1000000", "checkpoint-999999"]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-999999", "checkpoint-1000000"]


def test_saving_the_same_step_again_changes_nothing(tmp_path: Path) -> None:
    first = save(tmp_path, 3)
    written = (first / "manifest.json").stat().st_mtime_ns
    assert save(tmp_path, 3) == first and (first / "manifest.json").stat().st_mtime_ns == written


class Killed(BaseException):
    """Stands for kill -9: nothing in the library handles it."""


@pytest.mark.parametrize("survived", range(12))
def test_a_kill_at_any_point_leaves_a_checkpoint_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    """Every call that touches the disk is a point where the process may end; let `survived` of them through."""
    save(tmp_path, 1)
    save(tmp_path, 2)
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
        patch.setattr(checkpoint, "write_durable", deadly(checkpoint.write_durable))
        patch.setattr(checkpoint, "sync_folder", deadly(checkpoint.sync_folder))
        patch.setattr(Path, "rename", deadly(Path.rename))
        patch.setattr(Path, "unlink", deadly(Path.unlink))
        patch.setattr("shutil.rmtree", deadly(checkpoint.shutil.rmtree))
        try:
            save(tmp_path, 3)
            finished = True
        except Killed:
            finished = False

    newest = list_checkpoints(tmp_path)[-1]
    model, state = load_checkpoint(newest, CPU)
    assert state["step"] in ((3,) if finished else (2, 3)) and model["weight"][0, 0] == state["step"]
    save(tmp_path, 4)
    assert not any(name.endswith(".tmp") for name in names(tmp_path))
    assert load_checkpoint(list_checkpoints(tmp_path)[-1], CPU)[1]["step"] == 4


@pytest.mark.parametrize("failing", ["model.safetensors", "state.pt", "manifest.json"])
def test_a_full_disk_is_one_clear_line_and_spares_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    save(tmp_path, 1)
    real = checkpoint.write_durable

    def write(path: Path, content: bytes) -> None:
        if path.name == failing:
            path.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content)

    monkeypatch.setattr(checkpoint, "write_durable", write)
    with pytest.raises(RunError, match=r"No space left on device; checkpoint-000001 is intact.*--resume") as error:
        save(tmp_path, 2)
    assert "\n" not in str(error.value) and error.value.exit_code == 1
    assert names(tmp_path) == ["checkpoint-000001"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "manifest.json"])
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink, lambda path: path.write_bytes(b"")])
def test_damage_is_found_and_named(tmp_path: Path, name: str, damage: Callable[[Path], object]) -> None:
    save(tmp_path, 1)
    damaged = save(tmp_path, 2)
    damage(damaged / name)
    with pytest.raises(RunError, match=r"checkpoint-000002 is damaged.*to resume from checkpoint-000001") as error:
        load_checkpoint(damaged, CPU)
    assert "\n" not in str(error.value)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {}, {"step": Path("an object of a class that is not a plain value")})
    with pytest.raises(RunError, match=r"damaged: state\.pt holds more than tensors and plain values") as error:
        load_checkpoint(path, CPU)
    assert "weights_only" not in str(error.value) and "trust" not in str(error.value)  # torch's advice is to run it
