"""The run record: one JSON-lines file per run, on disk while the run goes on.

    record = RunRecord(folder, {**machine(device), "files": files_facts(headers), **request_facts(...)}, prompts={"prompt": text})
    with record:                                       # opens the file, before the first phase
        watch = Watch([host_sink, record], DeviceMeter(device))
        ...
        watch.finish()
    record.path, record.table()

Each line is one JSON object with `event` and `t` (s of the monotonic clock since the run began):
run (the header), about (facts that came later), resume (a later part of the same run), phase (state open / closed),
span (a device_span that became known after its phase), forward (state done / running), chunk, tick, beat, profile, note,
end. A line is written whole with one write: a killed run leaves a valid file that names what was running.
A disk that cannot be written costs the record and one warning, never the run; no piece of the record stays.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .age import now_text
from .header import FORMAT, prompts_facts
from .table import phase_table
from .unfinished import lock, mark_unfinished
from .watch import QUIET_UNITS, Phase, Sink, why_silent

log = logging.getLogger(__name__)

TICK_EVERY = 0.25  # s between lines for layers and bytes; forwards and chunks are all written
OF_THE_TICK = ("step", "steps", "forward", "running", "legs", "kind", "seconds")  # facts of one forward, not of its phase


class RunRecord(Sink):
    """Writes one run. Enter it for each part of the run (in a node graph, each node); every exit leaves a whole record.

    `path` is None where no file could be opened or written to its end. Prompts are kept only with `record_prompts`, and are cut out of texts
    and errors otherwise.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any], prompts: Mapping[str, str] | None = None, record_prompts: bool = False) -> None:
        self.path: Path | None = None
        self.header: dict[str, Any] = dict(header)
        self.phases: list[dict[str, Any]] = []  # closed ones, as written
        self.wall = 0.0  # s inside the parts so far
        self.status = "running"
        self._folder = folder
        self._prompts = dict(prompts or {})
        self._keep_prompts = record_prompts
        self._fd: int | None = None
        self._lost = False
        self._lock = threading.Lock()
        self._zero = time.monotonic()
        self._entered = self._zero
        self._ids: dict[int, int] = {}  # id of an open Phase -> its number in the file
        self._count = 0
        self._late: dict[int, dict[str, Any]] = {}  # id of a closed Phase whose device_span is owed -> its row
        self._ticked: dict[int, float] = {}
        self._stopped: dict[str, Any] | None = None

    def __enter__(self) -> RunRecord:
        self._entered = time.monotonic()
        self._stopped = None
        if self.path is None and not self._lost:
            for line in self._attempt(lambda: mark_unfinished(self._folder)) or ():
                log.info("%s", line)
            self._attempt(self._create)
            prompts = {"prompts": prompts_facts(self._prompts, self._keep_prompts)} if self._prompts else {}
            self._write("run", format=FORMAT, started=now_text(), pid=os.getpid(), **self.header, **prompts)
        elif self.path is not None:
            self._attempt(lambda: self._open(self.path, os.O_APPEND))
            self._write("resume", started=now_text())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.wall += time.monotonic() - self._entered
        self.status = "done" if error is None else "failed" if isinstance(error, Exception) else "cancelled"
        where = self._stopped or {}
        self._write("end", status=self.status, error=self._error(error), wall=self.wall, accounted=self.accounted, **where)
        with self._lock:
            fd, self._fd = self._fd, None
            if fd is not None:
                self._attempt(lambda: os.close(fd))  # a disk may say here that it did not take the last lines

    def fail(self, where: str, error: Exception) -> None:
        """End a run that was begun as failed, for what stopped it between its parts: `where` is no phase (in a node graph, a node that runs none)."""
        self.__enter__()
        self._stopped = {"phase": where}
        self.__exit__(type(error), error, None)

    def describe(self, prompts: Mapping[str, str] | None = None, **facts: Any) -> None:
        """Add to the header what was not known when the run began (geometry, tokens, legs in a node graph)."""
        self.header.update(facts)
        self._prompts.update(prompts or {})
        told = {"prompts": prompts_facts(self._prompts, self._keep_prompts)} if prompts else {}  # all: a reader keeps the last
        self._write("about", **facts, **told)

    def note(self, event: str, **facts: Any) -> None:
        """One line of another kind: "profile", "choice" (a back end picked by timing), "warning"."""
        self._write(event, **facts)

    @property
    def prompts(self) -> int:
        """How many prompts it was told."""
        return len(self._prompts)

    @property
    def accounted(self) -> float | None:
        """Share of the wall time inside top-level phases."""
        covered = sum(row["wall"] for row in self.phases if row["parent"] is None)
        return covered / self.wall if self.wall > 0 else None

    def table(self) -> str:
        """The phase table of what was run so far, plain text."""
        return phase_table(self.phases, self.wall or None)

    def opened(self, phase: Phase) -> None:
        self._count += 1
        self._ids[id(phase)] = self._count
        parent = self._ids.get(id(phase.parent)) if phase.parent is not None else None
        head = {"id": self._count, "parent": parent, "name": phase.name, "total": phase.total, "unit": phase.unit}
        self._write("phase", state="open", **head, facts=phase.facts, **_memory(phase))

    def ticked(self, phase: Phase) -> None:
        number = self._ids.get(id(phase))
        if phase.unit == "forward":
            self._forward(phase, number)
            return
        now = time.monotonic()
        quiet = phase.unit in QUIET_UNITS or not phase.unit
        if quiet and phase.done != phase.total and now - self._ticked.get(number, 0.0) < TICK_EVERY:
            return
        self._ticked[number] = now
        self._write("tick" if quiet else "chunk", **self._where(phase), unit=phase.unit, facts=phase.latest, **_memory(phase))

    def closed(self, phase: Phase) -> None:
        number = self._ids.pop(id(phase), None)
        row = {
            "id": number,
            "parent": self._ids.get(id(phase.parent)) if phase.parent is not None else None,
            "name": phase.name,
            "done": phase.done,
            "total": phase.total,
            "unit": phase.unit,
            "wall": phase.elapsed,
            "device_span": phase.device_span,
            "device_busy": phase.device_busy,
            "h2d": phase.h2d,
            "d2h": phase.d2h,
            "peak_device": phase.peak_device,
            "peak_host": phase.peak_host,
            "peak_sum": phase.peak_sum,
            "facts": {name: value for name, value in phase.facts.items() if name not in OF_THE_TICK},
            "error": self._error(phase.error),
        }
        if phase.error is not None and self._stopped is None:  # the innermost phase closes first
            self._stopped = {"phase": phase.name, "at": self._redacted(phase.position)}
        self.phases.append(row)
        self._late.pop(id(phase), None)
        if phase.device_span is None:  # may still come; the phase itself is not kept: its error holds frames and tensors
            self._late[id(phase)] = row
        self._write("phase", state="closed", **row)

    def measured(self, phase: Phase) -> None:
        row = self._late.pop(id(phase), None)
        if row is None:
            return
        row.update(device_span=phase.device_span, device_busy=phase.device_busy)
        self._write("span", id=row["id"], name=phase.name, device_span=phase.device_span, device_busy=phase.device_busy)

    def beat(self, phase: Phase) -> None:
        self._write("beat", **self._where(phase) | {"at": f"{phase.position}{why_silent()}".removeprefix(", ")}, elapsed=phase.elapsed, host_memory=phase.host_memory)

    def noted(self, event: str, text: str, facts: dict[str, Any]) -> None:
        if facts.get("begin") is not None:  # inside a phase: the innermost that is open
            facts = {**facts, "begin": facts["begin"] - self._zero, "id": max(self._ids.values(), default=None)}
        self._write(event, **facts, text=text)

    def _forward(self, phase: Phase, number: int | None) -> None:
        """One line for the group that completed, one for the group that runs now: the last line names it."""
        facts, lines = phase.latest, []
        head = {"phase": phase.name, "id": number}
        if facts.get("forward") is not None:
            done = {name: facts.get(name) for name in ("step", "steps", "kind", "seconds")}
            legs = "+".join(facts.get("legs") or ())  # scalars only: such lines load several times faster
            lines.append(("forward", {"state": "done", **head, **_span(facts["forward"]), "of": phase.total, "legs": legs, **done, **_memory(phase)}))
        else:
            lines.append(("tick", {**self._where(phase), "text": phase.text}))
        if facts.get("running") is not None:
            lines.append(("forward", {"state": "running", **head, **_span(facts["running"]), "of": phase.total, "at": phase.position}))
        self._write_lines(lines)

    def _where(self, phase: Phase) -> dict[str, Any]:
        return {"phase": phase.name, "id": self._ids.get(id(phase)), "done": phase.done, "total": phase.total, "at": phase.position}

    def _error(self, error: BaseException | None) -> str | None:
        if error is None:
            return None
        return self._redacted(f"{type(error).__name__}: {error}").split("\n", 1)[0][:500]  # what is left of a prompt would not be found

    def _redacted(self, text: str) -> str:
        if not self._keep_prompts:
            for prompt in sorted(self._prompts.values(), key=len, reverse=True):  # one may begin with another
                if len(prompt) > 3:
                    text = text.replace(prompt, "[prompt]")
        return text

    def _write(self, event: str, **facts: Any) -> None:
        self._write_lines([(event, facts)])

    def _write_lines(self, lines: list[tuple[str, dict[str, Any]]]) -> None:
        if self._fd is None:
            return
        t = round(time.monotonic() - self._zero, 6)
        data = "".join(_line({"event": event, "t": t, **self._clean(facts)}) for event, facts in lines).encode()
        with self._lock:
            if self._fd is not None:
                self._attempt(lambda: _write_all(self._fd, data))

    def _clean(self, facts: dict[str, Any]) -> dict[str, Any]:
        return {name: self._redacted(value) if name in ("text", "at") and isinstance(value, str) else value for name, value in facts.items()}

    def _create(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        now = time.time()  # in UTC, so that names sort by age wherever the clock is read
        stamp = time.strftime("%Y-%m-%dT%H-%M-%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
        name = f"{stamp}_{os.getpid()}_{secrets.token_hex(3)}.jsonl"
        self._open(self._folder / name, os.O_CREAT | os.O_EXCL)
        self.path = self._folder / name

    def _open(self, path: Path, flags: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | flags | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0), 0o644)
        lock(self._fd)

    def _attempt(self, action: Any) -> Any:
        """Run `action`; when the disk refuses, give the record up with the run's one warning.

        What was written of it goes: without its end it would be taken for the record of a killed run.
        """
        try:
            return action()
        except OSError as error:
            if not self._lost:
                log.warning("The run record in %s is lost (%s); the render goes on without one.", self._folder, error.strerror or error)
            self._lost = True
            fd, path, self._fd, self.path = self._fd, self.path, None, None
            with contextlib.suppress(OSError):
                if fd is not None:
                    os.close(fd)
            with contextlib.suppress(OSError):
                if path is not None:
                    path.unlink()
            return None


def _span(forwards: tuple[int, int]) -> dict[str, int]:
    return {"first": forwards[0], "last": forwards[1]}


def _memory(phase: Phase) -> dict[str, Any]:
    return {"device_memory": phase.device_memory, "host_memory": phase.host_memory}


def _line(entry: dict[str, Any]) -> str:
    try:
        return json.dumps(entry, default=_plain, allow_nan=False, separators=(",", ":")) + "\n"
    except ValueError:  # a NaN or infinity somewhere: JSON has neither
        return json.dumps(_finite(entry), default=_plain, separators=(",", ":")) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    """What JSON does not know: numbers of other libraries as numbers, sets as lists, the rest by name."""
    if hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1 and getattr(value, "device", None) is None:
        return value.item()
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
