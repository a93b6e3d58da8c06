"""Tiles of a picture: where they lie, how much they overlap, how they are blended.

Only height and width are ever tiled: time is streamed exactly. Positions are in latent cells.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Span:
    """Cells [start, stop) of one axis; the first `lead` are shared with the span before, the last `trail` with the next."""

    start: int
    stop: int
    lead: int
    trail: int

    def weights(self, scale: int) -> torch.Tensor:
        """((stop - start) * scale,) float32: the share of this span in every pixel."""
        return trapezoid((self.stop - self.start) * scale, self.lead * scale, self.trail * scale)


def trapezoid(length: int, left: int, right: int) -> torch.Tensor:
    """Ones with a ramp of `left` values up and `right` values down; ramps of equal length that overlap add up to one."""
    weights = torch.ones(length)
    weights[:left] = torch.arange(1, left + 1) / (left + 1)
    weights[length - right :] = torch.arange(right, 0, -1) / (right + 1)
    return weights


def spans(length: int, count: int, overlap: int) -> list[Span]:
    """Cut `length` cells into `count` spans of (nearly) equal size that overlap by at least `overlap`.

    Raises ValueError where the spans would be so short that three of them overlap.
    """
    if count == 1:
        return [Span(0, length, 0, 0)]
    size = -(-(length + (count - 1) * overlap) // count)
    starts = [min(i * (size - overlap), length - size) for i in range(count)]
    shared = [0] + [before + size - after for before, after in zip(starts[:-1], starts[1:], strict=True)] + [0]
    if size > length or any(lead + trail > size for lead, trail in zip(shared[:-1], shared[1:], strict=True)):
        raise ValueError(f"{length} cells do not hold {count} spans that overlap by {overlap}")
    return [Span(start, start + size, lead, trail) for start, lead, trail in zip(starts, shared[:-1], shared[1:], strict=True)]
