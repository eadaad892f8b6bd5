"""What the CPU's allocator hands out."""

import gc

import torch


def allocated(step):
    """The most bytes that are handed out at once during a step, beyond those before it."""
    gc.collect()  # what an earlier profile saw handed out would count as freed if it went during this one
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
