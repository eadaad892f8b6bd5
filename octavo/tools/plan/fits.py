"""The largest batch and the longest sequence that fit a GPU."""

from collections.abc import Callable

from octavo.tools.plan.gpus import Gpu
from octavo.tools.plan.memory import plan_memory
from octavo.tools.plan.options import Option
from octavo.tools.plan.request import with_batch, with_sequence
from octavo.tools.plan.timeline import GIB
from octavo.tools.shapes import Case

MOST = 2**16  # sequences; nobody asks for more
STRIDE = 128  # a longest sequence is a multiple of it, or all of the model's positions


def fits(case: Case, option: Option, gpu: Gpu) -> bool:
    return plan_memory(case, option).peak.total <= gpu.room * GIB


def largest_batch(case: Case, option: Option, gpu: Gpu) -> int:
    """Return the largest batch, in sequences; 0 if not even one fits."""
    return _most(lambda batch: fits(with_batch(case, batch), option, gpu), MOST)


def longest_sequence(case: Case, option: Option, gpu: Gpu) -> int:
    """Return the longest sequence, in tokens, of a step of one; 0 if none fits. Limited by the model's positions."""
    positions = case.config.get("max_position_embeddings") or MOST * STRIDE
    if fits(with_sequence(case, positions), option, gpu):
        return int(positions)
    return STRIDE * _most(lambda n: fits(with_sequence(case, n * STRIDE), option, gpu), positions // STRIDE)


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to `limit` that fits, given that all smaller ones do."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
