"""Phases and ticks as lines of text: the command line's and the log's view of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .units import bytes_text, rate_text, seconds_text
from .watch import QUIET_UNITS, Phase, Sink, why_silent

TICK_EVERY = 0.5  # s between lines of quick units (layers, bytes); forwards and chunks all get theirs


class TextSink(Sink):
    """Writes one line per event through `write` (print, or a logger's info). The heartbeat gets lines too."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._shown: dict[int, float] = {}

    def opened(self, phase: Phase) -> None:
        self._shown[id(phase)] = time.monotonic()
        total = "" if phase.total is None else f", {_count(phase, phase.total)}"
        self._say(phase, f"begins{total}")

    def ticked(self, phase: Phase) -> None:
        quick = phase.unit in QUIET_UNITS or not phase.unit
        now = time.monotonic()
        if quick and now - self._shown.get(id(phase), 0.0) < TICK_EVERY:
            return
        self._shown[id(phase)] = now
        self._say(phase, _progress(phase, now))

    def closed(self, phase: Phase) -> None:
        self._shown.pop(id(phase), None)
        took = seconds_text(phase.elapsed)
        if phase.error is None:
            self._say(phase, f"done in {took}{_rate(phase)}")
        else:
            self._say(phase, f"stopped after {took} at {phase.position or 'its start'} ({type(phase.error).__name__})")

    def beat(self, phase: Phase) -> None:
        at = f"{phase.position}, {phase.name} " if phase.position else ""  # the phase, not what it is at
        self._say(phase, f"{at}has run for {seconds_text(phase.elapsed)}{why_silent()}")

    def noted(self, event: str, text: str, facts: dict) -> None:
        with self._lock:
            self._write(f"{event}: {text}")

    def _say(self, phase: Phase, text: str) -> None:
        with self._lock:
            self._write(f"{phase.name}: {text}")


def _progress(phase: Phase, now: float) -> str:
    if phase.text and (phase.unit in ("forward", "byte") or phase.text.startswith(phase.unit)):
        return phase.text  # the part's own words count better than ours
    done = _count(phase, phase.done) if phase.total is None else f"{_count(phase, phase.done)} of {_count(phase, phase.total)}"
    if phase.unit not in ("byte", ""):
        total = "" if phase.total is None else f"/{phase.total}"
        done = f"{phase.unit} {phase.done}{total}"
    elif not phase.unit:
        return phase.text
    rate = f" at {rate_text(phase.done / (now - phase.started))}" if phase.unit == "byte" and now > phase.started else ""
    return f"{done}{rate}" + (f" - {phase.text}" if phase.text else "")


def _count(phase: Phase, n: int) -> str:
    return bytes_text(n) if phase.unit == "byte" else f"{n} {phase.unit}{'' if n == 1 else 's'}".strip()


def _rate(phase: Phase) -> str:
    if phase.unit == "byte" and phase.elapsed > 0 and phase.done:
        return f" ({bytes_text(phase.done)} at {rate_text(phase.done / phase.elapsed)})"
    return ""
