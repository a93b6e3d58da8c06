"""Groups of forwards on their way through the device: at most two at a time, reported when they are complete.

The host queues a group and goes on; a mark behind it tells later, without waiting, that the device got there. So reported
is run, and the device always has work. Waiting is sleeping and polling, and looks for a cancel while it does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch

from .device import Mark
from .instrument import Forwards

Result = TypeVar("Result")
Pause = Callable[[int], None]  # called by the transformer with the 0-based block it has just queued; may raise

AHEAD = 2  # groups
SLOW = 0.5  # s of a group from which its blocks are told
SEGMENT = 1.0  # s of work the host queues ahead inside a slow group, so that a cancel acts
TELL = 0.9  # s between two words about the blocks of a group
UNKNOWN_AHEAD = 8  # blocks queued ahead while nobody knows how long one takes


def unpaced(block: int) -> None:
    """The Pause of a group known to be fast: it need not be called, so such a group may be captured as a whole."""


@dataclass
class _Queued:
    key: Hashable
    start: Mark
    end: Mark
    landed: Callable[[], None] | None


class Flight:
    """Launches the groups of one denoise in order. `seconds` fills as they complete, one number per group."""

    def __init__(self, device: torch.device, forwards: Forwards, blocks: int) -> None:
        self.seconds: list[float] = []
        self._device = device
        self._forwards = forwards
        self._blocks = blocks
        self._queued: deque[_Queued] = deque()
        self._known: dict[Hashable, float] = {}
        self._told = time.monotonic()

    def launch(self, key: Hashable, run: Callable[[Pause], tuple[Result, Callable[[], None] | None]]) -> Result:
        """Queue one group. `run(pause)` queues its work and returns a result and what to call once it is complete.

        key: groups of one key cost alike; a key known to be fast gets `unpaced`. Raises what a cancel raises.
        """
        while len(self._queued) >= AHEAD:
            self._wait(self._queued[0].end)
        known = self._known.get(key)
        start = Mark(self._device)
        result, landed = run(unpaced if known is not None and known < SLOW else self._pacer(known))
        self._queued.append(_Queued(key, start, Mark(self._device), landed))
        self._collect()
        return result

    def land(self) -> None:
        """Wait for and report every group still in flight."""
        while self._queued:
            self._wait(self._queued[0].end)

    def _collect(self) -> None:
        while self._queued and self._queued[0].end.done():
            group = self._queued.popleft()
            seconds = group.end.seconds_since(group.start)
            self.seconds.append(seconds)
            self._known[group.key] = seconds
            self._told = time.monotonic()
            self._forwards.finished(seconds)
            if group.landed is not None:
                group.landed()

    def _wait(self, mark: Mark) -> None:
        pause, since = 0.0005, time.monotonic()
        while not mark.done():
            time.sleep(pause)
            pause = min(pause * 1.5, 0.005)
            if time.monotonic() - since > 0.1:
                since = time.monotonic()
                self._forwards.phase.watch.check()
        self._collect()

    def _pacer(self, known: float | None) -> Pause:
        """Follows the blocks of one group: keeps the host at most a segment ahead and tells where a slow group is."""
        ahead = UNKNOWN_AHEAD if known is None else max(1, int(SEGMENT * self._blocks / max(known, SEGMENT)))
        begun = time.monotonic()
        marks: deque[tuple[int, Mark]] = deque()

        def pause(block: int) -> None:
            marks.append((block, Mark(self._device)))
            finished = None
            while marks and (len(marks) > ahead or marks[0][1].done()):
                finished, mark = marks.popleft()
                self._wait(mark)
            now = time.monotonic()
            if finished is not None and now - begun > SLOW and now - self._told > TELL:
                self._told = now
                phase = self._forwards.phase
                phase.within(f"{phase.doing} - block {finished + 1}/{self._blocks}")

        return pause
