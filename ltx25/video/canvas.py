"""The canvas a diffusion decode runs on: the latent, padded where it is smaller than the windows."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.video_layout import DiffusionDecoderConfig
from ..shapes import VideoLatentShape
from .output import Part


@dataclass(frozen=True)
class Crop:
    """Where a clip lies on the canvas that is decoded; above, before: cells of padding over and left of it."""

    clip: VideoLatentShape
    canvas: VideoLatentShape
    above: int
    before: int

    @staticmethod
    def of(config: DiffusionDecoderConfig, shape: VideoLatentShape) -> Crop:
        floor = size_floor(config)
        grid = [max(got, least) for got, least in zip((shape.frames, shape.height, shape.width), floor, strict=True)]
        return Crop(shape, VideoLatentShape(shape.channels, *grid), (grid[1] - shape.height) // 2, (grid[2] - shape.width) // 2)

    def cut(self, part: Part, side: int) -> Part:
        """A part of the canvas reduced to what lies on the clip; `side`: px of a cell."""
        height, width = part.pixels.shape[1:3]
        top, left = self.above * side, self.before * side
        rows = slice(max(top - part.top, 0), min(top + self.clip.height * side - part.top, height))
        columns = slice(max(left - part.left, 0), min(left + self.clip.width * side - part.left, width))
        return Part(part.first, part.top + rows.start - top, part.left + columns.start - left, part.pixels[:, rows, columns])


def size_floor(config: DiffusionDecoderConfig) -> tuple[int, int, int]:
    """The smallest latent (t, h, w) on which no stage's grid is smaller than its window."""
    return tuple(_least(config, axis) for axis in range(3))


def _least(config: DiffusionDecoderConfig, axis: int) -> int:
    cells = 1
    while any(size < kernel[axis] for size, kernel in zip(_sizes(config, axis, cells), config.kernels, strict=True)):
        cells += 1
    return cells


def _sizes(config: DiffusionDecoderConfig, axis: int, cells: int) -> list[int]:
    """The axis' length in every stage."""
    sizes = [cells]
    for step in config.upsamples:
        stride = step.stride[axis]
        sizes.append(stride * sizes[-1] - (stride - 1 if axis == 0 else 0))
    return sizes
