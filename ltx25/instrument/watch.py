"""What a run is doing, told while it does it: phases, ticks inside them, and the place where a cancel takes effect.

    with watch.phase("text.tower", total=48, unit="layer") as phase:
        for layer in layers:
            x = layer(x)
            phase.tick()

A phase has a total in its own unit (layers, bytes, forwards, chunks). `tick` reports finished units and checks for a
cancel; `within` reports progress inside a unit without counting; `moved` counts bytes between host and device. Phases
nest. When nothing was told for 0.9 s, a thread of the watch tells every sink that the open phase still runs (`beat`).
Sinks (terminal, host, run record) decide what to show.
Phase names: load.read (weights from their file), load.stage (what is done to loaded ones: a LoRA put on, blocks back from host
memory), text.tokenize, text.tower, text.project, text.connect, text.duration,
encode.video, encode.audio, sample, upscale, refine, decode.video, decode.audio, mux; plan.read (run records, for a plan).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...kernels.dispatch import preparing

QUIET_UNITS = ("layer", "block", "frame", "byte", "record")  # many and quick: sinks may show some of their ticks only
SILENCE = 0.9  # s without an event before the heartbeat speaks: promised is 1 s


class Sink:
    """Shows or keeps what a run reports. Every method does nothing until a subclass says otherwise.

    All but `beat` are called in the thread that computes. `beat` comes from the watch's own thread, possibly while the
    computing thread is inside another method: it must be short, must not touch the device and must not ask the host
    for a cancel (a host may clear its flag in the wrong thread).
    """

    wants_preview: bool = False

    def check(self) -> None:
        """Raise the host's own cancel exception when a cancel was asked for; return otherwise."""

    def opened(self, phase: Phase) -> None:
        """A phase began."""

    def ticked(self, phase: Phase) -> None:
        """`phase.done`, `phase.text`, `phase.facts` or `phase.latest` changed."""

    def closed(self, phase: Phase) -> None:
        """A phase ended; `phase.error` tells how, here and not later; None is success."""

    def measured(self, phase: Phase) -> None:
        """A number about a phase closed earlier arrived: its device_span or device_busy."""

    def beat(self, phase: Phase) -> None:
        """Nothing was told for 0.9 s; `phase`, the innermost open one, still runs (`phase.elapsed`, s)."""

    def noted(self, event: str, text: str, facts: dict[str, Any]) -> None:
        """Something about the run that is no phase: a profiled step ("profile"), a choice made by timing ("choice")."""

    def preview(self, latent: torch.Tensor) -> None:
        """The current x0 of the video, (t, h, w, channels) of batch item 0, once per step if `wants_preview`."""


class Tick(Protocol):
    """What a part that only counts is given: `Phase.tick`, or what stands for it."""

    def __call__(self, n: int = 1, text: str = "") -> None:
        """`n` more units of work are done; may raise to cancel."""


class Meter(Protocol):
    """Measures phases (meter.DeviceMeter). A value it cannot give stays None; it never waits for the device."""

    def opened(self, phase: Phase) -> None: ...

    def ticked(self, phase: Phase) -> None: ...

    def closed(self, phase: Phase) -> None: ...

    def beat(self, phase: Phase) -> None:
        """Called by the heartbeat's thread: host numbers only."""

    def settled(self, wait: bool) -> list[Phase]:
        """Closed phases whose device_span became known since the last call; `wait`: give the device up to 1 s."""


@dataclass
class Phase:
    """One named stretch of work. Seconds are of the monotonic clock, bytes are bytes; None is "not known"."""

    name: str
    total: int | None
    unit: str
    watch: Watch
    parent: Phase | None
    started: float
    facts: dict[str, Any] = field(default_factory=dict)
    done: int = 0
    text: str = ""
    doing: str = ""  # what runs right now, where the part knows better than "the next unit"
    latest: dict[str, Any] = field(default_factory=dict)  # the facts of the last tick or within alone
    ended: float | None = None
    error: BaseException | None = None  # while the phase is being closed; gone behind that, with the frames it holds
    device_span: float | None = None  # s between events on the device's streams at open and close, launch gaps included
    device_busy: float | None = None  # s, union of kernel and copy intervals of a profiler trace
    h2d: int | None = None
    d2h: int | None = None
    peak_device: int | None = None
    peak_host: int | None = None
    peak_sum: int | None = None  # device + host, on devices that share one memory
    device_memory: int | None = None  # the last sample, at most a few a second
    host_memory: int | None = None

    @property
    def elapsed(self) -> float:
        return (time.monotonic() if self.ended is None else self.ended) - self.started

    @property
    def position(self) -> str:
        """What runs right now, in words: `doing`, or the unit after the last finished one."""
        if self.doing or not self.unit or self.unit == "byte":
            return self.doing or self.text
        total = "" if self.total is None else f"/{self.total}"
        return f"{self.unit} {self.done + 1 if self.total is None else min(self.done + 1, self.total)}{total}"

    def tick(self, n: int = 1, text: str = "", **facts: Any) -> None:
        """`n` more units are finished. Reports, then checks for a cancel (which raises)."""
        self.done += n
        self._report(text, facts)

    def within(self, text: str, **facts: Any) -> None:
        """Progress inside a unit: nothing is counted, the text and facts are shown, a cancel takes effect."""
        self._report(text, facts)

    def moved(self, h2d: int = 0, d2h: int = 0) -> None:
        """Count bytes sent to or fetched from the device, here and in every phase around this one. Reports nothing."""
        phase: Phase | None = self
        while phase is not None:
            phase.h2d = (phase.h2d or 0) + h2d
            phase.d2h = (phase.d2h or 0) + d2h
            phase = phase.parent

    def _report(self, text: str, facts: dict[str, Any]) -> None:
        self.text = text
        self.latest = facts
        self.facts.update(facts)
        self.watch._ticked(self)


class Watch:
    """The reporter of one run. Parts get it as an argument; they never know who listens."""

    def __init__(self, sinks: Sequence[Sink] = (), meter: Meter | None = None) -> None:
        self.sinks = tuple(sinks)
        self._meter = meter
        self._open: list[Phase] = []
        self._heart = _Heart(self)

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "", **facts: Any) -> Iterator[Phase]:
        """Open a phase for the length of a with block; it is closed, with its error, whatever happens inside."""
        self.check()
        phase = Phase(name, total, unit, self, self._open[-1] if self._open else None, time.monotonic(), facts)
        if self._meter is not None:
            self._meter.opened(phase)
        self._open.append(phase)
        self._heart.start()
        try:
            for sink in self.sinks:
                sink.opened(phase)
            yield phase
        except BaseException as error:
            phase.error = error
            raise
        finally:
            try:
                self._closed(phase)
            finally:
                phase.error = None  # error -> its frames -> phase -> error would keep every tensor of those frames until a collection

    def _closed(self, phase: Phase) -> None:
        phase.ended = time.monotonic()
        self._open.remove(phase)
        late: list[Phase] = []
        if self._meter is not None:
            self._meter.closed(phase)
            late = self._meter.settled(wait=False)
        for sink in self.sinks:
            sink.closed(phase)
        self._measured([other for other in late if other is not phase])
        self._heart.told()
        if not self._open:
            self._heart.stop()

    def check(self) -> None:
        """Raise if a cancel was asked for."""
        for sink in self.sinks:
            sink.check()

    def note(self, event: str, text: str, **facts: Any) -> None:
        """Tell something that is no phase; `text` for people, `facts` for the record."""
        for sink in self.sinks:
            if hasattr(sink, "noted"):
                sink.noted(event, text, facts)

    def finish(self) -> None:
        """The run is over: collect what the device still owes (its spans), waiting for it at most 1 s."""
        if self._meter is not None:
            self._measured(self._meter.settled(wait=True))

    @property
    def current(self) -> Phase | None:
        """The innermost open phase."""
        return self._open[-1] if self._open else None

    @property
    def wants_preview(self) -> bool:
        return any(sink.wants_preview for sink in self.sinks)

    def preview(self, latent: torch.Tensor) -> None:
        for sink in self.sinks:
            if sink.wants_preview:
                sink.preview(latent)

    def _ticked(self, phase: Phase) -> None:
        self._heart.told()
        if self._meter is not None:
            self._meter.ticked(phase)
        for sink in self.sinks:
            sink.ticked(phase)
        self.check()

    def _measured(self, phases: list[Phase]) -> None:
        for phase in phases:
            for sink in self.sinks:
                if hasattr(sink, "measured"):
                    sink.measured(phase)


def why_silent() -> str:
    """For a heartbeat: what keeps a phase silent, where that is a kernel's first use; else nothing."""
    name = preparing()
    return f", preparing kernel {name}, which takes a while the first time" if name else ""


class _Heart:
    """A thread that lives while a phase is open and speaks when nobody else did."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._last = 0.0
        self._stop: threading.Event | None = None
        self._listeners = [sink for sink in watch.sinks if hasattr(sink, "beat")]

    def told(self) -> None:
        self._last = time.monotonic()

    def start(self) -> None:
        self.told()
        if self._stop is None and self._listeners:
            self._stop = threading.Event()
            threading.Thread(target=self._run, args=(self._stop,), name="ltx25-heartbeat", daemon=True).start()

    def stop(self) -> None:
        if self._stop is not None:
            self._stop.set()
            self._stop = None

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(max(0.001, self._last + SILENCE - time.monotonic())):
            phase = self._watch.current
            if phase is None or time.monotonic() - self._last < SILENCE:
                continue
            self.told()
            if self._watch._meter is not None:
                self._watch._meter.beat(phase)
            for sink in list(self._listeners):
                try:
                    sink.beat(phase)
                except Exception as error:  # a sink that cannot show must not end the heartbeat of the others
                    self._listeners.remove(sink)
                    logging.getLogger(__name__).warning("%s shows no heartbeat any more: %s", type(sink).__name__, error)
