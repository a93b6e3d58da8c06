"""What a plan says: phases to come, peaks of memory, and whether that fits a budget."""

from __future__ import annotations

from dataclasses import dataclass

from ..request import Request
from .units import bytes_text, seconds_text


@dataclass(frozen=True)
class Expected:
    """One phase to come: s, what the number rests on, and whether it goes beyond what was measured.

    between: least and most s that what was measured allows; None where it allows no such words.
    """

    name: str
    seconds: float
    basis: str
    extrapolated: bool
    between: tuple[float, float] | None


@dataclass(frozen=True)
class Budget:
    """Limits; None: no limit. s, bytes. together: of device and host, where they are one memory."""

    seconds: float | None
    device: int | None
    host: int | None
    together: int | None = None


UNLIMITED = Budget(None, None, None)


@dataclass(frozen=True)
class Peak:
    """Most memory of a render, bytes, and the phase and what else the number rests on.

    need: what must be there for it: the most that measurements leave open, and what the engine's own checks ask for.
    known: whether the measurements tell how far off the number may be.
    """

    bytes: int
    need: int
    basis: str
    known: bool


@dataclass(frozen=True)
class Plan:
    """A render as predicted. `on_device` is None on a CPU, where all is host memory. `tokens`: video, audio.

    first: width and height of the first of two stages, px; None where there is one.
    """

    request: Request
    tokens: tuple[int, int]
    forwards: int
    phases: tuple[Expected, ...]
    on_device: Peak | None
    on_host: Peak
    notes: tuple[str, ...]
    first: tuple[int, int] | None

    @property
    def device(self) -> int | None:
        """Peak bytes."""
        return None if self.on_device is None else self.on_device.bytes

    @property
    def host(self) -> int:
        """Peak bytes."""
        return self.on_host.bytes

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def between(self) -> tuple[float, float] | None:
        """Least and most s of the whole; None where a phase's are not known."""
        known = [phase.between for phase in self.phases if phase.between is not None]
        if len(known) < len(self.phases):
            return None
        return sum(least for least, _ in known), sum(most for _, most in known)

    def beyond(self, budget: Budget) -> list[str]:
        """What does not fit, one reason each."""
        reasons = []
        if budget.seconds is not None and self.seconds > budget.seconds:
            reasons.append(f"it takes about {seconds_text(self.seconds, rough=True)}, and {seconds_text(budget.seconds, rough=True)} are given")
        for name, peak, have in (("device", self.on_device, budget.device), ("host", self.on_host, budget.host)):
            if peak is not None and have is not None and peak.need > have:
                reasons.append(f"it needs {bytes_text(peak.need)} of {name} memory, and {bytes_text(have)} are given")
        if self.on_device is not None and budget.together is not None:
            need = self.on_device.need + self.on_host.need
            if need > budget.together:
                reasons.append(f"it needs {bytes_text(need)} of the memory that device and host share, and {bytes_text(budget.together)} are given")
        return reasons
