"""Units: tensors that are gathered and reduced together. The embedding, each layer and the head are one each.

FSDP2 as `fully_shard(layer)` for each layer, `fully_shard(lm_head)` and `fully_shard(model)` make it: the root keeps
the embedding and the last norm, and is gathered once; the others are gathered for forward and again for backward. A
head that is tied to the embedding belongs to the root. ZeRO-3 gathers every unit twice.

FSDP2 splits each tensor by rows and pads the parts to equal heights, so of `rows` every rank has ⌈rows / N⌉: an adapter
of 32 rows takes 512 on 512 ranks. FSDP2 and ZeRO-3 are counted alike here, though DeepSpeed pads by elements.
"""

from dataclasses import dataclass

from octavo.numerics.quantize import BLOCK
from octavo.tools.plan import persistent
from octavo.tools.plan.layer import BF16, FP32, Sizes
from octavo.tools.plan.scale.ways import Way
from octavo.tools.shapes import MEMBERS, TARGETS, Case


@dataclass(frozen=True)
class Part:
    """One tensor. `size`: bytes of an element as it is gathered; `is_trained`: it has a gradient."""

    rows: int
    columns: int
    size: int
    is_trained: bool

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def on_rank(self, gpus: int) -> int:
        """Return the elements of a rank, with those that pad it."""
        return -(-self.rows // gpus) * self.columns


@dataclass(frozen=True)
class Unit:
    """Tensors that are gathered at once. `stays`: they are gathered for forward and kept until backward."""

    name: str
    parts: tuple[Part, ...]
    stays: bool = False

    @property
    def gathered(self) -> int:
        """Bytes of the unit when it is gathered."""
        return sum(part.elements * part.size for part in self.parts)

    @property
    def trained(self) -> int:
        """Number of elements that have gradients."""
        return sum(part.elements for part in self.parts if part.is_trained)

    def gathered_from_rank(self, gpus: int) -> int:
        """Bytes that a rank has to give to each other one."""
        return sum(part.on_rank(gpus) * part.size for part in self.parts)

    def reduced_to_rank(self, gpus: int) -> int:
        """Elements of gradients that a rank gets from each other one."""
        return sum(part.on_rank(gpus) for part in self.parts if part.is_trained)


def units_of(case: Case, way: Way, strategy: str) -> list[Unit]:
    """Return embedding, layers and head in the order of forward."""
    s = Sizes.of(case)
    trained = not case.frozen
    stays = strategy == "fsdp2"
    vocabulary = Part(case.vocabulary, s.k, BF16, trained)
    norm = Part(s.k, 1, BF16, trained)
    layer = Unit("layer", tuple(_layer(case, way)))
    units = [Unit("embedding", (vocabulary, norm), stays), *[layer] * case.layers]
    return units if persistent.is_tied(case) else [*units, Unit("head", (vocabulary,))]


def _layer(case: Case, way: Way) -> list[Part]:
    s = Sizes.of(case)
    option, trained = way.option, not case.frozen
    matrices = persistent.layer_matrices(case)
    in_fp8 = way.fp8_gather or (case.frozen and option.code == "fp8")
    parts = [Part(n, k, 1 if in_fp8 else BF16, trained) for n, k in matrices]
    if case.frozen and option.code == "fp8":
        block = option.recipe == "block"
        parts += [
            Part(-(-n // BLOCK), -(-k // BLOCK), FP32, False) if block else Part(n, 1, FP32, False) for n, k in matrices
        ]
    norms = [s.k] * 2 + ([case.head_dim] * 2 if s.has_qk_norm else [])
    parts += [Part(n, 1, BF16, trained) for n in norms]
    return parts + _adapters(case)


def _adapters(case: Case) -> list[Part]:
    """A [R, K] and B [N, R] of each target, gathered in BF16 by the policy, whatever they are stored in."""
    if not case.rank:
        return []
    names = [member for members in MEMBERS.values() for member in members]
    adapted = {member for target in TARGETS[case.targets] for member in MEMBERS[target]}
    shapes = [shape for name, shape in zip(names, persistent.layer_matrices(case), strict=True) if name in adapted]
    return [part for n, k in shapes for part in (Part(case.rank, k, BF16, True), Part(n, case.rank, BF16, True))]
