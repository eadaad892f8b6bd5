"""Rows of data from files, folders and datasets of the Hugging Face Hub.

    data.jsonl, data.json   one JSON object a line; or one list of them
    data.csv, data.tsv      the first line names the columns
    data.parquet            read by pyarrow
    notes.txt, notes.md     one row, `text`, however long: it is cut into pieces later, and nothing of it is lost
    folder                  all such files below it, in sorted order, hidden ones left out; or a dataset saved by
                            `datasets.Dataset.save_to_disk`
    name, name:subset       a dataset on the Hub, read by the `datasets` library

Every row knows where it comes from, so that an error can name the line.
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.training.errors import UserError

TEXTS = (".txt", ".md", ".rst", ".py")
SAVED = ("dataset_info.json", "dataset_dict.json")  # in a folder of datasets.Dataset.save_to_disk, or DatasetDict's
csv.field_size_limit(2**30)


@dataclass(frozen=True)
class Row:
    """One row: its columns, and where it is. `continuous`: plain text, to be cut into pieces."""

    values: Mapping[str, Any]
    where: str
    continuous: bool = False


@dataclass(frozen=True)
class Source:
    """All rows of a source, and a description of it."""

    rows: list[Row]
    description: str


def read_source(name: str, split: str = "train", option: str = "DATA") -> Source:
    """Read a file, a folder or a dataset. `option`: what the user calls it, for errors."""
    path = Path(name).expanduser()
    if path.is_dir():
        source = _saved(path, split, option) if any((path / name).exists() for name in SAVED) else _folder(path, option)
    elif path.is_file():
        source = Source(list(_read(path, option)), str(path))
    elif path.suffix in READERS or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise UserError(f"{option} {name}: there is no such file or folder")
    else:
        source = _from_hub(name, split, option)
    if not source.rows:
        raise UserError(f"{option} {source.description} is empty: it holds no example")
    return source


def _folder(folder: Path, option: str) -> Source:
    visible = [path for path in sorted(folder.rglob("*")) if path.is_file() and not _hidden(path.relative_to(folder))]
    paths = [path for path in visible if path.suffix in READERS]
    if not paths:
        raise UserError(f"{option} {folder}: no file in this folder ends in {', '.join(READERS)}; give one that does")
    left = len(visible) - len(paths)
    rows = [row for path in paths for row in _read(path, option)]
    return Source(rows, f"{folder}, {len(paths):,} files" + (f" ({left:,} of other kinds left out)" if left else ""))


def _read(path: Path, option: str) -> Iterator[Row]:
    reader = READERS.get(path.suffix)
    if reader is None:
        raise UserError(f"{option} {path}: a file that ends in {', '.join(READERS)} is needed, not in {path.suffix!r}")
    try:
        yield from reader(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{option} {path}: not text in UTF-8 ({error.reason} at byte {error.start:,})") from error
    except OSError as error:
        raise UserError(f"{option} {path} cannot be read: {error.strerror or error}") from error


def _json(path: Path) -> Iterator[Row]:
    if path.suffix == ".json" and (text := path.read_text("utf-8-sig")).lstrip().startswith("["):
        try:
            entries = json.loads(text)
        except ValueError as error:
            raise UserError(f"{path}: invalid JSON: {error}") from error
        yield from (_row(entry, f"{path}, entry {number:,}") for number, entry in enumerate(entries, 1))
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except UnicodeDecodeError as error:
                raise UserError(f"{path}:{number}: not text in UTF-8 ({error.reason})") from error
            except ValueError as error:
                raise UserError(f"{path}:{number}: invalid JSON: {error}; every line is to be one object") from error
            yield _row(entry, f"{path}:{number}")


def _row(entry: Any, where: str) -> Row:
    if not isinstance(entry, dict):
        raise UserError(f'{where}: a JSON object is needed, such as {{"text": …}}, not a {type(entry).__name__}')
    try:
        json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: {error.object[error.start]!r} is half of a character: write it as UTF-8") from None
    return Row(entry, where)


def _csv(path: Path) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        for values in reader:
            where = f"{path}:{reader.line_num}"
            if None in values or None in values.values():
                raise UserError(f"{where}: its number of cells is not that of the first line's columns")
            yield Row(values, where)


def _parquet(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        number = 0
        for batch in ParquetFile(path).iter_batches():
            for values in batch.to_pylist():
                number += 1
                yield Row(values, f"{path}, row {number:,}")
    except ArrowException as error:
        raise UserError(f"{path}: not a Parquet file that can be read: {str(error).splitlines()[0]}") from error


def _text(path: Path) -> Iterator[Row]:
    text = path.read_text("utf-8-sig")
    if text.strip():
        yield Row({"text": text}, str(path), continuous=True)


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    **dict.fromkeys(TEXTS, _text),
}


def _saved(folder: Path, split: str, option: str) -> Source:
    from datasets import DatasetDict, load_from_disk

    dataset = load_from_disk(str(folder))
    if isinstance(dataset, DatasetDict):
        if split not in dataset:
            raise UserError(f"{option} {folder} has no split {split!r}: --split may be {', '.join(dataset)}")
        dataset = dataset[split]
    return _dataset(dataset, str(folder))


def _from_hub(name: str, split: str, option: str) -> Source:
    from datasets import load_dataset

    dataset, _, subset = name.partition(":")
    try:
        loaded = load_dataset(dataset, subset or None, split=split)
    except (OSError, ValueError, RuntimeError) as error:  # without a network: ConnectionError
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{option} {name}: no file or folder here, and no dataset on the Hub that can be had: {why}"
        ) from error
    return _dataset(loaded, f"{name}, split {split}")


def _dataset(dataset: Any, description: str) -> Source:
    rows = [Row(values, f"{description}, row {number:,}") for number, values in enumerate(dataset, 1)]
    return Source(rows, description)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
