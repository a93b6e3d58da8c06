"""Pixels between noise and picture, as stages of frames (frames.py): cells (F, H / p, W / p, 3 p p) in run order."""

from __future__ import annotations

from collections import deque

import torch

from .frames import Stage, between_margins, take, with_margins
from .noise import Noise


class NoiseCells(Stage):
    """Cells of some rows and columns (px) of noise, made as they are asked for."""

    def __init__(self, noise: Noise, rows: slice, columns: slice, patch: int, like: torch.Tensor) -> None:
        grid = ((rows.stop - rows.start) // patch, (columns.stop - columns.start) // patch)
        super().__init__(noise.shape.frames, like.new_empty(0, *grid, 3 * patch * patch))
        self._noise = noise
        self._corner = (rows.start, columns.start)
        self._patch = patch

    def _make(self, to: int, lead: int, trail: int) -> torch.Tensor:
        frames = to - self.at
        out = with_margins(self.nothing, lead + frames + trail, 0)
        self._noise.fill(out[lead : lead + frames], self.at, *self._corner, self._patch)
        return out


class Euler(Stage):
    """One step from noise level `now` to `later`: x - (now - later) v, where v is predicted or (x - x0) / now."""

    def __init__(self, predicted: Stage, tap: deque[torch.Tensor], output: str, now: float, later: float) -> None:
        super().__init__(predicted.length, predicted.nothing.to(torch.promote_types(predicted.nothing.dtype, torch.float32)))
        self._before = predicted
        self._tap = tap
        self._output = output
        self._now = now
        self._later = later

    def _make(self, to: int, lead: int, trail: int) -> torch.Tensor:
        made = self._before.advance(to, 0, 0).to(self.nothing.dtype)
        x = torch.cat(take(self._tap, made.shape[0]))
        velocity = made if self._output == "v" else (x - made) / self._now
        return between_margins(x - (self._now - self._later) * velocity, lead, trail)
