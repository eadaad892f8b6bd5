"""What runs in FP8, what does not, and why: one entry per linear layer or matrix product."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from octavo.numerics import FP8ScalingManager
from octavo.support import emulation_on

FP8 = "fp8"


@dataclass
class Entry:
    """One layer or product. `reason` says why it is not in FP8; `where` is the line that calls it, if known."""

    name: str
    op: str
    precision: str
    reason: str = ""
    shapes: str = ""
    formats: str = ""
    where: str = ""
    calls: int = 0


@dataclass
class Report:
    """Prints as a table; `to_dict()` for files; iterates over its entries.

    `scaling` holds histories and statistics of what is in FP8; `emulate` is the configuration's.
    """

    title: str
    entries: list[Entry] = field(default_factory=list)
    scaling: FP8ScalingManager | None = None
    emulate: bool | None = None

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def in_fp8(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.precision == FP8]

    @property
    def not_in_fp8(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.precision != FP8]

    @property
    def scaling_manager(self) -> FP8ScalingManager | None:
        """Another name for `scaling`."""
        return self.scaling

    @property
    def emulation(self) -> str:
        """Whether FP8 is emulated where the model is now, and why; empty if it runs on tensor cores."""
        rows = self.scaling.rows if self.scaling is not None and self.in_fp8 else ()
        return emulation_on(rows[0].device, self.emulate) if rows else ""

    def summary(self) -> str:
        counts = f"{self.title}: {len(self.in_fp8)} of {len(self)} in FP8"
        return f"{counts}; {self.emulation}" if self.emulation else counts

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "emulation": self.emulation,
            "products": [asdict(entry) for entry in self.entries],
        }

    def table(self) -> Any:
        """A `rich` table, for a console that shows colours."""
        from rich.table import Table

        table = Table(title=self.summary(), title_justify="left")
        for heading in ("name", "precision", "shapes", "formats", "why not", "where"):
            table.add_column(heading, overflow="fold")
        for entry in self.entries:
            colour = "green" if entry.precision == FP8 else "yellow"
            precision = f"[{colour}]{entry.precision}[/{colour}]"
            table.add_row(entry.name, precision, entry.shapes, entry.formats, entry.reason, entry.where)
        return table

    def __str__(self) -> str:
        rows = [("name", "precision", "shapes", "formats", "why not")]
        rows += [(e.name, e.precision, e.shapes, e.formats, e.reason) for e in self.entries]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.summary(), *lines])
