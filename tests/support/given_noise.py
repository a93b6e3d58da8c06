"""Noise a test chooses, where a render draws it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...ltx25.shapes import VideoShape


class GivenNoise:
    """ltx25.video.noise.Noise of values (3, F, H, W), on any device."""

    def __init__(self, values: torch.Tensor) -> None:
        self.shape = VideoShape(*values.shape[1:])
        self._values = values

    def pieces(self, first: int, stop: int) -> Iterator[torch.Tensor]:
        yield self._values[:, first:stop]
