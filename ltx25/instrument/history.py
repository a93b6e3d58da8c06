"""Reads run records back: one file, or a folder with whatever else lies in it."""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import FileError
from .age import begun_at, by_age
from .fields import wrong_field
from .header import FORMAT
from .watch import Watch

log = logging.getLogger(__name__)

NEWEST = 300  # records a plan looks at: a second


@dataclass
class Run:
    """One record. Events are kept as the dicts they are; seconds count from the start of the run.

    header: the `run` line with all `about` lines merged in. phases: closed phases, with `start` (s) and `device_before` /
    `host_before` (bytes in use when they opened); a phase that was open when the record
    ended has an entry too, with `error` "unfinished" and what its lines told of units and memory. end: the last `end` line, {} where the record has none.
    skipped: lines that are not JSON (a disk that filled up tears one).
    """

    path: Path
    header: dict[str, Any]
    phases: list[dict[str, Any]]
    forwards: list[dict[str, Any]]
    events: list[dict[str, Any]]
    end: dict[str, Any]
    skipped: int
    last: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def status(self) -> str:
        """done, failed, cancelled or killed; "unfinished" while it runs, or after a kill nobody marked yet."""
        return self.end.get("status", "unfinished")

    @property
    def wall(self) -> float:
        """Seconds inside the run's parts."""
        return self.end.get("wall") or max((event.get("t") or 0.0 for event in (*self.phases, self.last)), default=0.0)

    @property
    def where(self) -> str:
        """Where it stopped, in words; empty for a run that is done."""
        if self.status == "done":
            return ""
        source = self.end if self.end.get("phase") else self.last
        phase, at = source.get("phase") or source.get("name") or "no phase", source.get("at") or source.get("text")
        return f"{phase}: {at}" if at else phase

    @property
    def traced(self) -> set[tuple[Any, Any]]:
        """(phase, number in it from 0) of the groups that ran under a profiler. Older records tell the phase by where the line stands."""
        found, sampling = set(), None
        for event in self.events:
            if event["event"] == "phase" and event.get("state") == "open" and event.get("unit") == "forward":
                sampling = event.get("id")
            elif event["event"] == "profile":
                found.add((event.get("id") or sampling, event.get("group")))
        return found

    @property
    def untraced(self) -> list[dict[str, Any]]:
        """Forwards without those that ran under a profiler, whose own cost is in them."""
        traced, counts, plain = self.traced, Counter(), []
        for forward in self.forwards:
            phase = forward.get("id")
            if (phase, counts[phase]) not in traced:
                plain.append(forward)
            counts[phase] += 1
        return plain

    def of(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.events if entry["event"] == event]


def read_run(path: Path) -> Run:
    """Raises FileError for what is no run record, one with fields of other types than the writer's, or of a newer format."""
    if path.exists() and not path.is_file():  # opening a pipe would wait for who writes to it
        raise FileError(f"{path.name} is no file; choose another record.")
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise FileError(f"{path.name} cannot be read ({error.strerror}); choose another record.") from None
    events, skipped = _parse(lines)
    if not events or events[0].get("event") != "run" or not isinstance(events[0].get("format"), int):
        raise FileError(f"{path.name} is not a run record; records are the .jsonl files a render writes to its runs folder.")
    if events[0]["format"] > FORMAT:
        raise FileError(f"{path.name} has record format {events[0]['format']}, this version reads up to {FORMAT}; update the pack.")
    wrong = wrong_field(events)
    if wrong is not None:
        raise FileError(f"{path.name} has no usable {wrong}; delete it or choose another record.")
    return _assembled(path, events, skipped)


def read_runs(folder: Path) -> tuple[list[Run], list[str]]:
    """All records of a folder, oldest first (see age.py), and one sentence per file that was skipped. Plots of runs lie there too."""
    return _read(sorted(p for p in folder.iterdir() if p.suffix != ".png") if folder.is_dir() else [], lambda: None)


def read_newest(folder: Path, watch: Watch) -> tuple[list[Run], list[str]]:
    """As `read_runs`, of the NEWEST newest .jsonl files by name, counted in phase plan.read: thousands take a minute."""
    paths = sorted(folder.glob("*.jsonl"), key=lambda path: path.name)[-NEWEST:]
    if not paths:
        return [], []
    with watch.phase("plan.read", total=len(paths), unit="record") as phase:
        return _read(paths, phase.tick)


def _read(paths: Iterable[Path], tick: Callable[[], None]) -> tuple[list[Run], list[str]]:
    runs, skipped = [], []
    for path in paths:
        try:
            if path.is_file():
                runs.append(read_run(path))
        except FileError as error:
            skipped.append(f"skipped: {error}")
        tick()
    return sorted(runs, key=lambda run: begun_at(run.path, run.header)), skipped


def find_run(folder: Path, name: str) -> Run:
    """A record of `folder`: by (part of) its name, or "last" / "last-1" by age; "" is "last". No name leads out of the folder.

    Ages are counted over the records alone: a newer file that is none is told in one line of the log and passed over.
    """
    paths = list(folder.glob("*.jsonl")) if folder.is_dir() else []
    name = name.strip() or "last"
    back = re.fullmatch(r"last(?:-(\d+))?", name)
    if back:
        run = _newest(by_age(paths), int(back[1] or 0))
        if run is not None:
            return run
    found = [path for path in sorted(paths) if name in path.name]
    if len(found) == 1:
        return read_run(found[0])
    if not found:
        raise FileError(f"no run record named '{name}' in {folder} ({len(paths)} files); `ltx25 runs show` lists them.")
    raise FileError(f"'{name}' fits {len(found)} records in {folder}: {', '.join(p.name for p in found[:3])}; write more of the name.")


def _newest(paths: Sequence[Path], back: int) -> Run | None:
    """The record `back` places before the newest of `paths`, which are sorted by age; None where there are too few."""
    for path in reversed(paths):
        try:
            run = read_run(path)
        except FileError as error:
            log.warning("skipped: %s", error)
            continue
        if back == 0:
            return run
        back -= 1
    return None


def _parse(lines: list[bytes]) -> tuple[list[dict[str, Any]], int]:
    try:  # one call for the whole file is several times faster than one per line
        entries = json.loads(b"[" + b",".join(line for line in lines if line.strip()) + b"]", parse_constant=_finite, parse_float=_finite)
        skipped = 0
    except (ValueError, RecursionError):
        entries, skipped = [], 0
        for line in lines:
            try:
                entries.append(json.loads(line, parse_constant=_finite, parse_float=_finite))
            except (ValueError, RecursionError):  # the latter: brackets in brackets without end
                skipped += bool(line.strip())
    events = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("event"), str)]
    return events, skipped + len(entries) - len(events)


def _finite(number: str) -> float:
    """NaN and infinity are no JSON, and nobody can compute with a float too large to be one."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is no number")
    return value


def _assembled(path: Path, events: list[dict[str, Any]], skipped: int) -> Run:
    run = Run(path, dict(events[0]), [], [], events, {}, skipped, events[-1])
    opened: dict[Any, dict[str, Any]] = {}
    closed: dict[Any, dict[str, Any]] = {}
    for entry in events[1:]:
        event = entry["event"]
        if event == "forward":
            if entry.get("state") == "done":
                run.forwards.append(entry)
        elif event == "phase":
            if entry.get("state") == "open":
                opened[entry.get("id")] = entry
            elif entry.get("state") == "closed":
                first = opened.pop(entry.get("id"), {})
                before = {"device_before": first.get("device_memory"), "host_before": first.get("host_memory")}
                row = {**_EMPTY, **entry, **before, "start": first.get("t", entry["t"] - entry["wall"])}
                closed[entry.get("id")] = row
                run.phases.append(row)
        elif event == "span":
            closed.get(entry.get("id"), {}).update(device_span=entry.get("device_span"), device_busy=entry.get("device_busy"))
        elif event == "about":
            run.header.update({name: value for name, value in entry.items() if name not in ("event", "t")})
        elif event == "end":
            run.end = entry
        elif event == "resume":
            run.end = {}
    for entry in opened.values():  # still open when the record ended
        last = run.last.get("t") or entry["t"]
        wall = max(0.0, last - entry["t"])
        run.phases.append({**_EMPTY, **entry, **_reached(events, entry["id"]), "start": entry["t"], "wall": wall, "error": "unfinished"})
    return run


def _reached(events: Sequence[Mapping[str, Any]], number: int) -> dict[str, Any]:
    """How far phase `number` came that nobody closed: units done, and the largest memory its lines tell (bytes; None: none)."""
    told = [entry for entry in events if entry.get("id") == number]
    units = [entry.get("last") if entry["event"] == "forward" and entry.get("state") == "done" else entry.get("done") for entry in told]
    row: dict[str, Any] = {"done": max((n for n in units if n is not None), default=0)}
    for place in ("device", "host"):
        row[f"peak_{place}"] = max((entry[f"{place}_memory"] for entry in told if entry.get(f"{place}_memory") is not None), default=None)
    return row


_EMPTY: Mapping[str, Any] = dict.fromkeys(
    ("id", "parent", "name", "total", "unit", "device_span", "device_busy", "h2d", "d2h", "peak_device", "peak_host", "peak_sum", "error")
    + ("device_before", "host_before")
) | {"done": 0, "wall": 0.0, "facts": {}}
