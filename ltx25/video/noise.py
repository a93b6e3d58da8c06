"""The noise a diffusion decode starts from: float32 from CPU generators, the same for every device, slab and tile.

Every frame has a generator of its own, seeded from the seed and its place: frames are drawn by several threads while the
device works, the first is there after a few milliseconds, and no more of them than needed are held (a whole canvas is
twelve bytes a pixel).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from ..shapes import VideoShape

_AHEAD = 32  # frames drawn before they are asked for
_THREADS = 32
_TOGETHER = 1 << 14  # numbers rounded at a time: of more, every thread here would have a team of threads of its own


class Noise(Protocol):
    """Standard normal values for a canvas."""

    shape: VideoShape

    def pieces(self, first: int, stop: int) -> Iterator[torch.Tensor]:
        """Frames first to stop in order, as pieces (3, n, H, W)."""


class DrawnNoise:
    """Noise of a seed. Use as a context manager: threads draw ahead of what is asked for until it closes.

    dtype: what the float32 values are rounded to on the way; pinned: into page-locked memory, for copies to a GPU.
    """

    def __init__(self, shape: VideoShape, seed: int, dtype: torch.dtype, pinned: bool) -> None:
        self.shape = shape
        self._seed = seed
        self._dtype = dtype
        self._pinned = pinned
        self._pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), thread_name_prefix="ltx25-noise")
        self._own = threading.local()  # of each thread that draws
        self._frames: dict[int, Future[torch.Tensor]] = {}
        self._order(0, 1)

    def __enter__(self) -> DrawnNoise:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._frames.clear()

    def pieces(self, first: int, stop: int) -> Iterator[torch.Tensor]:
        """Frame by frame: whole ones, because a part of page-locked memory that is not in one piece would be copied first."""
        self._order(first, stop)
        for frame in range(first, stop):
            yield self._frames[frame].result()

    def _order(self, first: int, stop: int) -> None:
        """Have frames first to stop, and a few more, drawn; forget earlier ones."""
        wanted = range(first, min(stop + _AHEAD, self.shape.frames))
        self._frames = {frame: self._frames.get(frame) or self._pool.submit(self._draw, frame) for frame in wanted}

    def _draw(self, frame: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_mixed(self._seed, frame))
        shape = (3, 1, self.shape.height, self.shape.width)
        made = torch.empty(shape, dtype=self._dtype, pin_memory=self._pinned)
        if made.dtype == torch.float32:
            return torch.randn(shape, generator=generator, out=made)
        if not hasattr(self._own, "values"):  # one memory for all frames of a thread: fresh pages for each cost a tenth of the drawing
            self._own.values = torch.empty(shape)
        torch.randn(shape, generator=generator, out=self._own.values)
        for few, rounded in zip(self._own.values.view(-1).split(_TOGETHER), made.view(-1).split(_TOGETHER), strict=True):
            rounded.copy_(few)
        return made


def _mixed(seed: int, frame: int) -> int:
    """A 32-bit seed (all a CPU generator reads) from both numbers, by the finaliser of SplitMix64."""
    z = (seed + (frame + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) >> 32
