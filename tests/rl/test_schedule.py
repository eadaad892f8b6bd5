"""Which completion is where: every one once, prompts once, no slot idle while a completion waits for nothing."""

import random

import pytest

from octavo.rl.schedule import Schedule


def simulate(prompts, n, slots, seed=0):
    """Run a schedule whose completions end at random. The completion of prompt p is [p, p, …] by its place."""
    chance = random.Random(seed)
    schedule = Schedule([list(p) for p in prompts], [10] * len(prompts), n, slots=slots)
    held, in_slot, order = {}, {}, []
    while True:
        fresh, begun = schedule.refill()
        for place, prompt in fresh:
            assert place < schedule.places
            held[place] = prompt
        for slot, place, limit in begun:
            assert slot not in in_slot and slot < slots and limit == 10
            in_slot[slot] = place
        members = schedule.members(schedule.places + 2)
        assert sorted(slot for each in members for slot in each) == schedule.busy == sorted(in_slot)
        assert all(in_slot[slot] == place for place, each in enumerate(members) for slot in each)
        assert max(map(len, members)) <= schedule.together
        if not schedule.busy:
            return schedule, order
        ended = chance.sample(schedule.busy, chance.randint(1, len(schedule.busy)))
        schedule.finish(ended, [(held[in_slot[slot]], [0.0], False) for slot in ended])
        order += [in_slot.pop(slot) for slot in ended]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("n", "slots"), [(1, 1), (1, 4), (3, 5), (8, 16), (5, 64), (40, 7)])
def test_every_completion_once(n, slots, seed):
    prompts = [[i, i + 1] for i in range(9)] + [[0, 1], [4, 5]]  # two of them again
    schedule, order = simulate(prompts, n, slots, seed)
    done = schedule.completions()
    assert [c.prompt for c in done] == [i for i in range(11) for _ in range(n)]
    assert all(c.tokens == prompts[c.prompt] for c in done)
    assert len(order) == len(done)
    assert schedule.prefills == 9 and schedule.prompt_tokens == 18


def test_sizes():
    schedule = Schedule([[1] * 100, [2] * 5], [30, 70], 8, slots=64)
    assert (schedule.slots, schedule.together, schedule.places) == (16, 8, 2)
    size = schedule.size(64)
    assert (size.places, size.prefix, size.slots, size.suffix) == (2, 128, 16, 128)
    assert size.tokens == 2 * 128 + 16 * 128
    many = Schedule([[i] for i in range(100)], [1] * 100, 8, slots=64)
    assert many.places == 16  # twice what fills the slots
    assert Schedule([[1]], [1], 1, slots=64).slots == 1
