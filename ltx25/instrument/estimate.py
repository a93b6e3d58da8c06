"""Forward counts and the time left of a denoise.

    forwards = Forwards(phase, groups, prediction)      # phase = watch.phase("sample", total=120, unit="forward")
    for group in groups:
        ...                                             # run it; its event completed after `seconds`
        forwards.finished(seconds)                      # ticks, reports, may raise a cancel

reads `step 3/30 - forward 9-12/120 (cond+uncond+stg+mod) - last 0.21 s - about 6 s left (from 2 steps)`.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .units import counted, seconds_text
from .watch import Phase

RECENT = 8  # groups of a kind the median is taken over: follows a card that heats up, outlives one hiccup


@dataclass(frozen=True)
class Group:
    """Legs that run and complete together. `step` counts from 1; `legs` are leg names in run order ("cond", "stg").

    `kind` is whatever else changes the cost at equal legs ("video only" in a step that skips the audio stream). traced: it
    runs under a profiler, whose own cost is in its seconds.
    """

    step: int
    legs: tuple[str, ...]
    kind: str = ""
    traced: bool = False

    @property
    def cost_key(self) -> tuple[tuple[str, ...], str]:
        return (self.legs, self.kind)


class Forwards:
    """Reports the groups of one denoise, in order, to its phase; the estimate's own error goes into the phase's facts."""

    def __init__(self, phase: Phase, groups: Sequence[Group], prediction: str = "", steps: int | None = None) -> None:
        """steps: of the whole denoise, where the last ones run no group (skip_step); None: the last group's. `prediction` is the planner's sentence ("about 25 s predicted (...)"), shown until the first group is done."""
        self.phase = phase
        self.groups = tuple(groups)
        self.estimate = Estimate(self.groups)
        self._steps = steps or max((group.step for group in self.groups), default=0)
        self._total = sum(len(group.legs) for group in self.groups)
        self._ends = tuple(itertools.accumulate(len(group.legs) for group in self.groups))
        self._done = 0  # groups
        if self.groups:
            phase.doing = self._name(0)
            text = phase.doing + (f" - {prediction}" if prediction else "")
            phase.within(text, steps=self._steps, running=self._forward(0))

    def finished(self, seconds: float) -> None:
        """The next group has completed and took `seconds`. Ticks its legs; raises when a cancel was asked for."""
        index, group = self._done, self.groups[self._done]
        self._done += 1
        self.estimate.add(seconds)
        text = f"{self._name(index)} - last {seconds_text(seconds)}" + (" under the profiler" if group.traced else "")
        left = self.estimate.left()
        if left is not None and left.steps and group.step >= 2 and self._done < len(self.groups):
            text += f" - {left}"
        facts = {
            "step": group.step,
            "steps": self._steps,
            "forward": self._forward(index),
            "legs": list(group.legs),
            "kind": group.kind,
            "seconds": seconds,
            "running": self._forward(self._done) if self._done < len(self.groups) else None,
        }
        if self._done < len(self.groups):
            self.phase.doing = self._name(self._done)
        else:
            self.phase.facts["estimate"] = self.estimate.error()
        self.phase.tick(len(group.legs), text, **facts)

    def _name(self, index: int) -> str:
        group, (first, last) = self.groups[index], self._forward(index)
        count = f"{first}" if first == last else f"{first}-{last}"
        return f"step {group.step}/{self._steps} - forward {count}/{self._total} ({'+'.join(group.legs)})"

    def _forward(self, index: int) -> tuple[int, int]:
        """First and last forward of a group, counted from 1."""
        return self._ends[index] - len(self.groups[index].legs) + 1, self._ends[index]


@dataclass(frozen=True)
class Left:
    """`seconds` until the last group is done, from the groups of `steps` steps."""

    seconds: float
    steps: int

    def __str__(self) -> str:
        return f"about {seconds_text(self.seconds, rough=True)} left (from {counted(self.steps, 'step')})"


class Estimate:
    """Time left: for every group still to run, the median of the last ones of its kind.

    The first group of a kind carries warm-up (allocation, capture, kernel choice) and counts only while it is the only
    one. A kind not seen yet costs what its legs cost on average in the kinds that were. A traced group tells nothing of
    the others: what the profiler takes is in no estimate, and not in what estimates are held against.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = tuple(groups)
        self._done = 0
        self._timed: dict[tuple, list[tuple[int, float]]] = {}  # kind -> (step, seconds)
        self._ahead: dict[tuple, int] = {}  # kind -> groups still to run
        for group in self._groups:
            self._ahead[group.cost_key] = self._ahead.get(group.cost_key, 0) + 1
        self._given: list[tuple[int, float, float, int]] = []  # groups done, clock, seconds predicted, steps
        self._traced: dict[int, float] = {}  # number of a traced group -> seconds

    def add(self, seconds: float) -> None:
        """The next group of the plan took `seconds`."""
        group = self._groups[self._done]
        self._done += 1
        if group.traced:
            self._traced[self._done] = seconds
        else:
            self._timed.setdefault(group.cost_key, []).append((group.step, seconds))
        self._ahead[group.cost_key] -= 1
        left = self.left()
        if left is not None and group.step >= 2 and self._done < len(self._groups):
            self._given.append((self._done, time.monotonic(), left.seconds, left.steps))

    def left(self) -> Left | None:
        """None before the first group is done."""
        if not self._timed:
            return None
        used = self._used
        total = sum(n * self._each(kind) for kind, n in self._ahead.items())
        steps = {step for kind, timed in used.items() if self._ahead[kind] or not any(self._ahead.values()) for step, _ in timed}
        if not steps:  # only kinds not seen yet are left
            steps = {step for timed in used.values() for step, _ in timed}
        return Left(total, len(steps))

    @property
    def _used(self) -> dict[tuple, list[tuple[int, float]]]:
        """The groups an estimate rests on, by kind."""
        return {kind: timed[1:][-RECENT:] or timed for kind, timed in self._timed.items()}

    def _each(self, kind: tuple) -> float:
        """s of one group of a kind, from those seen."""
        medians = {seen: statistics.median(seconds for _, seconds in timed) for seen, timed in self._used.items()}
        return medians.get(kind, statistics.median(seconds / max(1, len(seen[0])) for seen, seconds in medians.items()) * len(kind[0]))

    def _profiling(self, after: int) -> float:
        """s that the profiler took in groups beyond the first `after`."""
        return sum(max(0.0, seconds - self._each(self._groups[n - 1].cost_key)) for n, seconds in self._traced.items() if n > after)

    def error(self) -> dict[str, object] | None:
        """How the estimates given came out, once all groups are done: the first one, the one at half time, the worst.

        Each is {groups, predicted_s, actual_s, error} with error = predicted / actual - 1, actual_s without what a profiler
        took; None when none was given.
        """
        if not self._given:
            return None
        end = time.monotonic()
        outcomes = []
        for done, clock, predicted, steps in self._given:
            actual = end - clock - self._profiling(done)
            outcomes.append({"groups": done, "steps": steps, "predicted_s": predicted, "actual_s": actual, "error": predicted / max(actual, 1e-9) - 1})
        half = next((o for o in outcomes if 2 * o["groups"] >= len(self._groups)), outcomes[-1])
        return {"first": outcomes[0], "half": half, "worst": max(outcomes, key=lambda o: abs(o["error"]))}
