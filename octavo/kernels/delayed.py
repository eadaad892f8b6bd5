"""Delayed scales in kernels: a pass with the scale in force, and another over what that scale did not hold.

`numerics.operand` looks at a tensor's amax before it quantises. A kernel that reads the tensor once learns the amax
while it quantises, so it does this in two launches:

    DELAYED   quantises with the scale in force (1 if there is none yet), and leaves AMAX and USED in the state
    AGAIN     returns at once if USED holds AMAX; else it quantises again, with the scale of AMAX

Nothing waits for the host. The second launch costs what a launch costs, and takes the place of one that looked for
the amax of a first use. Programs of AGAIN read USED and AMAX, which no program of that launch writes.

The statistics in the state are those of the values that remain: AGAIN walks over the same tiles as DELAYED, program by
program, and adds the difference.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import tiles
from octavo.numerics.scaling import AMAX, SLOTS

# Where the scale of a whole tensor comes from.
CURRENT = tl.constexpr(0)  # from an amax that an earlier launch measured
DELAYED = tl.constexpr(1)
AGAIN = tl.constexpr(2)
GIVEN = tl.constexpr(3)  # from the place of the state: no state, but a scale


@triton.jit
def is_held(state_ptr, format: tl.constexpr, margin: tl.constexpr):
    """Whether the scale of the pass before holds what it met; see `numerics.scaling.holds`."""
    used, most = tl.load(state_ptr + tiles.USED), tl.load(state_ptr + tiles.AMAX)
    threshold: tl.constexpr = format.saturation_threshold
    normal: tl.constexpr = format.smallest_normal
    share: tl.constexpr = margin if margin < 1.0 else 1.0
    fits = most * share <= used * threshold
    counts = most * margin >= used * normal
    return (most == 0.0) | ((used > 0.0) & fits & counts)


@triton.jit
def scale_before(state_ptr):
    """The scale that the pass before quantised with."""
    used = tl.load(state_ptr + tiles.USED)
    return tl.where(used > 0.0, used, 1.0)


@triton.jit
def find_scale(state_ptr, amax_ptr, SCALING: tl.constexpr, format: tl.constexpr, margin: tl.constexpr):
    """The scale to quantise with, and the one that statistics in the state are about so far."""
    if SCALING == CURRENT:
        scale = tiles.scale_from_amax(tl.load(amax_ptr), format, margin)
        return scale, scale
    if SCALING == DELAYED:
        known = tl.load(state_ptr + tiles.SCALE)
        scale = tl.where(known > 0.0, known, 1.0)
        return scale, scale
    if SCALING == AGAIN:
        before = scale_before(state_ptr)
        own = tiles.scale_from_amax(tl.load(state_ptr + tiles.AMAX), format, margin)
        return tl.where(is_held(state_ptr, format, margin), before, own), before
    scale = tl.load(state_ptr)
    return scale, scale


@triton.jit
def lost_of_eight(
    x, v, before, seed, where, format: tl.constexpr, STOCHASTIC: tl.constexpr, SCALING: tl.constexpr
):  # fmt: skip
    """How many of every eight neighbours underflow; while quantising again, how many more than before.

    `v`: what goes into the cast. `before`: the reciprocal of the scale that the pass before had.
    """
    count = tiles.count_of_eight(tiles.is_lost(x, v, format))
    if SCALING == AGAIN:
        v_before = x * before
        if STOCHASTIC:
            v_before = tiles.saturate(v_before, seed, where, format, True)
        count -= tiles.count_of_eight(tiles.is_lost(x, v_before, format))
    return count


@triton.jit
def clipped(x, scale, before, format: tl.constexpr, SCALING: tl.constexpr):
    """How many elements saturate; while quantising again, how many more than before."""
    count = tiles.count(tiles.is_clipped(x, scale, format))
    if SCALING == AGAIN:
        count -= tiles.count(tiles.is_clipped(x, before, format))
    return count


@triton.jit
def largest_counted(scale, before, format: tl.constexpr, margin: tl.constexpr, SCALING: tl.constexpr):
    """The magnitude beyond which a program has to look for saturated elements.

    A scale that holds its tensor saturates nothing, unless a margin below 1 asks for it.
    """
    if (SCALING == DELAYED or SCALING == AGAIN) and margin >= 1.0:
        return scale * 0.0 + float("inf")
    maximum: tl.constexpr = format.max
    return tl.minimum(scale, before) * maximum


@triton.jit
def note_use(
    state_ptr, amax_ptr, scale, SCALING: tl.constexpr, format: tl.constexpr, margin: tl.constexpr
):  # fmt: skip
    """Leave in the state what a use leaves beside its statistics. For one program only."""
    if SCALING == CURRENT:
        tiles.record_scale(state_ptr, scale, tl.load(amax_ptr))
        tiles.record_use(state_ptr)
    elif SCALING == DELAYED:
        tl.store(state_ptr + tiles.USED, tl.load(state_ptr + tiles.SCALE))
        tiles.record_use(state_ptr)
    elif SCALING == AGAIN:
        used = tl.load(state_ptr + tiles.USED)
        if not is_held(state_ptr, format, margin):
            tl.store(state_ptr + tiles.SCALE, scale)
            if (used > 0.0) & (used != scale):
                tl.store(state_ptr + tiles.RESCALED, tl.load(state_ptr + tiles.RESCALED) + 1.0)


def passes(delayed: bool) -> tuple[tl.constexpr, ...]:
    """The launches that quantise, in order."""
    return (DELAYED, AGAIN) if delayed else (CURRENT,)


def writable(state: Tensor, record: bool) -> Tensor:
    """A state for a delayed scale: itself, or without `record` a copy that has seen nothing in this step."""
    if record:
        return state
    mask = _MASKS.get(state.device)
    if mask is None:
        mask = torch.ones(SLOTS, dtype=torch.float32, device=state.device)
        mask[AMAX] = 0.0
        _MASKS[state.device] = mask
    return state * mask


_MASKS: dict[torch.device, Tensor] = {}
