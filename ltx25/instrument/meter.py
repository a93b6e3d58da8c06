"""Measures phases without ever waiting for the device: events on its streams, and memory of device and host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .memory import device_now, device_peak, host_now, host_peak, is_unified, query, reset_device_peak
from .watch import Phase

SAMPLE_EVERY = 0.25  # s between memory samples inside a phase
LAST_WAIT = 1.0  # s `settled(wait=True)` gives the device at the end of a run


class DeviceMeter:
    """The meter of one run on one device.

    device_span: from an event on the current stream when a phase opens to the latest of one event per stream when it
    closes; it becomes known when that event has completed, maybe after the phase. None without CUDA, or while a stream is
    being captured. peak_device is exact on CUDA and XPU (the process's peak counter is reset at each phase's edges), a
    maximum of samples elsewhere. peak_host is exact where the phase set a new peak of the process, else of samples.
    """

    def __init__(self, device: torch.device, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        """`streams`: the engine's own streams besides the current one (copies, prefetch)."""
        self.device = device
        self._streams = list(streams)
        self._unified = is_unified(device)
        self._open: list[_Running] = []
        self._owed: list[_Running] = []
        self._sampled = 0.0

    def opened(self, phase: Phase) -> None:
        self._fold_peaks()
        self._open.append(_Running(phase, self._event(None), host_peak()))
        self._sample()

    def ticked(self, phase: Phase) -> None:
        if time.monotonic() - self._sampled >= SAMPLE_EVERY:
            self._sample()
        phase.device_memory, phase.host_memory = self._device_memory, self._host_memory

    def beat(self, phase: Phase) -> None:
        phase.host_memory = host_now()  # written by one thread at a time in effect: the computing one is silent now
        phase.peak_host = _larger(phase.peak_host, phase.host_memory)

    def closed(self, phase: Phase) -> None:
        self._fold_peaks()
        self._sample()
        running = next(running for running in self._open if running.phase is phase)
        self._open.remove(running)
        reached = host_peak()
        if reached is not None and running.host_peak is not None and reached > running.host_peak:
            phase.peak_host = reached  # the process never held more, so this phase did
        if self._unified and phase.peak_device is not None and phase.peak_host is not None:
            phase.peak_sum = phase.peak_device + phase.peak_host
        if running.begin is not None:
            ends = [self._event(stream) for stream in (None, *self._streams)]
            if None not in ends:
                running.ends = ends
                self._owed.append(running)

    def settled(self, wait: bool) -> list[Phase]:
        deadline = time.monotonic() + (LAST_WAIT if wait else 0.0)
        done: list[Phase] = []
        while self._owed:
            for running in [running for running in self._owed if all(end.query() for end in running.ends)]:
                self._owed.remove(running)
                milliseconds = [query(lambda end=end, begin=running.begin: begin.elapsed_time(end)) for end in running.ends]
                known = [ms for ms in milliseconds if ms is not None]
                running.phase.device_span = max(known) / 1000 if known else None
                done.append(running.phase)
            if time.monotonic() >= deadline:
                break
            time.sleep(0.002)
        return done

    def _event(self, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        if self.device.type != "cuda" or query(torch.cuda.is_current_stream_capturing) is not False:
            return None
        return query(lambda: _recorded(stream or torch.cuda.current_stream(self.device)))

    def _fold_peaks(self) -> None:
        """Every open phase contains the stretch since the last edge: give its peak to all of them, start a new one."""
        peak = device_peak(self.device) if self._open else None
        for running in self._open:
            running.phase.peak_device = _larger(running.phase.peak_device, peak)
        reset_device_peak(self.device)

    def _sample(self) -> None:
        self._sampled = time.monotonic()
        self._device_memory, self._host_memory = device_now(self.device), host_now()
        for running in self._open:
            phase = running.phase
            phase.device_memory, phase.host_memory = self._device_memory, self._host_memory
            phase.peak_device = _larger(phase.peak_device, self._device_memory)
            phase.peak_host = _larger(phase.peak_host, self._host_memory)


@dataclass
class _Running:
    phase: Phase
    begin: torch.cuda.Event | None
    host_peak: int | None
    ends: Sequence[torch.cuda.Event] = ()


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _larger(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)
