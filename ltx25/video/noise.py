"""The noise a diffusion decode starts from: a value is its seed's and its place's, on every device, in every slab and tile."""

from __future__ import annotations

from typing import Protocol

import torch

from ...kernels.noise_cells import Corner, levels, noise_cells
from ..shapes import VideoShape


class Noise(Protocol):
    """Standard normal values for a canvas."""

    shape: VideoShape

    def fill(self, out: torch.Tensor, first: int, top: int, left: int, patch: int) -> None:
        """Write out (n, h, w, 3 patch^2), contiguous, in run order (row, column, channel): cells of patch x patch px
        from frame `first` on, beginning at (top, left) px."""


class DrawnNoise:
    """Noise of a seed of 64 bits, for cells on `device`. Official decoders draw other values, from the generator of their device."""

    def __init__(self, shape: VideoShape, seed: int, device: torch.device) -> None:
        self.shape = shape
        self._seed = seed
        self._levels = levels().to(device if device.type == "cuda" else "cpu")  # others may have no sums of 64 bits

    def fill(self, out: torch.Tensor, first: int, top: int, left: int, patch: int) -> None:
        noise_cells(out, Corner(self.shape.height, self.shape.width, first, top, left), patch, self._seed, self._levels)
