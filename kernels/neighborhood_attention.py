"""Windowed attention on a 3-D grid: every query sees exactly window[t] x window[h] x window[w] keys around itself.

Along each axis query i of length L sees keys [s, s + k) with k = min(window, L) and s = clamp(i - k // 2, 0, L - k): at a
border the window moves inward, nothing is padded or masked (NATTEN's rule, dilation 1, not causal). An axis shorter than
its window is seen whole.

Queries are taken in boxes. The keys of a box of queries lie in a box of `box + k - 1` cells per axis (or the whole axis),
whose start is clamped like a window's; which of them a query sees is a product of three small masks, one per axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F

Triple = tuple[int, int, int]

_BOX = (4, 8, 8)  # queries of one box in the twin
_SCORES = 1 << 25  # scores (query x key, all heads) the twin may hold at once


@dataclass(frozen=True)
class Place:
    """Which frames of a clip of `length` frames a call holds: queries from `query` on, keys from `key` on.

    The keys must include every window of the queries.
    """

    query: int
    key: int
    length: int


def na3d_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Triple, scale: float, place: Place | None = None) -> torch.Tensor:
    """softmax(scale * q k^T over the window) v. All (B, T, H, W, heads, d); exact, in bounded memory, on any device.

    `place`: q may hold fewer frames than k and v (B, T', H, W, heads, d), and both fewer than the clip.
    """
    batch, *grid, heads, width = q.shape
    key_grid = list(k.shape[1:4])
    place = place or Place(0, 0, grid[0])
    axes = [
        boxes(place.length, window[0], _BOX[0], place.query, grid[0], place.key, key_grid[0]),
        *(boxes(length, size, box, 0, length, 0, length) for length, size, box in zip(grid[1:], window[1:], _BOX[1:], strict=True)),
    ]
    masks = [axis.mask().to(q.device) for axis in axes]
    rows = [axis.rows().to(q.device) for axis in axes]
    keys = [axis.keys().to(q.device) for axis in axes]
    q, k, v = (x.reshape(batch, -1, heads, width) for x in (q, k, v))
    out = torch.empty_like(q)
    per_box = batch * heads * prod(axis.box for axis in axes) * prod(axis.span for axis in axes)
    corners = torch.cartesian_prod(*(torch.arange(len(axis.starts), device=q.device) for axis in axes))
    for part in corners.split(max(1, _SCORES // per_box)):
        seen = _outer(*(mask[part[:, axis]] for axis, mask in enumerate(masks)))  # (G, queries, keys)
        of_queries = _flat(grid, *(index[part[:, axis]] for axis, index in enumerate(rows)))  # (G, queries)
        of_keys = _flat(key_grid, *(index[part[:, axis]] for axis, index in enumerate(keys)))  # (G, keys)
        boxed = [x[:, of].transpose(2, 3).flatten(0, 1) for x, of in ((q, of_queries), (k, of_keys), (v, of_keys))]
        mask = seen[:, None].expand(-1, heads, -1, -1).repeat(batch, 1, 1, 1)
        made = F.scaled_dot_product_attention(*boxed, attn_mask=mask, scale=scale)  # (B * G, heads, queries, d)
        out[:, of_queries] = made.unflatten(0, (batch, -1)).transpose(2, 3)
    return out.view(batch, *grid, heads, width)


def na3d(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Triple, scale: float, place: Place | None = None) -> torch.Tensor:
    """See `na3d_reference`."""
    return na3d_reference(q, k, v, window, scale, place)


@dataclass(frozen=True)
class AxisBoxes:
    """How one axis is cut: boxes of `box` queries at `starts`, each with `span` keys from `key_starts` on.

    Starts count from the first query or key held, `first_query` and `first_key` of the axis. The last box is moved back
    where the axis does not divide: its first queries are then computed twice, equally.
    """

    length: int
    size: int  # keys a query sees
    box: int
    span: int
    first_query: int
    first_key: int
    starts: torch.Tensor
    key_starts: torch.Tensor

    def rows(self) -> torch.Tensor:
        """(boxes, box) indices of the queries held."""
        return self.starts[:, None] + torch.arange(self.box)

    def keys(self) -> torch.Tensor:
        """(boxes, span) indices of the keys held."""
        return self.key_starts[:, None] + torch.arange(self.span)

    def mask(self) -> torch.Tensor:
        """(boxes, box, span) bool: does the query see the key."""
        first = window_start(self.rows() + self.first_query, self.length, self.size)[:, :, None]
        keys = self.keys()[:, None, :] + self.first_key
        return (keys >= first) & (keys < first + self.size)


def boxes(length: int, window: int, box: int, first_query: int, queries: int, first_key: int, keys: int) -> AxisBoxes:
    """Cut `queries` queries of an axis of `length` into boxes of at most `box`."""
    size, box = min(window, length), min(box, queries)
    span = min(box + size - 1, keys)
    starts = (torch.arange(-(-queries // box)) * box).clamp(max=queries - box)
    first = window_start(starts + first_query, length, size) - first_key
    return AxisBoxes(length, size, box, span, first_query, first_key, starts, first.clamp(max=keys - span))


def window_start(query: torch.Tensor, length: int, size: int) -> torch.Tensor:
    """First key that each query sees."""
    return (query - size // 2).clamp(0, length - size)


def _outer(t: torch.Tensor, h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Masks (G, box, span) per axis -> (G, box t h w, span t h w)."""
    seen = t[:, :, None, None, :, None, None] & h[:, None, :, None, None, :, None] & w[:, None, None, :, None, None, :]
    return seen.flatten(4).flatten(1, 3)


def _flat(grid: list[int], t: torch.Tensor, h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Indices (G, n) per axis -> (G, n t h w) token indices."""
    return ((t[:, :, None, None] * grid[1] + h[:, None, :, None]) * grid[2] + w[:, None, None, :]).flatten(1)
