"""What is on the device: an engine's parts, and who decides when.

`Arbiter.ready` is called before each phase; the host's arbiter asks the host for memory, `Standalone` makes room among the
engine's own parts. Both give a part a budget, and the part decides what it does with it (part.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from .device import release
from .host_spare import host_has_room
from .instrument import Watch
from .instrument.memory import device_free
from .part import Part

__all__ = ["Arbiter", "Part", "Standalone", "evict", "free_memory", "make_host_room", "release"]


UNKNOWN = 1 << 62  # bytes free where a platform does not say


class Arbiter(Protocol):
    """Decides what is on the device."""

    def ready(self, parts: Sequence[Part], activation_bytes: int, watch: Watch) -> None:
        """Load `parts`, with `activation_bytes` of working memory left free; may unload others."""

    def free(self, device: torch.device) -> int:
        """Bytes a phase may take now, beside what is loaded."""

    def room(self, device: torch.device) -> int:
        """Bytes that a phase could have, weights included, if everything that may leave the device left."""


class Standalone:
    """The arbiter of a process that has the device to itself: keeps parts until another one needs their room."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = list(parts)

    def ready(self, parts: Sequence[Part], activation_bytes: int, watch: Watch) -> None:
        self._parts += [part for part in parts if part not in self._parts]
        device = parts[0].device
        idle = sorted((p for p in self._parts if p.held and p not in parts), key=lambda part: part.held)
        need = activation_bytes + sum(p.wanted - p.held for p in parts if not p.loaded or p.streams)
        if all(p.loaded for p in parts) and need > free_memory(device) + sum(p.held for p in idle):
            need = activation_bytes  # what streams now would stream still
        while idle and free_memory(device) < need:
            evict(idle.pop())
        make_host_room(parts, self._parts)
        for part in parts:
            short = activation_bytes - free_memory(device)
            if part.loaded and short > 0:
                part.shrink(short)
        for number, part in enumerate(parts):
            others = sum(p.wanted - p.held for p in parts[number + 1 :] if not p.loaded)
            part.load(watch, free_memory(device) + part.held - activation_bytes - others)

    def free(self, device: torch.device) -> int:
        return free_memory(device)

    def room(self, device: torch.device) -> int:
        return free_memory(device) + sum(part.held for part in self._parts)


def evict(part: Part) -> None:
    """Take a part off its device for another one. What is parked of it in host memory stays there, where that is not the device."""
    if part.device.type == "cpu":
        part.unload()
    else:
        part.rest()


def make_host_room(parts: Sequence[Part], every: Sequence[Part]) -> None:
    """Let go of the host memory of parts that left the device, where `parts`, about to be loaded, may want it for their blocks."""
    need = sum(part.bytes - part.held for part in parts if not part.loaded and not part.rests)
    for part in every:
        if need and part.rests and part not in parts and not host_has_room(need, part.device):
            part.unload()


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on `device` (host memory for the CPU)."""
    free = device_free(device)
    return UNKNOWN if free is None else free
