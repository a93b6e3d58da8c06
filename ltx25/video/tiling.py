"""Tiles of a picture: where they lie and which part of each is kept.

Only height and width are ever tiled: time is streamed exactly. A tile's outermost cells come out wrong where it was cut
off, as far as its windows reach; neighbours overlap by twice that, each keeps what is right, and nothing is blended.
Positions are in latent cells.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Cells [start, stop) of one axis are decoded together; of them [first, last) are kept."""

    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a picture."""

    rows: Span
    columns: Span

    @staticmethod
    def whole(height: int, width: int) -> Tile:
        """All of a picture of `height` x `width` cells."""
        return Tile(Span(0, height, 0, height), Span(0, width, 0, width))


def spans(length: int, count: int, reach: int) -> list[Span]:
    """Cut `length` cells into `count` spans of equal size, whose kept parts are `reach` cells away from every cut.

    Raises ValueError where the axis is too short for that many.
    """
    if count == 1:
        return [Span(0, length, 0, length)]
    overlap = 2 * reach
    size = -(-(length + (count - 1) * overlap) // count)
    starts = [min(i * (size - overlap), length - size) for i in range(count)]
    if size <= overlap or any(before >= after for before, after in zip(starts[:-1], starts[1:], strict=True)):
        raise ValueError(f"{length} cells do not hold {count} spans with {reach} cells beyond what they keep")
    borders = [0, *(start + reach for start in starts[1:]), length]
    return [Span(start, start + size, first, last) for start, first, last in zip(starts, borders[:-1], borders[1:], strict=True)]
