"""Units of device work reported when they are done, not when they are enqueued."""

from __future__ import annotations

import time
from collections import deque

import torch

from ..instrument.watch import Phase

_AHEAD = 2  # units the host may enqueue before the oldest has ended
_INSIDE = 16  # and pieces of a unit
_SILENCE = 0.5  # s without a word inside a unit


class Pace:
    """Ticks `phase` once per finished unit; lets the host run at most two units ahead of the device."""

    def __init__(self, phase: Phase, device: torch.device, noun: str) -> None:
        self._phase = phase
        self._cuda = device.type == "cuda"
        self._noun = noun
        self._pending: deque[torch.cuda.Event] = deque()
        self._inside: deque[torch.cuda.Event] = deque()
        self._told = time.monotonic()

    def unit(self) -> None:
        """One more unit is enqueued. Raises the host's cancel."""
        if not self._cuda:
            self._tick()
            return
        event = torch.cuda.Event()
        event.record()
        self._pending.append(event)
        while self._pending and (len(self._pending) > _AHEAD or self._pending[0].query()):
            wait(self._pending[0])
            self._pending.popleft()
            self._tick()

    def breathe(self) -> None:
        """Inside a unit: raises the host's cancel, keeps the device's queue short, tells what goes on once a second."""
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
            self._inside.append(event)
            if len(self._inside) > _INSIDE:
                wait(self._inside.popleft())
        if time.monotonic() - self._told > _SILENCE:
            self._told = time.monotonic()
            self._phase.within(f"{self._noun} {self._phase.done + 1} of {self._phase.total}")
        else:
            self._phase.watch.check()

    def finish(self) -> None:
        """Wait for and report what is still in flight."""
        while self._pending:
            wait(self._pending[0])
            self._pending.popleft()
            self._tick()

    def _tick(self) -> None:
        self._told = time.monotonic()
        self._phase.tick(1, f"{self._noun} {self._phase.done + 1} of {self._phase.total}")


def wait(event: torch.cuda.Event) -> None:
    """Sleep, rather than spin, until the device has passed `event`."""
    while not event.query():
        time.sleep(0.0002)
