"""What is on the device: an engine's parts, each loaded and dropped as a whole, and who decides when.

A part is a group of modules that one phase needs together. `Arbiter.ready` is called before each phase; the host's
arbiter asks the host for memory, `Standalone` makes room among the engine's own parts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from .checkpoint import Header, check, fill, held_bytes
from .formats import Held
from .instrument import Watch


@dataclass(frozen=True)
class Piece:
    """One module of a part and the tensors of a file that fill it.

    dtype: what floating tensors become on the device; keep: patterns of parameters that stay as stored.
    unused: patterns of tensors below the prefix that belong to other parts or that no part needs.
    held: what becomes of quantised weights.
    """

    name: str
    build: Callable[[], nn.Module]
    header: Header
    prefix: str
    dtype: torch.dtype
    unused: tuple[str, ...]
    keep: tuple[str, ...]
    held: Held = Held.EXACT


class Part:
    """A loadable group of modules. `bytes` is what it holds on the device once loaded."""

    def __init__(self, name: str, pieces: Sequence[Piece], device: torch.device) -> None:
        """Builds on meta and checks names and shapes against the files; raises FileError. Reads no weights."""
        self.name = name
        self.device = device
        self.pieces = tuple(pieces)
        self._modules: dict[str, nn.Module] | None = None
        self.unloading: list[Callable[[], None]] = []  # called before the weights go: who built on their addresses
        self.bytes = 0
        self.read_bytes = 0
        for piece in self.pieces:
            module = _on_meta(piece)
            places = check(module, piece.header, piece.prefix, piece.unused)
            self.read_bytes += sum(map(piece.header.bytes_of, places))
            self.bytes += held_bytes(module, piece.header, places, piece.dtype, piece.held)

    @property
    def loaded(self) -> bool:
        return self._modules is not None

    def __getitem__(self, name: str) -> nn.Module:
        """A module of a loaded part."""
        if self._modules is None:
            raise RuntimeError(f"part {self.name} is not loaded; the arbiter must make it ready first")
        return self._modules[name]

    def load(self, watch: Watch) -> None:
        """Read the weights onto the device. A cancel or error inside leaves the part unloaded and its memory free."""
        if self.loaded:
            return
        modules = {}
        with watch.phase("load.read", total=self.read_bytes, unit="byte", part=self.name) as phase:
            started = time.monotonic()

            def read(n: int) -> None:
                done = phase.done + n
                rate = done / max(time.monotonic() - started, 1e-9)
                phase.tick(n, f"{self.name} {done / 1e9:.2f}/{self.read_bytes / 1e9:.2f} GB - {rate / 1e9:.1f} GB/s")

            for piece in self.pieces:
                module = _on_meta(piece)
                fill(module, piece.header, piece.prefix, self.device, piece.dtype, read, piece.unused, piece.keep, piece.held)
                modules[piece.name] = module.eval()
        self._modules = modules

    def unload(self) -> None:
        """Drop the weights; device memory returns to the allocator and from there to the device."""
        if self.loaded:
            for forget in self.unloading:
                forget()
            self._modules = None
            release(self.device)


def _on_meta(piece: Piece) -> nn.Module:
    with torch.device("meta"):
        return piece.build()


def release(device: torch.device) -> None:
    """Give cached, unused device memory back."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


class Arbiter(Protocol):
    """Decides what is on the device."""

    def ready(self, parts: Sequence[Part], activation_bytes: int, watch: Watch) -> None:
        """Load `parts`, with `activation_bytes` of working memory left free; may unload others."""


class Standalone:
    """The arbiter of a process that has the device to itself: keeps parts until another one needs their room."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)

    def ready(self, parts: Sequence[Part], activation_bytes: int, watch: Watch) -> None:
        missing = [part for part in parts if not part.loaded]
        idle = sorted((p for p in self._parts if p.loaded and p not in parts), key=lambda part: part.bytes)
        while missing and idle and free_memory(missing[0].device) < sum(p.bytes for p in missing) + activation_bytes:
            idle.pop().unload()
        for part in missing:
            part.load(watch)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on `device` (host memory for the CPU)."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1 << 62  # this platform does not say
