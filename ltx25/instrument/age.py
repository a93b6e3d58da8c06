"""The order of records in time, and their first line, which tells it.

A record was begun at the time its header says, which has its offset from UTC: names of files are for people, and of older
records they are local time, which a change of time zone reorders. Copies and marks of killed runs change the time of the
file, so that this counts only where the header cannot be true: where it lies after the last write of its own file, as after
a clock was set back, or where there is none. What lies in the future all the same was begun by a clock that ran ahead;
nobody knows when, and it must not stay the last one for ever: it counts as the oldest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

LONGEST = 4 << 20  # bytes of a line: prompts may be in it
SLACK = 60.0  # s that clocks, and times of files, are apart


def now_text() -> str:
    """Wall-clock time with its offset, ms; durations never use it."""
    return datetime.fromtimestamp(time.time()).astimezone().isoformat(timespec="milliseconds")


def by_age(paths: Iterable[Path]) -> list[Path]:
    """Oldest first. Reads the first line of each."""
    return sorted(paths, key=lambda path: begun_at(path, _header(path)))


def begun_at(path: Path, header: Mapping[str, Any]) -> tuple[float, str]:
    """s since 1970 when a record was begun, and its name, for those of one moment; see above."""
    try:
        written = path.stat().st_mtime
    except OSError:
        written = 0.0
    said = _seconds(header.get("started"))
    begun = written if said is None or said > written + SLACK else said
    return (begun if begun <= time.time() + SLACK else 0.0), path.name


def first_event(file: BinaryIO) -> dict[str, Any] | None:
    """The first line of an open record; None where it is no event."""
    return event_of(file.readline(LONGEST))


def event_of(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # the latter: brackets in brackets without end
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _header(path: Path) -> dict[str, Any]:
    try:
        if path.is_file():  # opening a pipe would wait for who writes to it
            with path.open("rb") as file:
                return first_event(file) or {}
    except OSError:
        pass
    return {}


def _seconds(text: Any) -> float | None:
    """s since 1970 of what `now_text` wrote; older records have no ms and no colon in the offset."""
    for form in ("%Y-%m-%dT%H:%M:%S.%f%z", "%Y-%m-%dT%H:%M:%S%z"):
        try:
            return datetime.strptime(str(text), form).timestamp()
        except (ValueError, OverflowError):
            continue
    return None
