"""Noise a test chooses, where a render draws it."""

from __future__ import annotations

import torch

from ...ltx25.shapes import VideoShape


class GivenNoise:
    """ltx25.video.noise.Noise of values (3, F, H, W), on any device."""

    def __init__(self, values: torch.Tensor) -> None:
        self.shape = VideoShape(*values.shape[1:])
        self._values = values

    def fill(self, out: torch.Tensor, first: int, top: int, left: int, patch: int) -> None:
        frames, rows, columns, _ = out.shape
        values = self._values[:, first : first + frames, top : top + rows * patch, left : left + columns * patch]
        cells = values.unflatten(3, (columns, patch)).unflatten(2, (rows, patch)).permute(1, 2, 4, 3, 5, 0)
        out.view(cells.shape).copy_(cells)
