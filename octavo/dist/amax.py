"""One scaling state for all ranks: what ranks have recorded is reduced once a step, before the histories roll.

Each rank quantises its own part of a batch, so its amax differ from those of other ranks, and so do the scales that
follow from them. That costs no accuracy (four simulated ranks, 60 steps, two seeds: the loss was 0.29 and 0.36 % above
that of FP32 with scales per rank, 0.32 and 0.57 % with shared ones), but there are then as many scaling states as
ranks: logs differ, and a run that resumes on another number of ranks has to merge them. With `share_amax`,

    (SCALE, AMAX, SEEN, NON_FINITE) of every operand  ←  the maximum over all ranks       (one all-reduce, FP32)

before each roll, so histories and scales are equal everywhere. A tensor that any rank has used rolls on all of them,
and nothing rolls anywhere where any rank met NaN or infinity. Statistics stay those of each rank.

The all-reduce belongs to `optimizer.step()`, so every rank has to take every step, with the same operands. Ranks
compare their names first. A rank that leaves out a step is missed within `LIMIT` seconds: the exchange has a process
group of its own with that limit, so that other collectives keep theirs. On the CPU the error is raised where it is
found; on a GPU NCCL's watchdog ends the process and names the group.
"""

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn

from octavo.numerics import FP8ScalingManager
from octavo.numerics.scaling import NON_FINITE

LIMIT = 30.0  # seconds that a rank waits for the others
GROUP = "octavo amax of all ranks"
_SHARED = NON_FINITE + 1  # the first slots of a state


class Source(Protocol):
    """Maxima that take part in the all-reduce beside the scaling states: those of sharded weights (`gather.py`)."""

    @property
    def label(self) -> str:
        """The name of what is measured: equal on all ranks."""

    def measure(self) -> Tensor:
        """Return the maxima of this rank: FP32, flat."""

    def take(self, maxima: Tensor) -> None:
        """Receive those of all ranks."""

    def settle(self) -> None:
        """Compute what follows, once histories have rolled."""


class AmaxExchange:
    """One all-reduce (MAX) a step for a manager: of its states, of other maxima, or of both.

    `group`: the ranks that take part; not given: all. A copy of it, as in a copied model, is None: copies are local.
    """

    def __init__(self, manager: FP8ScalingManager, group: Any = None) -> None:
        self.manager = manager
        self.shares_states = False
        self.sources: list[Source] = []
        self.ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
        # Not every rank calls this where the group has only some of them.
        self.group = distributed.new_group(
            self.ranks, timeout=timedelta(seconds=LIMIT), use_local_synchronization=group is not None, group_desc=GROUP
        )
        self._all = group  # without that limit: ranks may come late to their first forward
        self._agreed: tuple[int, ...] = ()  # how many operands and sources all ranks have agreed on

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_exchange, ()

    def reduce(self, states: Tensor) -> None:
        """Replace the first slots of all states by their maximum over all ranks, and tell the sources theirs."""
        self._require_agreement()
        parts = [source.measure() for source in self.sources]
        if self.shares_states:
            parts.append(states[:, :_SHARED].reshape(-1))
        maxima = torch.cat(parts)
        self._all_reduce(maxima)
        received = maxima.split([part.numel() for part in parts])
        for source, part in zip(self.sources, received, strict=False):
            source.take(part)
        if self.shares_states:
            states[:, :_SHARED] = received[-1].view(-1, _SHARED)

    def refresh(self) -> None:
        """Measure the sources again between steps: at the start, and after weights have been loaded."""
        parts = [source.measure() for source in self.sources]
        maxima = torch.cat(parts)
        distributed.all_reduce(maxima, distributed.ReduceOp.MAX, group=self._all)
        for source, part in zip(self.sources, maxima.split([part.numel() for part in parts]), strict=True):
            source.take(part)
        self.settle()

    def settle(self) -> None:
        """Have sources compute what follows from states that have rolled."""
        for source in self.sources:
            source.settle()

    def release(self) -> None:
        """Leave the manager if nothing takes part any more."""
        if not self.shares_states and not self.sources:
            self.manager.exchange = None

    def _all_reduce(self, tensor: Tensor) -> None:
        try:
            distributed.all_reduce(tensor, distributed.ReduceOp.MAX, group=self.group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {distributed.get_rank()}, step {self.manager.step_count}: the amax of all ranks could not be "
                f"reduced within {LIMIT:g} s. Every rank has to call optimizer.step() equally often, also where it has "
                "no gradients or a loss that is not finite; or each keeps scales of its own, without octavo.share_amax"
            ) from error

    def _require_agreement(self) -> None:
        """Raise on every rank if ranks would reduce different things; looks again only when something is new here."""
        counts = (len(self.manager.states) if self.shares_states else 0, *map(id, self.sources))
        if counts == self._agreed:
            return
        names = self.manager.names if self.shares_states else []
        labels = "\n".join([*(source.label for source in self.sources), *names])
        digest = int.from_bytes(hashlib.sha256(labels.encode()).digest()[:7], "big")
        device = self.manager.states[0].device
        numbers = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
        self._all_reduce(numbers)
        most, least = numbers.tolist()
        if most != -least:
            everyone: list[Any] = [None] * len(self.ranks)
            distributed.all_gather_object(everyone, labels.split("\n"), group=self.group)
            raise ValueError(_difference(self.ranks, everyone))
        self._agreed = counts
        if self.shares_states:
            for history in self.manager.histories():  # those of a run that was local until now differ
                self._all_reduce(history)


def _no_exchange() -> None:
    return None


def _difference(ranks: Sequence[int], labels: Sequence[list[str]]) -> str:
    """Say which ranks differ from the first, by how many names, and one of those."""
    parts = []
    for rank, mine in zip(ranks[1:], labels[1:], strict=True):
        lacks, has = sorted(set(labels[0]) - set(mine)), sorted(set(mine) - set(labels[0]))
        if lacks or has:
            parts.append(
                f"rank {rank} lacks {len(lacks)} of rank {ranks[0]} and has {len(has)} others ({(lacks + has)[0]})"
            )
    return (
        f"ranks multiply different things, so their amax cannot be shared: {'; '.join(parts) or 'in another order'}. "
        "Use octavo.share_amax(model, group=...) for ranks with equal models, or leave scales to each rank"
    )


class SharedAmax:
    """The result of `share_amax`. `remove()`: each rank has histories of its own again, beginning with the shared."""

    def __init__(self, exchanges: Sequence[AmaxExchange]) -> None:
        self.exchanges = list(exchanges)

    def remove(self) -> None:
        for exchange in self.exchanges:
            exchange.shares_states = False
            exchange.release()


def share_amax(model: Any, group: Any = None) -> SharedAmax:
    """Give all ranks one scaling state: one all-reduce (MAX) of all amax in each `optimizer.step()`.

    `model`: converted by `convert_to_fp8`, wrapped or sharded or not; or what `fp8_autocast` returned. `group`: a
    process group; not given: all ranks. Call it on every rank of the group, after `init_process_group`.
    """
    require_ranks("share_amax")
    exchanges = [exchange_of(manager, group) for manager in managers_of(model)]
    for exchange in exchanges:
        exchange.shares_states = True
    return SharedAmax(exchanges)


def is_shared(manager: FP8ScalingManager) -> bool:
    """Whether all ranks have the same scaling state: one of them is enough in a checkpoint."""
    return isinstance(manager.exchange, AmaxExchange) and manager.exchange.shares_states


def require_ranks(name: str) -> None:
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError(f"octavo.{name} without a process group: call torch.distributed.init_process_group() first")


def exchange_of(manager: FP8ScalingManager, group: Any = None) -> AmaxExchange:
    """Return the exchange of a manager, made where it has none. Its ranks must be those of the group."""
    present = manager.exchange
    if present is None:
        present = manager.exchange = AmaxExchange(manager, group)
    assert isinstance(present, AmaxExchange)
    ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
    if present.ranks != ranks:
        raise ValueError(
            f"group has ranks {ranks}: amax of this model are exchanged between ranks {present.ranks} already; use the "
            "same group for share_amax and fp8_all_gather"
        )
    return present


def managers_of(model: Any) -> list[FP8ScalingManager]:
    """Return the scaling managers of a model or of an autocast, each once, in the order of its modules."""
    owners = model.modules() if isinstance(model, nn.Module) else [model]
    found = (getattr(owner, "scaling", None) for owner in owners)
    managers = {id(manager): manager for manager in found if isinstance(manager, FP8ScalingManager)}
    if not managers:
        raise ValueError(f"{type(model).__name__} has no products in FP8: call octavo.convert_to_fp8(model) first")
    return list(managers.values())
