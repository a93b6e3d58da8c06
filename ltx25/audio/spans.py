"""Long clips in pieces: exact, because every layer reaches a known number of frames to either side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Frames [start, stop) of a clip, computed from frames [first, last)."""

    start: int
    stop: int
    first: int
    last: int


def spans(frames: int, size: int, past: int, future: int) -> Iterator[Span]:
    """Cut `frames` into pieces of `size` frames, each with `past` and `future` frames of context where there are any."""
    for start in range(0, frames, size):
        stop = min(start + size, frames)
        yield Span(start, stop, max(0, start - past), min(frames, stop + future))
