"""The noise a diffusion decode starts from: float32 from CPU generators, the same for every device, slab and tile.

Every few frames have a generator of their own, seeded from the seed and their place: they can be drawn by several
threads while the device works, and no more of them than needed are held (a whole canvas is twelve bytes a pixel).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from ..shapes import VideoShape

_GROUP = 8  # frames of one generator
_AHEAD = 8  # groups drawn before they are asked for
_THREADS = 8


class Noise(Protocol):
    """Standard normal values for a canvas."""

    shape: VideoShape

    def pieces(self, first: int, stop: int) -> Iterator[torch.Tensor]:
        """Frames first to stop in order, as pieces (3, n, H, W)."""


class GivenNoise:
    """(3, F, H, W), on any device."""

    def __init__(self, values: torch.Tensor) -> None:
        self.shape = VideoShape(*values.shape[1:])
        self._values = values

    def pieces(self, first: int, stop: int) -> Iterator[torch.Tensor]:
        yield self._values[:, first:stop]


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
        self._groups: dict[int, Future[torch.Tensor]] = {}
        self._order(0, 1)

    def __enter__(self) -> DrawnNoise:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._groups.clear()

    def pieces(self, first: int, stop: int) -> Iterator[torch.Tensor]:
        self._order(first // _GROUP, -(-stop // _GROUP))
        for group in range(first // _GROUP, -(-stop // _GROUP)):
            begin = group * _GROUP
            yield self._groups[group].result()[:, max(first - begin, 0) : stop - begin]

    def _order(self, first: int, stop: int) -> None:
        """Have groups first to stop, and a few more, drawn; forget earlier ones."""
        last = -(-self.shape.frames // _GROUP)
        wanted = range(first, min(stop + _AHEAD, last))
        self._groups = {group: self._groups.get(group) or self._pool.submit(self._draw, group) for group in wanted}

    def _draw(self, group: int) -> torch.Tensor:
        frames = min(_GROUP, self.shape.frames - group * _GROUP)
        generator = torch.Generator().manual_seed(_mixed(self._seed, group))
        values = torch.randn(3, frames, self.shape.height, self.shape.width, generator=generator)
        if values.dtype == self._dtype and not self._pinned:
            return values
        return torch.empty(values.shape, dtype=self._dtype, pin_memory=self._pinned).copy_(values)


def _mixed(seed: int, group: int) -> int:
    """A 32-bit seed (all a CPU generator reads) from both numbers, by the finaliser of SplitMix64."""
    z = (seed + (group + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) >> 32
