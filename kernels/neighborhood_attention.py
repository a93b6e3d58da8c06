"""Windowed attention on a 3-D grid: every query sees exactly window[t] x window[h] x window[w] keys around itself.

Along each axis query i of length L sees keys [s, s + k) with k = min(window, L) and s = clamp(i - k // 2, 0, L - k): at a
border the window moves inward, nothing is padded or masked (NATTEN's rule, dilation 1, not causal). An axis shorter than
its window is seen whole.

Queries are taken in boxes. The keys of a box of queries lie in a box of `box + k - 1` cells per axis (or the whole axis),
whose start is clamped like a window's; which of them a query sees is a product of three small masks, one per axis.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import e, log2, prod

import torch
import torch.nn.functional as F

from .dispatch import Compared, Op, jit, power_of_two, tl

Triple = tuple[int, int, int]

_BOX = (4, 8, 8)  # queries of one box in the twin
_HEADS = (16, 32, 64, 128)  # head widths the kernel takes
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


_RUN = 16  # keys along w that a box of queries sees
_ROWS = 4  # such runs, of neighbouring h, in one tile of keys
_REGISTERS = 168  # of a thread: three boxes run on a multiprocessor then
_QUERIES = 64  # most queries of a box: 64 ran faster than 128 on an H200


@functools.partial(jit, general=("queries", "first_query", "first_key", "length", "height", "width", "heads", "size_t", "size_h", "size_w"))
def _na3d(
    q_ptr,  # (frames of queries, H, W, heads, D), contiguous; out_ptr alike, may be q_ptr
    k_ptr,  # (frames of keys, H, W, heads, D), contiguous; v_ptr alike
    v_ptr,
    out_ptr,
    queries,  # frames of queries
    first_query,
    first_key,
    length,
    height,
    width,
    heads,
    size_t,  # keys a query sees per axis
    size_h,
    size_w,
    scale,  # times log2(e)
    BT: tl.constexpr,
    BH: tl.constexpr,
    BW: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
    BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: one head of one box of BT x BH x BW queries, against the keys any of them sees.

    Keys come in tiles of ROWS x RUN (h, w) of one frame; frames are the inner loop, so that what differs per query along
    h and w is one matrix kept over many tiles, and along t one vector per tile. BOUNDED: scores are known to be small
    enough that their exponentials need no running maximum; the matrix then holds ones and zeros, in half the registers.
    """
    box = tl.program_id(0)
    head = tl.program_id(1)
    boxes_w = tl.cdiv(width, BW)
    boxes_h = tl.cdiv(height, BH)
    row = tl.arange(0, M)
    qt = box // (boxes_w * boxes_h) * BT + row // (BH * BW)
    qh = box // boxes_w % boxes_h * BH + row // BW % BH
    qw = box % boxes_w * BW + row % BW
    there = (row < BT * BH * BW) & (qt < queries) & (qh < height) & (qw < width)
    qt = tl.minimum(qt, queries - 1)
    qh = tl.minimum(qh, height - 1)
    qw = tl.minimum(qw, width - 1)
    start_t = tl.minimum(tl.maximum(first_query + qt - size_t // 2, 0), length - size_t)
    start_h = tl.minimum(tl.maximum(qh - size_h // 2, 0), height - size_h)
    start_w = tl.minimum(tl.maximum(qw - size_w // 2, 0), width - size_w)

    stride = heads * D  # of a token
    plane = height.to(tl.int64) * width * stride  # of a frame
    column = tl.arange(0, D)
    at = qt * plane + (qh * width + qw) * stride + head * D
    q = tl.load(q_ptr + at[:, None] + column[None, :])

    low_t = tl.min(start_t, axis=0)
    high_t = tl.max(start_t, axis=0) + size_t
    low_h = tl.min(start_h, axis=0)
    high_h = tl.max(start_h, axis=0) + size_h
    low_w = tl.min(start_w, axis=0)
    key = tl.arange(0, ROWS * RUN)
    kw = low_w + key % RUN
    seen_w = (kw[None, :] >= start_w[:, None]) & (kw[None, :] < start_w[:, None] + size_w)
    kw = tl.minimum(kw, width - 1)

    total = tl.zeros((M,), tl.float32)
    most = tl.full((M,), -1e29, tl.float32)
    out = tl.zeros((M, D), tl.float32)
    for group in range(low_h, high_h, ROWS):
        kh = group + key // RUN
        seen = seen_w & (kh[None, :] >= start_h[:, None]) & (kh[None, :] < start_h[:, None] + size_h)
        if BOUNDED:
            outside = tl.where(seen, 1.0, 0.0).to(q.dtype)
        else:
            outside = tl.where(seen, 0.0, -1e30)
        place = (tl.minimum(kh, height - 1) * width + kw) * stride + head * D
        for kt in range(low_t, high_t):
            from_frame = (kt - first_key) * plane
            k = tl.load(k_ptr + from_frame + place[:, None] + column[None, :])
            v = tl.load(v_ptr + from_frame + place[:, None] + column[None, :])
            outside_t = tl.where((kt >= start_t) & (kt < start_t + size_t), 0.0, -1e30)
            if BOUNDED:
                score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                p = tl.exp2(score * scale + outside_t[:, None]).to(v.dtype) * outside
            else:
                score = tl.dot(q, tl.trans(k), acc=outside, input_precision=PRECISION)
                score = score * scale + outside_t[:, None]
                highest = tl.maximum(most, tl.max(score, axis=1))
                shrink = tl.exp2(most - highest)
                p = tl.exp2(score - highest[:, None]).to(v.dtype)
                total *= shrink
                out *= shrink[:, None]
                most = highest
            total += tl.sum(p.to(tl.float32), axis=1)  # as rounded: the error of a weight that stands alone then cancels
            out = tl.dot(p, v, acc=out, input_precision=PRECISION)
    out /= total[:, None]
    tl.store(out_ptr + at[:, None] + column[None, :], out.to(out_ptr.dtype.element_ty), mask=there[:, None])


@functools.lru_cache
def _box(window: Triple) -> Triple:
    """Queries of a box (t, h, w): as few key tiles per query as possible. Along w a box sees one run of keys."""
    best, cost = (1, 1, 1), float("inf")
    w = _RUN - window[2] + 1
    for t in range(1, _QUERIES // w + 1):
        for h in range(1, _QUERIES // (w * t) + 1):
            tiles = (t + window[0] - 1) * -(-(h + window[1] - 1) // _ROWS)
            if tiles / (t * h * w) < cost:
                best, cost = (t, h, w), tiles / (t * h * w)
    return best


def _launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Triple, scale: float, place: Place, bound: float | None, out: torch.Tensor) -> None:
    """As `na3d`, one clip at a time; all contiguous (T, H, W, heads, d)."""
    frames, height, width, heads, head_dim = q.shape
    size = [min(n, length) for n, length in zip(window, (place.length, height, width), strict=True)]
    box = _box(tuple(size))
    queries, nvidia = prod(box), q.device.type == "cuda" and torch.version.cuda is not None
    grid = (prod(-(-n // b) for n, b in zip((frames, height, width), box, strict=True)), heads)
    _na3d[grid](
        q,
        k,
        v,
        out,
        frames,
        place.query,
        place.key,
        place.length,
        height,
        width,
        heads,
        *size,
        scale * log2(e),
        BT=box[0],
        BH=box[1],
        BW=box[2],
        M=max(16, power_of_two(queries)),
        D=head_dim,
        ROWS=_ROWS,
        RUN=_RUN,
        BOUNDED=bound is not None and bound <= _SAFE,
        PRECISION="tf32x3" if nvidia else "ieee",  # three products on tensor cores, as good as one without them
        num_warps=8 if queries > 64 else 4,
        num_stages=3,
        **({"maxnreg": _REGISTERS} if nvidia and q.dtype != torch.float32 else {}),
    )


def _check(device: torch.device, dtype: torch.dtype) -> list[Compared]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 5, 6, 9, 2, 64, generator=generator).to(dtype) for _ in range(3))
    place, window, scale = Place(2, 0, 7), (3, 5, 5), 0.125
    k, v = (torch.cat((x, x[:, :2] * 0.5), dim=1) for x in (k, v))
    here = [x[0].to(device) for x in (q, k, v)]
    compared = []
    for bound in (None, 30.0):
        out = torch.empty_like(here[0])
        _launch(*here, window, scale, place, bound, out)
        twin = na3d_reference(q, k, v, window, scale, place)
        compared.append((out[None], twin, na3d_reference(q.double(), k.double(), v.double(), window, scale, place)))
    return compared


_OP = Op("na3d", _check)
_SAFE = 40.0  # e^-40 to e^40 and sums of thousands of them are ordinary float32 and bf16 numbers


def na3d(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Triple, scale: float, place: Place | None = None, bound: float | None = None
) -> torch.Tensor:
    """See `na3d_reference`. bound: |scale * q k^T| is known to be no larger (None: not known), which saves work.

    The result may lie in q's memory: q is not to be used afterwards.
    """
    place = place or Place(0, 0, q.shape[1])
    if not (q.shape[-1] in _HEADS and max(window[2], 1) < _RUN and _OP.runs(q)):
        return na3d_reference(q, k, v, window, scale, place)
    q = q.contiguous()
    for i in range(q.shape[0]):
        _launch(q[i], k[i].contiguous(), v[i].contiguous(), window, scale, place, bound, q[i])
    return q


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
