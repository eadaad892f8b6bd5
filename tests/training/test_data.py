"""Data: where bytes come from, how they are split, and batches that depend on the seed and the step alone."""

from pathlib import Path

import pytest
import torch

from octavo.training.data import ByteData, find_files, get_batch, get_evaluation_batch, load_data
from octavo.training.errors import UserError

TEXT = bytes(range(200)) * 5


def make_folder(path: Path) -> Path:
    (path / "inner").mkdir()
    (path / ".git").mkdir()
    (path / "b.txt").write_bytes(b"bbb" * 100)
    (path / "a.txt").write_bytes(b"aaa" * 100)
    (path / "inner" / "c.py").write_bytes(b"ccc" * 100)
    (path / ".git" / "hidden.txt").write_bytes(b"ddd" * 100)
    return path


def everything(data: ByteData) -> bytes:
    return bytes(torch.cat((data.train, data.held_out)).tolist())


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "text.bin"
    path.write_bytes(TEXT)
    data = load_data(str(path), sequence=16, held_out=0.1)
    assert everything(data) == TEXT
    assert len(data.held_out) == 100 and bytes(data.held_out.tolist()) == TEXT[-100:]
    assert str(data) == f"0.0 MB in 1 file from {path}"


def test_a_folder_is_read_in_sorted_order_without_hidden_files(tmp_path: Path) -> None:
    data = load_data(str(make_folder(tmp_path)), sequence=16)
    assert everything(data) == b"a" * 300 + b"b" * 300 + b"c" * 300
    assert data.files == 3


@pytest.mark.parametrize("absolute", [True, False])
def test_a_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absolute: bool) -> None:
    make_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    root = f"{tmp_path}/" if absolute else ""
    assert everything(load_data(f"{root}*.txt", sequence=8)) == b"a" * 300 + b"b" * 300
    assert everything(load_data(f"{root}**/*.py", sequence=8)) == b"c" * 300


def test_binary_files_in_a_folder_are_left_out_and_said_to_be(tmp_path: Path) -> None:
    make_folder(tmp_path)
    text = everything(load_data(str(tmp_path), sequence=16))
    (tmp_path / "inner" / "a.png").write_bytes(b"\x89PNG" + b"x" * 10_000 + b"\0")
    (tmp_path / "weights.bin").write_bytes(bytes(1000))
    for source in (str(tmp_path), f"{tmp_path}/**/*.*"):
        data = load_data(source, sequence=16)
        assert data.files == 3 + (source[-1] == "*") and len(data.binary) == 2
        assert str(data).endswith(f"; left out: 2 binary, such as {tmp_path}/inner/a.png")
    assert everything(load_data(str(tmp_path), sequence=16)) == text
    assert load_data(str(tmp_path / "weights.bin"), sequence=16).files == 1  # named itself
    with pytest.raises(UserError, match=r"holds no text: every file is binary, such as .*a\.png"):
        load_data(f"{tmp_path}/inner/*.png", sequence=16)


def test_a_name_with_brackets_is_a_file_if_it_exists(tmp_path: Path) -> None:
    path = tmp_path / "text[1].txt"
    path.write_bytes(TEXT)
    assert everything(load_data(str(path), sequence=8)) == TEXT


def test_the_default_is_the_standard_library_without_its_tests() -> None:
    name, paths = find_files(None)
    assert name == "the Python standard library"
    assert len(paths) > 300 and paths == sorted(paths)
    assert {"argparse.py", "decoder.py"} <= {path.name for path in paths}
    assert not any(part in ("test", "tests", "site-packages") for path in paths for part in path.parts[-3:-1])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.txt", r"missing\.txt does not exist"),
        ("*.nothing", "matches no file"),
        ("empty.txt", "is empty"),
        ("folder", "holds no files"),
        ("short.txt", "needs 17"),
    ],
)
def test_unusable_data_is_one_clear_line(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "short.txt").write_bytes(b"x" * 200)
    with pytest.raises(UserError, match=message) as error:
        load_data(str(tmp_path / name), sequence=16)
    assert "\n" not in str(error.value) and error.value.exit_code == 2


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.txt"
    path.write_bytes(TEXT)

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=r"secret\.txt cannot be read: Permission denied"):
        load_data(str(path), sequence=8)


def batch_of(
    part: torch.Tensor, seed: int = 0, step: int = 1, micro_batch: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    return get_batch(part, seed=seed, step=step, micro_batch=micro_batch, batch=4, sequence=16)


def test_a_batch_is_a_function_of_seed_step_and_micro_batch() -> None:
    part = torch.randint(256, (5000,), dtype=torch.uint8)
    first = batch_of(part)[0]
    torch.manual_seed(123)
    assert torch.equal(first, batch_of(part)[0])
    others = [batch_of(part, seed=1)[0], batch_of(part, step=2)[0], batch_of(part, micro_batch=1)[0]]
    others += [batch_of(part, seed=1, step=0)[0]]
    assert not any(torch.equal(first, other) for other in others)


def test_targets_are_the_next_bytes_and_every_offset_can_come() -> None:
    part = torch.arange(20, dtype=torch.uint8)
    seen = set()
    for step in range(60):
        tokens, targets = batch_of(part, step=step)
        assert tokens.dtype == torch.int64 and tokens.shape == targets.shape == (4, 16)
        assert torch.equal(tokens + 1, targets)
        seen |= set(tokens[:, 0].tolist())
    assert seen == {0, 1, 2, 3}


def test_evaluation_covers_the_part_from_end_to_end() -> None:
    part = torch.arange(250, dtype=torch.uint8)
    batches = [get_evaluation_batch(part, index=i, count=3, batch=2, sequence=10) for i in range(3)]
    starts = torch.cat([tokens[:, 0] for tokens, _ in batches]).tolist()
    assert starts == [0, 47, 95, 143, 191, 239]
    assert batches[-1][1][-1, -1] == 249
    only = torch.arange(11, dtype=torch.uint8)
    assert get_evaluation_batch(only, index=0, count=1, batch=1, sequence=10)[1][0, -1] == 10
