"""Text that `parity.py` trains on: one file, built here, and copied to a GPU machine without a network.

    python benchmarks/corpus.py                # → build/corpus.npz.xz, about two minutes on two cores

Sources, with the files' names deciding what is text (no HTML, no scripts, no tables of contents):

    stdlib          Python's standard library, .py, tests left out
    gcide           dict-gcide, an English dictionary of 40 MB, of which `MAX_GCIDE` bytes are taken
    linux-doc       linux-doc-6.1, .rst, .txt, .yaml
    python-doc      python3.11-doc, .txt
    fortunes        fortunes, the quotations

The packages come from `apt-get download`, unpacked with `dpkg -x` below `--work`; no root needed. Then:

    read, .gz and .dz decompressed → a file over `PIECE` bytes cut at line ends into pieces that count as files
    → equal files dropped → shuffled with a seed → the first `HELD_OUT` bytes of files held out, the rest to train on
    → a byte-level BPE of `VOCABULARY` tokens learnt on the training files alone → each file as tokens, then token 0

Only tokens are stored. Byte-level BPE loses nothing, so the bytes (for BDH, which reads bytes) are the tokens'
spellings one after another; token 0, the end of a file, is spelt as a zero byte.
"""

import argparse
import gzip
import hashlib
import io
import json
import lzma
import random
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DEFAULT = Path("build/corpus.npz.xz")
PACKAGES = {
    "gcide": ("dict-gcide", ("usr/share/dictd",), (".dict",)),
    "linux-doc": ("linux-doc-6.1", ("usr/share/doc/linux-doc-6.1/Documentation",), (".rst", ".txt", ".yaml")),
    "python-doc": ("python3.11-doc", ("usr/share/doc/python3.11",), (".txt",)),
    "fortunes": ("fortunes", ("usr/share/games/fortunes",), ("",)),
}
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
MAX_GCIDE = 17_000_000
PIECE = 256_000
HELD_OUT = 6_000_000
VOCABULARY = 16_384
SEED = 0
# Tokens are pairs of bytes: telling LZMA so (pb, lp) makes the file 4 % smaller.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "pb": 1, "lp": 1, "lc": 3}]


@dataclass(frozen=True)
class Corpus:
    """Token ids to train on and held out, the spelling of every token, and the source of the text."""

    train: np.ndarray
    held_out: np.ndarray
    spellings: list[bytes]
    about: dict[str, Any]

    def as_bytes(self, part: np.ndarray) -> np.ndarray:
        """Return a part as the bytes its tokens spell, uint8."""
        return np.frombuffer(b"".join(map(self.spellings.__getitem__, part.tolist())), np.uint8)


def save_corpus(path: Path, corpus: Corpus) -> None:
    buffer = io.BytesIO()
    np.savez(
        buffer,
        train=corpus.train,
        held_out=corpus.held_out,
        letters=np.frombuffer(b"".join(corpus.spellings), np.uint8),
        lengths=np.array([len(spelling) for spelling in corpus.spellings], np.uint16),
        about=np.frombuffer(json.dumps(corpus.about).encode(), np.uint8),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(lzma.compress(buffer.getvalue(), filters=FILTERS))
    temporary.replace(path)


def load_corpus(path: Path) -> Corpus:
    if not path.exists():
        raise SystemExit(f"{path} is not there: build it with `python benchmarks/corpus.py`, and carry it along")
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as stored:
        letters, ends = stored["letters"].tobytes(), stored["lengths"].astype(int).cumsum()
        starts = [0, *ends[:-1]]
        spellings = [letters[a:b] for a, b in zip(starts, ends, strict=True)]
        about = json.loads(stored["about"].tobytes())
        return Corpus(stored["train"], stored["held_out"], spellings, about)


def byte_corpus(paths: list[Path]) -> Corpus:
    """Return a corpus whose tokens are bytes, the last third held out, for trying out the scripts."""
    text = np.frombuffer(b"\0".join(path.read_bytes() for path in paths), np.uint8).astype(np.uint16)
    split = len(text) * 2 // 3
    about = {"sources": {"files of this repository": {"files": len(paths), "bytes": len(text)}}}
    return Corpus(text[:split], text[split:], [bytes([i]) for i in range(256)], about)


def build(work: Path) -> Corpus:
    files, packages = collect(work)
    pieces = [(source, text) for text, source in {text: source for source, text in reversed(files)}.items()]
    random.Random(SEED).shuffle(pieces)
    pieces = limit(pieces, "gcide", MAX_GCIDE)
    sizes = np.cumsum([len(text.encode()) for _, text in pieces])
    split = int(np.searchsorted(sizes, HELD_OUT)) + 1
    held_out, train = pieces[:split], pieces[split:]
    tokenizer = learn_tokenizer([text for _, text in train])
    spellings = token_spellings(tokenizer)
    corpus = Corpus(encode(tokenizer, train), encode(tokenizer, held_out), spellings, {})
    for part, written in ((train, corpus.train), (held_out, corpus.held_out)):
        expected = b"".join(text.encode() + b"\0" for _, text in part)
        if corpus.as_bytes(written).tobytes() != expected:
            raise RuntimeError("the tokens do not spell the text they came from")
    corpus.about.update(
        seed=SEED,
        vocabulary=len(spellings),
        packages=packages,
        train=composition(train, len(corpus.train)),
        held_out=composition(held_out, len(corpus.held_out)),
    )
    return corpus


def composition(part: list[tuple[str, str]], tokens: int) -> dict[str, Any]:
    sizes: dict[str, dict[str, int]] = {}
    digest = hashlib.sha256()
    for source, text in part:
        entry = sizes.setdefault(source, {"files": 0, "bytes": 0})
        entry["files"] += 1
        entry["bytes"] += len(text.encode())
        digest.update(text.encode() + b"\0")
    total = sum(entry["bytes"] for entry in sizes.values())
    return {"bytes": total, "tokens": tokens, "sources": dict(sorted(sizes.items())), "sha256": digest.hexdigest()}


def limit(pieces: list[tuple[str, str]], source: str, most: int) -> list[tuple[str, str]]:
    """Return the pieces; from `source` only as many as fit into `most` bytes."""
    pieces, size = [], 0
    for piece in pieces:
        if piece[0] == source:
            size += len(piece[1].encode())
            if size > most:
                continue
        pieces.append(piece)
    return pieces


def collect(work: Path) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Return every piece of text as (source, text), in sorted order, and the packages' file names."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in sorted(stdlib.rglob("*.py")) if not SKIPPED_FOLDERS & set(p.relative_to(stdlib).parts)]
    pieces = [("stdlib", piece) for path in paths for piece in read_pieces(path)]
    packages = {"stdlib": f"Python {sysconfig.get_python_version()}"}
    for source, (package, folders, endings) in PACKAGES.items():
        root, packages[source] = unpack(package, work)
        for folder in folders:
            for path in sorted((root / folder).rglob("*")):
                name = path.name.removesuffix(".gz").removesuffix(".dz")
                if path.is_file() and not path.is_symlink() and Path(name).suffix in endings:
                    pieces += [(source, piece) for piece in read_pieces(path)]
    return pieces, packages


def unpack(package: str, work: Path) -> tuple[Path, str]:
    """Return the folder of an unpacked Debian package, downloaded first if needed, and its file name."""
    work.mkdir(parents=True, exist_ok=True)
    if not list(work.glob(f"{package}_*.deb")):
        subprocess.run(["apt-get", "download", package], cwd=work, check=True)
    deb = sorted(work.glob(f"{package}_*.deb"))[-1]
    root = work / package
    if not root.exists():
        subprocess.run(["dpkg", "-x", str(deb), str(root)], check=True)
    return root, deb.name


def read_pieces(path: Path) -> Iterator[str]:
    """Return the text of a file in pieces of about `PIECE` bytes cut at line ends, without those that are not UTF-8."""
    content = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        content = gzip.decompress(content)
    start = 0
    while start < len(content):
        end = content.find(b"\n", start + PIECE) + 1 or len(content)
        try:
            text = content[start:end].decode()
        except UnicodeDecodeError as error:
            print(f"left out: {path.name} from {start:,} to {end:,} ({error.reason})")
            text = ""
        if "\0" not in text and text.strip():
            yield text
        start = end


def learn_tokenizer(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_spellings(tokenizer: Any) -> list[bytes]:
    """Return the bytes of every token.

    Byte-level BPE writes bytes as printable letters: the printable ones of Latin-1 as themselves, the other 68 as the
    letters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokens = (tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size()))
    return [b"\0" if i == 0 else bytes(byte_of[letter] for letter in token) for i, token in enumerate(tokens)]


def encode(tokenizer: Any, part: list[tuple[str, str]]) -> np.ndarray:
    encoded = []
    for start in range(0, len(part), 256):  # in groups: a whole corpus of encodings takes gigabytes
        for encoding in tokenizer.encode_batch_fast([text for _, text in part[start : start + 256]]):
            encoded.append(np.array([*encoding.ids, 0], np.uint16))
    return np.concatenate(encoded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT)
    parser.add_argument("--work", type=Path, default=Path("/tmp/octavo-corpus"), help="where packages are unpacked")
    options = parser.parse_args()
    began = time.perf_counter()
    corpus = build(options.work)
    save_corpus(options.out, corpus)
    print(json.dumps(corpus.about, indent=2))
    size = options.out.stat().st_size
    print(f"{options.out}: {size / 2**20:.1f} MiB, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
