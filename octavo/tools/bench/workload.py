"""Batches as people train on them: of another length every step, padded by a collator, or packed into one row.

Lengths of documents come from the seed, for a `--seq` of 2,048 tokens; they grow and shrink with it:

    lognormal   median 400, most between 180 and 890, cut at 2,048: about the lengths of chats and instructions
    uniform     200 to 2,048
    full        2,048, every one of them: batches of one length, by the clock of a workload

    padded    [B, longest of the batch]   attention_mask; labels, -100 for padding
    packed    [1, B · seq]                position_ids that start anew with each document; labels, -100 where one begins

`trainer` and `sft` have the batches of `padded`; a collator pads them (`trainer_run.py`). Tokens are random.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from octavo.numerics.checks import check_choice
from octavo.numerics.cross_entropy import IGNORED
from octavo.tools.shapes import Case
from octavo.training.errors import UserError

FIXED = "fixed"
TRAINERS = ("trainer", "sft")  # of transformers, of TRL: they bring the optimiser
WORKLOADS = (FIXED, "padded", "packed", *TRAINERS)
LENGTHS = ("lognormal", "uniform", "full")
LONGEST, SHORTEST, MEDIAN = 2048, 200, 400
SPREAD = 0.8  # standard deviation of the logarithm of a length


@dataclass(frozen=True)
class Workload:
    """Batches of a run. `name`: one of `WORKLOADS` but fixed; `lengths`: one of `LENGTHS`."""

    name: str
    lengths: str = LENGTHS[0]

    def __post_init__(self) -> None:
        check_choice("workload", self.name, WORKLOADS[1:])
        check_choice("lengths", self.lengths, LENGTHS)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_workload(name: str, lengths: str | None, rounds: int | None) -> Workload | None:
    """Return the workload that a user's options ask for; None for batches of one length."""
    check_choice("workload", name, WORKLOADS)
    if name == FIXED:
        if lengths is not None:
            raise UserError(f"--lengths {lengths}: batches have one length; add --workload padded, or leave it out")
        return None
    if rounds is not None:
        raise UserError(f"--rounds {rounds}: a contender runs through the batches once; give --steps, or leave it out")
    return Workload(name, LENGTHS[0] if lengths is None else lengths)


class Batch(NamedTuple):
    """Inputs of a model, on the CPU, and the number of real tokens among them."""

    inputs: dict[str, Tensor]
    tokens: int

    @property
    def size(self) -> int:
        """The number of tokens, with padding."""
        return self.inputs["input_ids"].numel()

    def to(self, device: str) -> dict[str, Tensor]:
        """Return the inputs on the device, copied as the `DataLoader` of a trainer copies them."""
        return {name: x.to(device, non_blocking=True) for name, x in self.inputs.items()}

    def pinned(self) -> "Batch":
        return Batch({name: x.pin_memory() for name, x in self.inputs.items()}, self.tokens)


def make_batches(case: Case, workload: Workload, count: int) -> list[Batch]:
    """Return the first `count` batches of a case: the same ones for every contender."""
    if workload.name != "packed":
        rows = case.tokens // case.seq
        documents = make_documents(case, workload, count * rows)
        return [pad(documents[i : i + rows]) for i in range(0, len(documents), rows)]
    source = _Documents(case, workload)
    return [pack(source.fill_rows()) for _ in range(count)]


def make_documents(case: Case, workload: Workload, count: int) -> list[Tensor]:
    """Return the first `count` documents, one row of a padded batch each."""
    source = _Documents(case, workload)
    return [source.draw() for _ in range(count)]


def pad(documents: Sequence[Tensor]) -> Batch:
    """Pad each document on the right to the longest, as a collator does."""
    padded = [
        pad_sequence(list(parts), batch_first=True, padding_value=value)
        for parts, value in (
            (documents, 0),
            ([torch.ones_like(document) for document in documents], 0),
            (documents, IGNORED),
        )
    ]
    return Batch(dict(zip(("input_ids", "attention_mask", "labels"), padded, strict=True)), sum(map(len, documents)))


def pack(documents: Sequence[Tensor]) -> Batch:
    """Put documents one after another into one row, as TRL's packing does with `padding_free=True`."""
    ids = torch.cat(list(documents))[None]
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    inputs = {"input_ids": ids, "position_ids": positions, "labels": ids.where(positions > 0, IGNORED)}
    return Batch(inputs, ids.numel())


class _Documents:
    """Documents of a case, one after another."""

    def __init__(self, case: Case, workload: Workload) -> None:
        self._case, self._lengths = case, workload.lengths
        self._generator = torch.Generator().manual_seed(case.seed)

    def draw(self) -> Tensor:
        return torch.randint(self._case.vocabulary, (self._length(),), generator=self._generator)

    def _length(self) -> int:
        longest = self._case.seq
        if self._lengths == "full":
            return longest
        if self._lengths == "uniform":
            shortest = max(2, longest * SHORTEST // LONGEST)
            return int(torch.randint(min(shortest, longest), longest + 1, (), generator=self._generator))
        normal = torch.randn((), generator=self._generator).item()
        length = longest * MEDIAN / LONGEST * math.exp(SPREAD * normal)
        return min(longest, max(2, int(length)))

    def fill_rows(self) -> list[Tensor]:
        """Return documents that fill the rows of a batch. The last one of each row is cut where the row ends."""
        documents = []
        for _ in range(self._case.tokens // self._case.seq):
            left = self._case.seq
            while left:
                documents.append(self.draw()[:left])
                left -= len(documents[-1])
        return documents
