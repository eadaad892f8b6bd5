"""One scaling state for all ranks: what ranks have recorded is reduced once a step, before the histories roll.

Each rank quantises its own part of a batch, so its amax differ from those of other ranks, and so do the scales that
follow from them. That costs no accuracy (four simulated ranks, 60 steps, two seeds: the loss was 0.29 and 0.36 % above
that of FP32 with scales per rank, 0.32 and 0.57 % with shared ones), but there are then as many scaling states as
ranks: logs differ, and a run that resumes on another number of ranks has to merge them. With `share_amax`,

    (SCALE, AMAX, SEEN, NON_FINITE) of every operand  ←  the maximum over all ranks       (one all-reduce, FP32)

before each roll, so histories and scales are equal everywhere. A tensor that any rank has used rolls on all of them,
and nothing rolls anywhere where any rank met NaN or infinity. Statistics stay those of each rank.

The all-reduce belongs to `optimizer.step()`, so every rank has to take every step, with the same operands. What is
reduced begins with a header, whose maximum and minimum tell whether it is equal everywhere:

    (1 if names are new, three parts of a digest of all names)  and its negative

A rank that has multiplied something new cannot know whether the others have, too. So it first takes part in a reduction
of the size that all agreed on last. If all ranks have something new, they compare names and reduce again. If only some
have, these raise an error, and so do the others: on the CPU at once, on a GPU in their next step, before it reduces
anything. By then the header has reached the host, and nobody waits for it.

A rank that leaves out a step is missed within `LIMIT` seconds: the exchange has a process group of its own with that
limit, so that other collectives keep theirs. On the CPU the error is raised where it is found; on a GPU NCCL's watchdog
ends the process and names the group.
"""

import hashlib
import time
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn

from octavo.numerics import FP8ScalingManager
from octavo.numerics.scaling import NON_FINITE

LIMIT = 30.0  # seconds that a rank waits for the others
GROUP = "octavo amax of all ranks"
HEADER = 8  # numbers
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
        limited = distributed.new_group(
            self.ranks, timeout=timedelta(seconds=LIMIT), use_local_synchronization=group is not None, group_desc=GROUP
        )
        # Without that limit: ranks may come late to their first forward.
        unlimited = distributed.group.WORLD if group is None else group
        # Weakly: torch holds groups until `destroy_process_group()`, and their threads must not outlive that.
        self._groups = weakref.ref(limited), weakref.ref(unlimited)
        # All ranks have agreed on these: operands and sources here, the digest of their names, the number of maxima.
        self._agreed: tuple[Any, ...] = ()
        self._digest: tuple[int, ...] = ()
        self._size = 0
        self._header = torch.zeros(HEADER)
        self._reduced = _HeaderOnItsWay()

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_exchange, ()

    def reduce(self, states: Tensor) -> None:
        """Replace the first slots of all states by their maximum over all ranks, and tell the sources theirs."""
        self._require_old_names(" in the last step")
        self._require_agreement(states.device)
        parts = [source.measure() for source in self.sources]
        if self.shares_states:
            parts.append(states[:, :_SHARED].reshape(-1))
        maxima = torch.cat([self._header, *parts])
        self._all_reduce(maxima)
        self._reduced.send(maxima[:HEADER])
        if _is_read_at_once(maxima.device):
            self._require_old_names()
        self._size = maxima.numel() - HEADER
        received = maxima[HEADER:].split([part.numel() for part in parts])
        for source, part in zip(self.sources, received, strict=False):
            source.take(part)
        if self.shares_states:
            states[:, :_SHARED] = received[-1].view(-1, _SHARED)

    def refresh(self) -> None:
        """Measure the sources again between steps: at the start, and after weights have been loaded."""
        parts = [source.measure() for source in self.sources]
        maxima = torch.cat(parts)
        distributed.all_reduce(maxima, distributed.ReduceOp.MAX, group=self._group(limited=False))
        for source, part in zip(self.sources, maxima.split([part.numel() for part in parts]), strict=True):
            source.take(part)
        self.settle()

    def settle(self) -> None:
        """Have sources compute what follows from states that have rolled."""
        for source in self.sources:
            source.settle()

    def _group(self, *, limited: bool = True) -> Any:
        group = self._groups[0 if limited else 1]()
        if group is None:
            raise RuntimeError(
                "the process group of octavo.share_amax or octavo.fp8_all_gather was destroyed: call remove() on what "
                "they returned before destroy_process_group(), to go on without other ranks"
            )
        return group

    def release(self) -> None:
        """Leave the manager if nothing takes part any more."""
        if not self.shares_states and not self.sources:
            self.manager.exchange = None

    def _all_reduce(self, tensor: Tensor) -> None:
        group, start = self._group(), time.monotonic()
        try:
            distributed.all_reduce(tensor, distributed.ReduceOp.MAX, group=group)
        except RuntimeError as error:
            where = f"{self._where}: the amax of all ranks could not be reduced"
            if time.monotonic() - start < 0.9 * LIMIT:
                raise RuntimeError(f"{where}: another rank has ended, or raised an error, which it shows") from error
            raise RuntimeError(
                f"{where} within {LIMIT:g} s. Every rank has to call optimizer.step() equally often, also where it has "
                "no gradients or a loss that is not finite, and to multiply in FP8 before it does; or train without "
                f"{' and '.join(self._calls)}"
            ) from error

    @property
    def _where(self) -> str:
        return f"rank {distributed.get_rank()}, step {self.manager.step_count}"

    @property
    def _calls(self) -> list[str]:
        """Names of the calls that use this exchange."""
        calls = {"octavo.share_amax": self.shares_states, "octavo.fp8_all_gather": bool(self.sources)}
        return [name for name, is_used in calls.items() if is_used]

    @property
    def _advice(self) -> str:
        by_group = " and ".join(f"{call}(model, group=...)" for call in self._calls)
        return f"Use {by_group} for ranks that run the same products, or train without"

    def _require_agreement(self, device: torch.device) -> None:
        """Raise if ranks would reduce different things; looks again only when something is new here."""
        counts = (device, len(self.manager.states) if self.shares_states else 0, *map(id, self.sources))
        if counts == self._agreed:
            return
        names = self.manager.names if self.shares_states else []
        labels = [*(source.label for source in self.sources), *names]
        digest = _digest(labels)
        if digest != self._digest:
            header = _header(digest, is_new=True, device=device)
            numbers = torch.cat([header, header.new_zeros(self._size)])
            self._all_reduce(numbers)
            most, least = _most_and_least(numbers)
            if not least[0]:
                raise ValueError(
                    f"{self._where}: this rank has multiplied something new ({labels[-1]}) and others have not, so "
                    f"their amax cannot be shared. {self._advice}"
                )
            if most != least:
                everyone: list[Any] = [None] * len(self.ranks)
                distributed.all_gather_object(everyone, labels, group=self._group())
                raise ValueError(f"{_difference(self.ranks, everyone)}. {self._advice}")
            if self.shares_states:
                for history in self.manager.histories():  # those of a run that was local until now differ
                    self._all_reduce(history)
        self._agreed, self._digest = counts, digest
        self._header = _header(digest, is_new=False, device=device)

    def _require_old_names(self, when: str = "") -> None:
        header = self._reduced.receive()
        if header is not None and _most_and_least(header)[0][0]:
            raise ValueError(
                f"{self._where}: another rank has multiplied something new{when} and this one has not, so their amax "
                f"cannot be shared. {self._advice}"
            )


class _HeaderOnItsWay:
    """Copies a header to the host without waiting for the GPU."""

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._event: torch.cuda.Event | None = None  # after which it is there
        self._is_new = False

    def send(self, header: Tensor) -> None:
        if not header.is_cuda:
            self._copy = header.clone()
        elif torch.cuda.is_current_stream_capturing():
            return
        else:
            if self._copy is None or self._event is None:
                self._copy = torch.empty_like(header, device="cpu", pin_memory=True)
                self._event = torch.cuda.Event()
            self._copy.copy_(header, non_blocking=True)
            self._event.record(torch.cuda.current_stream(header.device))  # which need not be the current device
        self._is_new = True

    def receive(self) -> Tensor | None:
        """Return the header that was sent last, once; None while a CUDA graph is captured, which forbids waiting."""
        if not self._is_new or (self._event is not None and torch.cuda.is_current_stream_capturing()):
            return None
        if self._event is not None:
            self._event.synchronize()
        self._is_new = False
        return self._copy


def _is_read_at_once(device: torch.device) -> bool:
    return device.type == "cpu"


def _digest(labels: list[str]) -> tuple[int, ...]:
    """A digest in parts of 24 bits, which FP32 holds exactly."""
    digest = hashlib.sha256("\n".join(labels).encode()).digest()
    return tuple(int.from_bytes(digest[i : i + 3], "big") for i in (0, 3, 6))


def _header(digest: tuple[int, ...], *, is_new: bool, device: torch.device) -> Tensor:
    numbers = torch.tensor([is_new, *digest], dtype=torch.float32)
    return torch.cat([numbers, -numbers]).to(device)


def _most_and_least(reduced: Tensor) -> tuple[list[float], list[float]]:
    most, least = reduced[:HEADER].view(2, -1).tolist()
    return most, [-number for number in least]


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
    return f"ranks multiply different things, so their amax cannot be shared: {'; '.join(parts) or 'in another order'}"


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
    """Return the scaling managers of a model or of an autocast; raise if there are none."""
    managers = managers_in(model.modules() if isinstance(model, nn.Module) else [model])
    if not managers:
        raise ValueError(f"{type(model).__name__} has no products in FP8: call octavo.convert_to_fp8(model) first")
    return managers


def managers_in(owners: Iterable[Any]) -> list[FP8ScalingManager]:
    """Return the scaling managers of modules or autocasts, each once."""
    found = (getattr(owner, "scaling", None) for owner in owners)
    return list(dict.fromkeys(manager for manager in found if isinstance(manager, FP8ScalingManager)))
