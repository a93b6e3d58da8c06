"""Share of a stretch of wall time during which the device ran something: the union of a profiler's device intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def busy_share(run: Callable[[], object]) -> float:
    """Run `run` under the profiler: device intervals' union over the time from the first one's start to the last one's end."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as trace:
        run()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.end > event.time_range.start
    ]
    if not spans:
        raise RuntimeError("the profiler saw nothing on the device")
    return union(spans) / (max(end for _, end in spans) - min(start for start, _ in spans))


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Length covered by intervals that may overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
