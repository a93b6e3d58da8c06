"""The geometries every benchmark runs, named as reference tables name them: pixels, frames, latent grid, audio frames."""

from __future__ import annotations

from typing import NamedTuple


class Geometry(NamedTuple):
    """width x height px, frames at 24 frames/s."""

    width: int
    height: int
    frames: int

    @property
    def name(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}f"

    @property
    def grid(self) -> tuple[int, int, int]:
        """Latent (t, h, w) of the published video VAE."""
        return (self.frames - 1) // 8 + 1, self.height // 32, self.width // 32

    @property
    def video_tokens(self) -> int:
        t, h, w = self.grid
        return t * h * w

    @property
    def audio_tokens(self) -> int:
        return round(self.frames / 24 * 25)


DIT = (
    Geometry(768, 448, 25),  # N = 1344
    Geometry(640, 352, 121),  # N = 3520, the half-size first stage of 1280x704x121f
    Geometry(1024, 576, 49),  # N = 4032
    Geometry(1024, 576, 97),  # N = 7488
    Geometry(1280, 704, 121),  # N = 14080
)
DECODE = (Geometry(768, 448, 25), Geometry(1024, 576, 121), Geometry(1280, 704, 121))
