"""Which completion is in which slot, and which prompt in which place: on the host, without a tensor.

Equal prompts are one group and go through the model once. Completions start in the order of their groups, so those of
one prompt run together, and its place is free again when the last of them is complete. There are places for twice as
many groups as fill the slots: enough that a slot seldom waits for one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.rl.cache import CacheSize
from octavo.rl.completions import Completion


@dataclass
class _Group:
    """A distinct prompt. `waiting`: indices of its completions that have not begun; `running`: how many have."""

    prompt: list[int]
    limit: int
    waiting: list[int] = field(default_factory=list)
    running: int = 0
    place: int | None = None


class Schedule:
    """n completions of each prompt, in at most so many slots. `limits`: how many tokens a completion may have."""

    def __init__(self, prompts: Sequence[list[int]], limits: Sequence[int], n: int, *, slots: int) -> None:
        groups: dict[tuple[int, ...], _Group] = {}
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            group = groups.setdefault(tuple(prompt), _Group(prompt, limit))
            group.waiting += range(index * n, (index + 1) * n)
        self._groups = list(groups.values())
        self._n = n
        total = len(prompts) * n
        self.slots = min(slots, 1 << (total - 1).bit_length())  # few sizes, of which each is a graph
        sizes = [len(group.waiting) for group in self._groups]
        smallest = min(sizes)
        self.together = min(self.slots, 1 << (max(sizes) - 1).bit_length())  # completions of one prompt at once
        self.places = min(len(self._groups), self.slots, 2 * -(-self.slots // smallest))
        self._free_slots = list(range(min(self.slots, total)))
        self._free_places = list(range(self.places))
        self._in_slot: dict[int, tuple[int, _Group]] = {}
        self._done: list[Completion | None] = [None] * total
        self._next = 0  # group that is to begin
        self.prefills = self.prompt_tokens = 0

    def size(self, step: int) -> CacheSize:
        """Return the cache that this needs, with lengths rounded up to multiples of `step`."""
        prefix, suffix = (
            -(-longest // step) * step
            for longest in (max(len(g.prompt) for g in self._groups), max(g.limit for g in self._groups))
        )
        return CacheSize(self.places, prefix, self.slots, suffix)

    def refill(self) -> tuple[list[tuple[int, list[int]]], list[tuple[int, int, int]]]:
        """Give free slots completions. Returns new prompts with places, and slots with their place and limit."""
        fresh, begun = [], []
        while self._free_slots and self._next < len(self._groups):
            group = self._groups[self._next]
            if group.place is None:
                if not self._free_places:
                    break
                group.place = self._free_places.pop(0)
                fresh.append((group.place, group.prompt))
                self.prefills += 1
                self.prompt_tokens += len(group.prompt)
            slot = self._free_slots.pop(0)
            self._in_slot[slot] = (group.waiting.pop(0), group)
            group.running += 1
            begun.append((slot, group.place, group.limit))
            if not group.waiting:
                self._next += 1
        return fresh, begun

    @property
    def busy(self) -> list[int]:
        """Slots with a completion."""
        return sorted(self._in_slot)

    def members(self, places: int) -> list[list[int]]:
        """Return the slots of each of so many places."""
        slots: list[list[int]] = [[] for _ in range(places)]
        for slot, (_, group) in sorted(self._in_slot.items()):
            assert group.place is not None
            slots[group.place].append(slot)
        return slots

    def finish(self, slots: Sequence[int], read: Sequence[tuple[list[int], list[float], bool]]) -> None:
        """Take what these slots hold for complete, and free them."""
        for slot, (tokens, logprobs, stopped) in zip(slots, read, strict=True):
            index, group = self._in_slot.pop(slot)
            self._done[index] = Completion(index // self._n, tokens, logprobs, stopped)
            self._free_slots.append(slot)
            group.running -= 1
            if not group.running and not group.waiting:
                assert group.place is not None
                self._free_places.append(group.place)

    def completions(self) -> list[Completion]:
        """Return all completions, those of the first prompt first."""
        assert all(completion is not None for completion in self._done)
        return [completion for completion in self._done if completion is not None]
