"""Memory at the moments of a step, and the peak, which is the largest of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.tools.plan.options import Option

GIB = 2**30
KINDS = ("weights", "gradients", "states", "activations", "buffers")
# cuBLAS takes 32 MiB on Hopper for each of the two threads, forward's and backward's; measured steps take 2 MiB more
# for tensors not counted here: positions, labels, scaling histories.
WORKSPACE = 66 * 2**20


@dataclass(frozen=True)
class Moment:
    """Bytes by kind at one moment of a step."""

    name: str
    weights: int
    gradients: int
    states: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(getattr(self, kind) for kind in KINDS)

    def to_dict(self) -> dict[str, object]:
        return {"name": self.name, **{kind: getattr(self, kind) for kind in KINDS}, "total": self.total}


@dataclass(frozen=True)
class Memory:
    """Memory that a step of an option takes."""

    option: Option
    moments: tuple[Moment, ...]
    saved: Mapping[str, int] = field(repr=False)  # bytes that a layer saves, by tensor
    host: int = 0  # bytes of host memory

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def peak_gib(self) -> float:
        return self.peak.total / GIB

    @property
    def host_gib(self) -> float:
        return self.host / GIB
