"""Records of runs that were killed: found by the next run, and given the `end` line they could not write."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .age import LONGEST, event_of, first_event, now_text
from .header import FORMAT

TAIL = 16 << 10  # bytes read from the end of a record first: several lines, as a rule
NEWEST = 200  # records looked at: killed runs are among the latest


def lock(fd: int) -> bool:
    """Hold an open record for as long as this process lives; a kill lets go of it. False where it is held by another."""
    try:
        import fcntl
    except ImportError:
        return _lock_windows(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def mark_unfinished(folder: Path) -> list[str]:
    """Append an `end` with status "killed" to every record in `folder` that has none and that no process holds.

    Returns one sentence per record marked.
    """
    told = []
    for path in sorted(folder.glob("*.jsonl"), reverse=True)[:NEWEST]:
        try:
            last = _last_event(path) if path.is_file() else None  # opening a pipe would wait for who writes to it
            if last is not None and last.get("event") != "end":
                told += _mark(path, last)
        except OSError:
            continue  # not ours to write: leave it
    return told


def _mark(path: Path, last: dict) -> list[str]:
    fd = os.open(path, os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0))
    try:
        if not lock(fd):
            return []
        end = {
            "event": "end",
            "t": last.get("t"),
            "status": "killed",
            "error": None,
            "phase": last.get("phase") or last.get("name"),
            "at": last.get("at") or last.get("text") or "",
            "marked": now_text(),
        }
        size = os.lseek(fd, 0, os.SEEK_END)
        os.lseek(fd, max(0, size - 1), os.SEEK_SET)
        torn = os.read(fd, 1) != b"\n"
        os.write(fd, (b"\n" if torn else b"") + json.dumps(end, separators=(",", ":")).encode() + b"\n")
    finally:
        os.close(fd)
    return [f"An earlier run ended without a word in {end['phase']}: {end['at']} ({path.name})"]


def _last_event(path: Path) -> dict | None:
    """The last whole line of a run record that is an event; None for any other file, which is left alone."""
    with path.open("rb") as file:
        first = first_event(file)
        if first is None or first["event"] != "run" or first.get("format") != FORMAT:
            return None
        size, tail, last = file.seek(0, os.SEEK_END), TAIL, None
        while last is None:
            file.seek(max(0, size - tail))
            last = next((event for event in map(event_of, reversed(file.read().splitlines())) if event is not None), None)
            if tail >= min(size, 2 * LONGEST):  # a torn line behind the longest whole one
                break
            tail *= 8
    return last


def _lock_windows(fd: int) -> bool:
    import msvcrt

    position = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        os.lseek(fd, 1 << 40, os.SEEK_SET)  # a byte no record reaches: Windows forbids reading what is locked
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    except OSError:
        return False
    finally:
        os.lseek(fd, position, os.SEEK_SET)
    return True
