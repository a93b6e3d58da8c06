"""How much memory a piece of work holds at once, counted from the allocations a CPU profile records."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.profiler import ProfilerActivity, profile


def peak_bytes_held(work: Callable[[], Iterable]) -> int:
    """Largest number of bytes allocated since the start and not freed yet, while what `work()` yields is consumed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for _ in work():
            pass
    held = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
