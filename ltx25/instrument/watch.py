"""What a run is doing, told while it does it: phases, ticks inside them, and the place where a cancel takes effect.

    with watch.phase("text.tower", total=48, unit="layer") as phase:
        for layer in layers:
            x = layer(x)
            phase.tick()

A phase has a total in its own unit (layers, bytes, forwards, chunks). `tick` reports finished units and checks for a
cancel; `within` reports progress inside a unit without counting. Sinks (terminal, host, run record) decide what to show.
Phase names: load.read, load.stage, text.tokenize, text.tower, text.project, text.connect, sample, decode.video,
decode.audio, mux.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class Sink(Protocol):
    """Shows or keeps what a run reports. Called in the thread that computes."""

    wants_preview: bool

    def check(self) -> None:
        """Raise the host's own cancel exception when a cancel was asked for; return otherwise."""

    def opened(self, phase: Phase) -> None:
        """A phase began."""

    def ticked(self, phase: Phase) -> None:
        """`phase.done`, `phase.text` or `phase.facts` changed."""

    def closed(self, phase: Phase) -> None:
        """A phase ended; `phase.error` tells how, None is success."""

    def preview(self, latent: torch.Tensor) -> None:
        """The current x0 of the video, (t, h, w, channels) of batch item 0, once per step if `wants_preview`."""


@dataclass
class Phase:
    """One named stretch of work. Seconds are of the monotonic clock."""

    name: str
    total: int | None
    unit: str
    watch: Watch
    parent: Phase | None
    started: float
    facts: dict[str, Any] = field(default_factory=dict)
    done: int = 0
    text: str = ""
    ended: float | None = None
    error: BaseException | None = None

    def tick(self, n: int = 1, text: str = "", **facts: Any) -> None:
        """`n` more units are finished. Reports, then checks for a cancel (which raises)."""
        self.done += n
        self._report(text, facts)

    def within(self, text: str, **facts: Any) -> None:
        """Progress inside a unit: nothing is counted, the text and facts are shown, a cancel takes effect."""
        self._report(text, facts)

    def _report(self, text: str, facts: dict[str, Any]) -> None:
        self.text = text
        self.facts.update(facts)
        for sink in self.watch.sinks:
            sink.ticked(self)
        self.watch.check()


class Watch:
    """The reporter of one run. Parts get it as an argument; they never know who listens."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self.sinks = tuple(sinks)
        self._open: list[Phase] = []

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "", **facts: Any) -> Iterator[Phase]:
        """Open a phase for the length of a with block; it is closed, with its error, whatever happens inside."""
        self.check()
        phase = Phase(name, total, unit, self, self._open[-1] if self._open else None, time.monotonic(), facts)
        self._open.append(phase)
        for sink in self.sinks:
            sink.opened(phase)
        try:
            yield phase
        except BaseException as error:
            phase.error = error
            raise
        finally:
            phase.ended = time.monotonic()
            self._open.remove(phase)
            for sink in self.sinks:
                sink.closed(phase)

    def check(self) -> None:
        """Raise if a cancel was asked for."""
        for sink in self.sinks:
            sink.check()

    @property
    def wants_preview(self) -> bool:
        return any(sink.wants_preview for sink in self.sinks)

    def preview(self, latent: torch.Tensor) -> None:
        for sink in self.sinks:
            if sink.wants_preview:
                sink.preview(latent)
