"""Training data: plain bytes, and batches that depend only on the seed and the step.

A source is a file, a folder (every file below it, hidden ones left out), a glob pattern, or nothing: the source code of
Python's own standard library, which is real text and on every machine. Files are read in sorted order and joined. The
last `held_out` share of the joined bytes is never trained on, so with many files whole files are unseen, not the tails
of seen ones. Below a folder, and among what a pattern matches, a file with a zero byte is binary (an image, an archive,
weights): it is left out, and said to be. A file that is named itself is read whatever it holds.

A batch is a pure function of (seed, step, micro-batch): sequences start at random offsets drawn from a generator seeded
by those three numbers. There is no iterator whose position would have to be saved, so a resumed run reads exactly the
batches that the uninterrupted one would have. Ranks share the sequences of a step in their order, so that a step is the
same on any number of ranks.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo.training.errors import UserError

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
GLOB_CHARACTERS = set("*?[")


@dataclass(frozen=True)
class ByteData:
    """Bytes to train on and bytes held out (uint8, on the CPU), and their source."""

    train: Tensor
    held_out: Tensor
    source: str
    files: int
    digest: str
    binary: tuple[Path, ...] = ()  # left out

    @property
    def size(self) -> int:
        return len(self.train) + len(self.held_out)

    def __str__(self) -> str:
        text = f"{self.size / 1e6:.1f} MB in {self.files:,} file{'s' if self.files != 1 else ''} from {self.source}"
        if not self.binary:
            return text
        return f"{text}; left out: {len(self.binary):,} binary, such as {self.binary[0]}"


def load_data(source: str | None, *, sequence: int, held_out: float = 0.05) -> ByteData:
    """Read `source` (None: the standard library) and split it; each part must hold at least one sequence."""
    name, paths = find_files(source)
    contents = {path: _read(path) for path in paths}
    binary: tuple[Path, ...] = ()
    if source is not None and paths != [Path(source)]:
        binary = tuple(path for path, content in contents.items() if b"\0" in content)
    if len(binary) == len(paths):
        raise UserError(
            f"data {name} holds no text: every file is binary, such as {binary[0]}; name one to train on it"
        )
    for path in binary:
        del contents[path]
    content = b"".join(contents.values())
    if not content:
        raise UserError(f"data {name} is empty: give --data a file, folder or pattern with text in it")
    split = len(content) - round(len(content) * held_out)
    shortest = min(split, len(content) - split)
    if shortest < sequence + 1:
        raise UserError(
            f"data {name} is too short: {len(content):,} bytes leave {shortest:,} in the smaller part, and a sequence "
            f"needs {sequence + 1:,} (--seq {sequence} plus one); give more data or a smaller --seq"
        )
    everything = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    digest = hashlib.sha256(content).hexdigest()
    return ByteData(everything[:split], everything[split:], name, len(paths) - len(binary), digest, binary)


def find_files(source: str | None) -> tuple[str, list[Path]]:
    """Return a name for the source, and its files in sorted order."""
    if source is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        # The tests are two thirds of it (19 of 31 MB), much of that long tables: not the Python one wants to imitate.
        paths = [path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)]
        if not paths:
            raise UserError(f"no Python source in {root}: this Python has no standard library in text; give --data")
        return "the Python standard library", sorted(paths)

    path = Path(source)
    if path.is_dir():
        paths = [p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path))]
        if not paths:
            raise UserError(f"data folder {source} holds no files: give --data a file, folder or pattern with text")
        return str(source), sorted(paths)
    if path.exists():
        return str(source), [path]
    if GLOB_CHARACTERS & set(source):
        paths = [p for p in _glob(path) if p.is_file()]
        if not paths:
            raise UserError(f"data pattern {source!r} matches no file: check it, and quote it against the shell")
        return str(source), sorted(paths)
    raise UserError(f"data {source} does not exist: give --data a file, a folder or a pattern such as 'texts/**/*.txt'")


def get_batch(
    tokens: Tensor, *, seed: int, step: int, micro_batch: int, batch: int, sequence: int
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, [batch, sequence] each, int64; targets are the inputs shifted by one byte."""
    # A hash, because neighbouring seeds must not give overlapping streams (seed 0 step 1 against seed 1 step 0).
    key = hashlib.sha256(f"{seed} {step} {micro_batch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little", signed=True))
    starts = torch.randint(len(tokens) - sequence, (batch, 1), generator=generator)
    window = tokens[starts + torch.arange(sequence + 1)].long()
    return window[:, :-1], window[:, 1:]


def get_share(
    tokens: Tensor, *, seed: int, step: int, batch: int, micro_batches: int, sequence: int, rank: int, ranks: int
) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of one rank: its part of the sequences of all micro-batches of a step, in order."""
    count = batch * micro_batches // ranks
    first, last = rank * count, (rank + 1) * count
    inputs, targets = [], []
    for i in range(first // batch, -(-last // batch)):  # the micro-batches that the share lies in
        x, y = get_batch(tokens, seed=seed, step=step, micro_batch=i, batch=batch, sequence=sequence)
        mine = slice(max(first - i * batch, 0), last - i * batch)
        inputs.append(x[mine])
        targets.append(y[mine])
    return torch.cat(inputs), torch.cat(targets)


def get_evaluation_batch(tokens: Tensor, *, index: int, count: int, batch: int, sequence: int) -> tuple[Tensor, Tensor]:
    """Return batch `index` of `count`: sequences spread evenly over the tokens, the same ones in every run."""
    order = torch.arange(index * batch, (index + 1) * batch)[:, None]
    starts = order * (len(tokens) - sequence - 1) // max(count * batch - 1, 1)
    window = tokens[starts + torch.arange(sequence + 1)].long()
    return window[:, :-1], window[:, 1:]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"data file {path} cannot be read: {error.strerror}") from error


def _glob(pattern: Path) -> list[Path]:
    """Return the paths that match a pattern, absolute or not; `Path.glob` needs the fixed part separately."""
    first_glob = next(i for i, part in enumerate(pattern.parts) if GLOB_CHARACTERS & set(part))
    return list(Path(*pattern.parts[:first_glob]).glob("/".join(pattern.parts[first_glob:])))


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
