"""Two records side by side: which phase changed, by how much, and whether that is more than runs differ anyway."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .history import Run

REQUEST = ("geometry", "steps", "legs", "settings")  # header facts of what was asked for
SAME = (*REQUEST, "device", "files", "options")  # of runs that should take equally long
VERSIONS = ("torch", "triton", "driver", "pack", "revision")


@dataclass(frozen=True)
class Change:
    """One phase in both runs; s, None where a run has no such phase. `spread`: how much equal runs differ, relative; None:
    nobody knows (one run each). `equal`: whether both runs were asked for the same; else their seconds are no measure of each other.
    stopped: "A", "B" or "AB", the runs that did not come to its end: how long it takes, they do not say."""

    name: str
    before: float | None
    after: float | None
    spread: float | None
    equal: bool
    stopped: str

    @property
    def relative(self) -> float | None:
        return self.after / self.before - 1 if self.before and self.after is not None and not self.stopped else None

    @property
    def verdict(self) -> str:
        """slower / faster / same / only in one run / stopped in one or both / spread unknown / different request."""
        if self.before is None or self.after is None:
            return "only in B" if self.before is None else "only in A"
        if self.stopped:
            return f"stopped in {' and '.join(self.stopped)}"
        if not self.equal:
            return "different request"
        change = self.relative
        if change is None:
            return "same"
        if self.spread is None:
            return "spread unknown"
        return "same" if abs(change) <= self.spread else "slower" if change > 0 else "faster"


def compare(a: Run, b: Run, others: Iterable[Run] = ()) -> list[Change]:
    """Top-level phases by name (summed), then one group of forwards per kind ("forward cond+uncond": the median).

    The spread of a phase comes from `others` that ran the same request on the same device as A or B; the spread of a
    group also from its own quartiles. Order: as in A, then what only B has.
    """
    others = [run for run in others if run.path not in (a.path, b.path)]  # what differs is in question: no measure of itself
    siblings = [[run, *_like(run, others)] for run in (a, b)]
    equal = same_request(a, b)
    forwards, within = [], []
    for name in _names(a, b, _groups):
        before, after = _groups(a).get(name), _groups(b).get(name)
        spreads = [_quartiles(samples) for samples in (before, after) if samples]
        within += spreads
        spreads += [_range([statistics.median(_groups(run)[name]) for run in group if name in _groups(run)]) for group in siblings]
        forwards.append(Change(name, _median(before), _median(after), _widest(spreads), equal, ""))
    phases = []
    for name in _names(a, b, phase_seconds):
        spreads = [_range([phase_seconds(run).get(name) for run in group]) for group in siblings]
        spreads += within if name == "sample" else []
        stopped = stopped_in(a, b, lambda run, name=name: any(row["name"] == name and row["error"] for row in run.phases))
        phases.append(Change(name, phase_seconds(a).get(name), phase_seconds(b).get(name), _widest(spreads), equal, stopped))
    return phases + forwards


def stopped_in(a: Run, b: Run, stopped: Callable[[Run], bool]) -> str:
    """Which of the two runs stopped: "", "A", "B" or "AB"."""
    return "A" * stopped(a) + "B" * stopped(b)


def same_request(a: Run, b: Run) -> bool:
    """Whether both runs were asked for the same clip in the same way; device, files and options may differ: they are what is compared."""
    return _facts(a, REQUEST) == _facts(b, REQUEST)


def differences(a: Run, b: Run) -> list[tuple[str, Any, Any]]:
    """(what, of A, of B) for all that may explain a change. Of facts with parts (settings, files) the parts that differ, as "settings.eta"."""
    found: list[tuple[str, Any, Any]] = []
    before, after = _facts(a, (*SAME, *VERSIONS)), _facts(b, (*SAME, *VERSIONS))
    for name, was in before.items():
        now = after[name]
        if isinstance(was, dict) and isinstance(now, dict):
            found += [(f"{name}.{part}", was.get(part), now.get(part)) for part in dict.fromkeys([*was, *now]) if was.get(part) != now.get(part)]
        elif was != now:
            found.append((name, was, now))
    traced = [len(run.traced) for run in (a, b)]
    if traced[0] != traced[1]:
        found.append(("steps under a profiler", *traced))
    return found


def phase_seconds(run: Run) -> dict[str, float]:
    """Wall seconds per top-level phase name."""
    seconds: dict[str, float] = {}
    for row in run.phases:
        if row["parent"] is None:
            seconds[row["name"]] = seconds.get(row["name"], 0.0) + row["wall"]
    return seconds


def _groups(run: Run) -> dict[str, list[float]]:
    """Seconds of the groups of each kind, the first of a kind left out where there are more."""
    groups: dict[str, list[float]] = {}
    for forward in run.untraced:
        kind = f" ({forward['kind']})" if forward.get("kind") else ""
        groups.setdefault(f"forward {forward.get('legs')}{kind}", []).append(forward["seconds"])
    return {name: seconds[1:] or seconds for name, seconds in groups.items()}


def _names(a: Run, b: Run, of) -> list[str]:
    return list(dict.fromkeys([*of(a), *of(b)]))


def _like(run: Run, others: Iterable[Run]) -> list[Run]:
    return [other for other in others if other.status == "done" and _facts(other, SAME) == _facts(run, SAME)]


def _facts(run: Run, names: Sequence[str]) -> dict[str, Any]:
    """Header facts by name; a seed changes no time, so settings are without it."""
    facts = {name: run.header.get(name) for name in names}
    if facts.get("settings"):
        facts["settings"] = {name: value for name, value in facts["settings"].items() if name != "seed"}
    return facts


def _range(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value]
    return (max(known) - min(known)) / statistics.median(known) if len(known) > 1 else None


def _quartiles(samples: Sequence[float]) -> float | None:
    if len(samples) < 4:
        return None
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / middle if middle else None


def _widest(spreads: Sequence[float | None]) -> float | None:
    return max((spread for spread in spreads if spread is not None), default=None)


def _median(samples: Sequence[float] | None) -> float | None:
    return statistics.median(samples) if samples else None
