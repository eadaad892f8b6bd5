"""The completions that are being written: one row of tensors on the device for each slot.

A slot holds the newest token, which has yet to go through the model, and how many before it have (`lengths`). A step

    1  puts `token` at position prefix + lengths, stores its k and v, and gets logits for the next one
    2  chooses the next token, appends it and its log-probability
    3  ends the slot if that is a stop token, or if the completion has reached its limit

all by masks, so that a step is the same operations on the same memory whatever the slots hold. That makes it a CUDA
graph. An ended slot computes on, stores nothing and appends nothing, until it gets another completion.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.ops import slots as ops
from octavo.rl.cache import Decode, RolloutCache


class Slots:
    """State of `count` slots, of which at most `together` have one prompt. `stops[V]`: tokens that end a completion."""

    def __init__(self, count: int, together: int, cache: RolloutCache, vocabulary: int, device: torch.device) -> None:
        self.count, self.device = count, device
        places, length = cache.size.places, cache.size.suffix
        self.group_of = torch.full((count,), -1, dtype=torch.int32, device=device)
        self.slots_of_group = torch.full((places, together), -1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(count, dtype=torch.int32, device=device)
        self.limits = torch.zeros(count, dtype=torch.int32, device=device)
        self.active = torch.zeros(count, dtype=torch.bool, device=device)
        self.is_cut = torch.zeros(count, dtype=torch.bool, device=device)
        self.token = torch.zeros(count, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(count, length, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(count, length, dtype=torch.float32, device=device)
        self.stops = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.temperature = torch.ones((), dtype=torch.float32, device=device)
        self._cache = cache

    def reset(self, stop_ids: Sequence[int], temperature: float) -> None:
        """Empty all slots, for another rollout."""
        self.active.fill_(False)
        self.group_of.fill_(-1)
        self.slots_of_group.fill_(-1)
        self.lengths.zero_()
        self.stops.fill_(False)
        self.stops[torch.tensor(stop_ids, dtype=torch.int64, device=self.device)] = True
        self.temperature.fill_(temperature or 1.0)

    def begin_step(self) -> tuple[Decode, Tensor]:
        """Return how the newest tokens attend, and the position of each; 0 for an empty slot."""
        positions, places, where, seen = ops.begin_step(
            self.active, self.lengths, self.group_of, self._cache.prefix_lengths
        )
        decode = Decode(
            self._cache,
            places=places,
            positions=where,
            lengths=seen,
            group_of=self.group_of,
            slots_of_group=self.slots_of_group,
        )
        return decode, positions

    def append(self, token: Tensor, logprob: Tensor) -> None:
        """Add the chosen tokens to the completions that are still being written, and end those that are complete."""
        rows = (self.tokens, self.logprobs, self.token, self.lengths, self.active)
        ops.end_step_(*rows, token, logprob, self.stops, self.limits)

    def start(
        self, slots: Sequence[int], places: Sequence[int], limits: Sequence[int], first: tuple[Tensor, Tensor]
    ) -> None:
        """Begin completions in these slots, with their first tokens and log-probabilities."""
        index = torch.tensor(slots, device=self.device)
        token, logprob = first
        limit = torch.tensor(limits, dtype=torch.int32, device=self.device)
        self.group_of[index] = torch.tensor(places, dtype=torch.int32, device=self.device)
        self.lengths[index] = 0
        self.limits[index] = limit
        self.token[index] = token
        self.tokens[index, 0] = token
        self.logprobs[index, 0] = logprob
        self.active[index] = ~self.stops[token] & (limit > 1)
        self.is_cut[index] = False

    def set_groups(self, members: Sequence[Sequence[int]]) -> None:
        """Say which slots each place has: the inverse of `group_of`."""
        together = self.slots_of_group.shape[1]
        rows = [[*slots, *[-1] * (together - len(slots))] for slots in members]
        self.slots_of_group.copy_(torch.tensor(rows, dtype=torch.int32))

    def ended(self, slots: Sequence[int]) -> list[int]:
        """Return those of these slots whose completion is complete. Waits for the device."""
        active = self.active.tolist()
        return [slot for slot in slots if not active[slot]]

    @property
    def longest(self) -> int:
        """Tokens that a completion can have."""
        return self.tokens.shape[1]

    def latest(self, slots: Sequence[int], count: int) -> list[list[int]]:
        """Return up to `count` of the last tokens of each of these slots. Waits for the device."""
        index = torch.tensor(slots, device=self.device)
        written = self.lengths[index].long() + 1
        columns = written[:, None] - torch.arange(count, 0, -1, device=self.device)
        rows = self.tokens[index[:, None], columns.clamp_(min=0)]
        return [row[-n:] for n, row in zip(written.tolist(), rows.tolist(), strict=True)]

    def cut(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """End the completions in these slots with so many of their tokens."""
        index = torch.tensor(slots, device=self.device)
        self.lengths[index] = torch.tensor(counts, dtype=torch.int32, device=self.device) - 1
        self.active[index] = False
        self.is_cut[index] = True

    def read(self, slots: Sequence[int]) -> list[tuple[list[int], list[float], bool]]:
        """Return tokens and log-probabilities of these slots, and whether a stop token or text ended them."""
        index = torch.tensor(slots, device=self.device)
        counts = (self.lengths[index] + 1).tolist()
        tokens, logprobs = self.tokens[index].cpu(), self.logprobs[index].cpu()
        stopped = (self.stops[self.token[index]] | self.is_cut[index]).tolist()
        return [
            (tokens[row, :count].tolist(), logprobs[row, :count].tolist(), stop)
            for row, (count, stop) in enumerate(zip(counts, stopped, strict=True))
        ]
