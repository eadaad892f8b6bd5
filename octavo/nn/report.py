"""Reports of what runs in FP8, what does not, and why: one entry per linear layer or matrix product."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from octavo.numerics import FP8ScalingManager
from octavo.support import emulation_on

FP8 = "fp8"
REPORT = "octavo_report"  # the attribute of a model that has its report
_FUSED = "octavo_fused"
NOTEWORTHY = 0.1  # of the linear weights, not in FP8: then the summary says so


@dataclass
class Entry:
    """One layer or product. `reason` says why it is not in FP8; `where` is the line that calls it, if known.

    `weight` is what its weight is held in, `numel` and `bytes` how large that is; of a layer, not of a product.
    """

    name: str
    op: str
    precision: str
    reason: str = ""
    shapes: str = ""
    formats: str = ""
    where: str = ""
    calls: int = 0
    weight: str = ""
    numel: int = 0
    bytes: int = 0

    @property
    def is_left_out(self) -> bool:
        """Whether neither the product nor the weight is in FP8."""
        return self.precision != FP8 and not self.weight.startswith("float8")


@dataclass
class Report:
    """A report that prints as a table, iterates over its entries, and goes to files by `to_dict()`.

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
        states = self.scaling.states if self.scaling is not None and self.in_fp8 else ()
        return emulation_on(states[0].device, self.emulate) if states else ""

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


@dataclass
class ConversionReport(Report):
    """Every layer that multiplies: in FP8 or not, and why. `scaling` holds histories and statistics of the FP8 ones.

    For a model that was converted, or loaded with its weights frozen in FP8. `fused` names the fused pieces in use, and
    those that are not with the reason. `hooked` is looked up when it is asked for: modules that have hooks by then, for
    which fused pieces are not used. So are `padded` and `unfused`: how many calls have computed padding, and how many
    with labels all logits, by reason.
    """

    fused: list[str] = field(default_factory=list)
    model: weakref.ref[nn.Module] | None = field(default=None, repr=False, compare=False)
    find_hooked: Callable[[nn.Module], list[str]] | None = field(default=None, repr=False, compare=False)
    find_padded: Callable[[nn.Module], Mapping[str, int]] | None = field(default=None, repr=False, compare=False)
    find_unfused: Callable[[nn.Module], Mapping[str, int]] | None = field(default=None, repr=False, compare=False)

    def attach(
        self,
        model: nn.Module,
        find_hooked: Callable[[nn.Module], list[str]],
        find_padded: Callable[[nn.Module], Mapping[str, int]],
        find_unfused: Callable[[nn.Module], Mapping[str, int]],
    ) -> None:
        """Make this report the model's `octavo_report`, and look into it by these functions.

        `model.octavo_fused` is this report's `fused`.
        """
        self.model = weakref.ref(model)
        self.find_hooked, self.find_padded, self.find_unfused = find_hooked, find_padded, find_unfused
        model.__dict__[REPORT], model.__dict__[_FUSED] = self, self.fused

    @staticmethod
    def detach_from(model: nn.Module) -> None:
        """Undo `attach`."""
        for name in (REPORT, _FUSED):
            model.__dict__.pop(name, None)

    @property
    def hooked(self) -> list[str]:
        model = None if self.model is None else self.model()
        return [] if model is None or self.find_hooked is None else self.find_hooked(model)

    @property
    def padded(self) -> dict[str, int]:
        model = None if self.model is None else self.model()
        return {} if model is None or self.find_padded is None else dict(self.find_padded(model))

    @property
    def unfused(self) -> dict[str, int]:
        model = None if self.model is None else self.model()
        return {} if model is None or self.find_unfused is None else dict(self.find_unfused(model))

    def _fused(self) -> list[str]:
        names = self.hooked
        fused = [line for line in self.fused if line != self.emulation]  # which is said already
        fused += [f"padding computed in {count} calls: {reason}" for reason, count in self.padded.items()]
        fused += [f"loss from all logits in {count} calls: {reason}" for reason, count in self.unfused.items()]
        if not names:
            return fused
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        head = ", and the head is in high precision" if any(name.endswith("lm_head") for name in names) else ""
        return [*fused, f"but {len(names)} with hooks called one by one, not fused: {shown}{head}"]

    def __getstate__(self) -> dict[str, Any]:
        """Leave the model out: a copy, or a pickled report, belongs to none."""
        return {**self.__dict__, "model": None}

    @property
    def bytes_in_fp8(self) -> int:
        """Bytes of weights that are held in FP8, without their scales. Trained weights are not, as a rule."""
        return sum(entry.bytes for entry in self.entries if entry.weight.startswith("float8"))

    @property
    def bytes_not_in_fp8(self) -> int:
        """Bytes of the other weights that multiply. Embeddings and norms do not, and do not count."""
        return sum(entry.bytes for entry in self.entries if not entry.weight.startswith("float8"))

    @property
    def share_left_out(self) -> float:
        """The share of the linear weights of which neither product nor weight is in FP8. Adapters do not count."""
        counted = [entry for entry in self.entries if not is_adapter(entry.name)]
        return sum(e.numel for e in counted if e.is_left_out) / max(1, sum(e.numel for e in counted))

    def left_out(self) -> str:
        """A sentence on what is not in FP8, and why, if it is more than a tenth of the linear weights; else empty."""
        if self.share_left_out <= NOTEWORTHY:
            return ""
        sizes: dict[tuple[str, str], int] = {}
        for entry in self.entries:
            if entry.is_left_out and entry.numel and not is_adapter(entry.name):
                key = (entry.name.rpartition(".")[2], entry.reason)
                sizes[key] = sizes.get(key, 0) + entry.numel
        largest = sorted(sizes, key=lambda key: -sizes[key])[:3]
        names = ", ".join(f"{name} ({reason})" if reason else name for name, reason in largest)
        more = f" and {len(sizes) - 3} more" if len(sizes) > 3 else ""
        return f"{self.share_left_out:.0%} of the linear weights are not in FP8: {names}{more}"

    def summary(self) -> str:
        lines = [super().summary()]
        if self.bytes_in_fp8:
            lines.append(f"weights: {_size(self.bytes_in_fp8)} in FP8, {_size(self.bytes_not_in_fp8)} not")
        return "; ".join([*lines, *filter(None, [self.left_out()]), *self._fused()])

    def to_dict(self) -> dict[str, Any]:
        sizes = {"bytes_in_fp8": self.bytes_in_fp8, "bytes_not_in_fp8": self.bytes_not_in_fp8}
        return {**super().to_dict(), "fused": self._fused(), **sizes}

    def note_weights(self, modules: Mapping[str, nn.Module]) -> None:
        """Add to each entry what its weight is held in. One that several share counts once."""
        seen: set[int] = set()
        for entry in self.entries:
            weight = _weight_of(modules, entry)
            if weight is not None and id(weight) not in seen:
                seen.add(id(weight))
                entry.weight, entry.numel = entry.weight or dtype_name(weight), weight.numel()
                entry.bytes = weight.nbytes


def is_adapter(name: str) -> bool:
    """Whether a module of this name is one of the small matrices that PEFT puts beside a linear."""
    return any(part.startswith("lora_") for part in name.split("."))


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _weight_of(modules: Mapping[str, nn.Module], entry: Entry) -> Tensor | None:
    """The weight of a linear, or the raw parameter itself; None for modules without one, and for embeddings."""
    module: Any = modules.get(entry.name)
    if module is None:
        owner, _, name = entry.name.rpartition(".")
        parent = modules.get(owner)
        return None if parent is None or isinstance(parent, nn.Embedding) else getattr(parent, name, None)
    weight = getattr(module, "weight", None)
    return weight if isinstance(module, nn.Linear) and isinstance(weight, Tensor) else None


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
