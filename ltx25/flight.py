"""Groups of forwards on their way through the device: at most two at a time, reported when they are complete.

The host queues a group and goes on; a mark behind it tells later, without waiting, that the device got there. So reported
is run, and the device always has work. Waiting is sleeping and polling, and looks for a cancel while it does.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from .device import Mark
from .instrument import Forwards

Result = TypeVar("Result")
Pause = Callable[[int], None]  # called by the transformer with the 0-based block it has just queued; may raise

AHEAD = 2  # groups
SLOW = 0.5  # s of a group from which its blocks are told
SEGMENT = 1.0  # s of work the host queues ahead inside a slow group, so that a cancel acts
TELL = 0.7  # s after which the next finished block is told: with blocks of up to 0.3 s, a word every second
NAP = 0.002  # s, the longest: a sampling is over as much later than its device
CHECK = 0.1  # s between looks for a cancel while nothing is told
UNKNOWN_AHEAD = 8  # blocks queued ahead while nobody knows how long one takes


def unpaced(block: int) -> None:
    """The Pause of a group known to be fast: it need not be called, so such a group may be captured as a whole."""


@dataclass
class _Group:
    key: Hashable
    start: Mark
    launched: float  # s of the host's clock
    marks: deque[Mark]  # ends of blocks not known to be complete yet; none in an unpaced group
    passed: list[float] = field(default_factory=list)  # s from the start to the end of each block known to be complete
    end: Mark | None = None
    landed: Callable[[], None] | None = None


class Flight:
    """Launches the groups of one denoise in order. `seconds` fills as they complete, one number per group."""

    def __init__(self, device: torch.device, forwards: Forwards, blocks: int, known: dict[Hashable, float]) -> None:
        """`known`: what a group of each key takes, s; kept up to date, so that a next run need not find out again."""
        self.seconds: list[float] = []
        self._device = device
        self._forwards = forwards
        self._blocks = blocks
        self._groups: deque[_Group] = deque()
        self._known = known
        self._ahead = UNKNOWN_AHEAD  # marked blocks the host may be ahead
        self._told = self._checked = time.monotonic()

    def launch(self, key: Hashable, run: Callable[[Pause], tuple[Result, Callable[[], None] | None]]) -> Result:
        """Queue one group. `run(pause)` queues its work and returns a result and what to call once it is complete.

        key: groups of one key cost alike; a key known to be fast gets `unpaced`. Raises what a cancel raises.
        """
        while len(self._groups) >= AHEAD:
            self._wait(self._groups[0].end)
        while key not in self._known and any(each.key == key for each in self._groups):
            self._wait(self._groups[0].end)  # once per key: the second group is to be captured already, if they are fast
        known = self._known.get(key)
        group = _Group(key, Mark(self._device), time.monotonic(), deque())
        self._groups.append(group)
        result, group.landed = run(unpaced if known is not None and known < SLOW else self._pacer(group))
        group.end = Mark(self._device)
        self._look()
        return result

    def land(self) -> None:
        """Wait for and report every group still in flight."""
        while self._groups:
            self._wait(self._groups[0].end)

    def _pacer(self, group: _Group) -> Pause:
        """Marks every block and keeps the host at most a segment ahead of the device."""

        def pause(block: int) -> None:
            group.marks.append(Mark(self._device))
            self._look()
            while sum(len(each.marks) for each in self._groups) > self._ahead:
                self._wait(next(each.marks[0] for each in self._groups if each.marks))

        return pause

    def _wait(self, mark: Mark) -> None:
        nap = 0.0005
        while not mark.done():
            time.sleep(nap)
            nap = min(nap * 1.5, NAP)
            self._look()
        self._look()

    def _look(self) -> None:
        """Report what completed since the last look, say where a slow group is, and let a cancel act."""
        while self._groups and self._groups[0].end is not None and self._groups[0].end.done():
            group = self._groups.popleft()
            seconds = group.end.seconds_since(group.start)
            self.seconds.append(seconds)
            self._pass(group)
            self._known[group.key] = min(seconds, self._steady(group))
            self._told = self._checked = time.monotonic()
            self._forwards.finished(seconds)
            if group.landed is not None:
                group.landed()
        if not self._groups:
            return
        running, now = self._groups[0], time.monotonic()
        self._pass(running)
        if running.passed:
            self._ahead = max(1, int(SEGMENT * len(running.passed) / max(running.passed[-1], 1e-6)))
        if running.passed and now - self._told > TELL and now - running.launched > SLOW:
            self._told = self._checked = now
            phase = self._forwards.phase
            phase.within(f"{phase.doing} - block {min(len(running.passed) + 1, self._blocks)}/{self._blocks}")
        elif now - self._checked > CHECK:
            self._checked = now
            self._forwards.phase.watch.check()

    def _pass(self, group: _Group) -> None:
        """Note the blocks that completed since the last look."""
        while group.marks and group.marks[0].done():
            group.passed.append(group.marks.popleft().seconds_since(group.start))

    def _steady(self, group: _Group) -> float:
        """s of a group whose blocks all take as long as most do: the first one ever compiles kernels and chooses between some."""
        if len(group.passed) < self._blocks:
            return float("inf")
        return self._blocks * statistics.median(b - a for a, b in itertools.pairwise([0.0, *group.passed]))
