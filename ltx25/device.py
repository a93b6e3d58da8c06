"""A point in a device's work, to be asked about later without waiting for it."""

from __future__ import annotations

import time

import torch


class Mark:
    """Made after work was queued: `done` tells whether the device got there. On the CPU work is done when it returns."""

    def __init__(self, device: torch.device) -> None:
        self._event = None
        self._clock = 0.0
        events = None if device.type == "cpu" else getattr(getattr(torch, device.type, None), "Event", None)
        if events is None:
            self._clock = time.perf_counter()
        else:
            self._event = events(enable_timing=True)
            self._event.record()

    def done(self) -> bool:
        """Whether all work queued before this mark is complete. Never waits."""
        return self._event is None or self._event.query()

    def seconds_since(self, earlier: Mark) -> float:
        """Device seconds between two marks of one device, both done."""
        if self._event is None:
            return self._clock - earlier._clock
        return earlier._event.elapsed_time(self._event) / 1000
