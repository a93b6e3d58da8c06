"""Standard normal noise of a place on a canvas: made where it is needed, the same on every device, to the bit.

Value c of pixel (f, y, x) is one of 196,606 levels, looked up by bits that are mixed from the seed and the value's place: no
state, so any part can be made at any time, and no arithmetic that devices round differently. Mixing: SplitMix64 (Steele, Lea
and Flood 2014), whose n-th output depends on seed and n alone. Levels: quantiles of the half-normal distribution in the
middle of 65,535 parts as likely as each other; the 65,536th, the tail, is cut in 32,768 again and ends at 6.3.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import torch

from .dispatch import Compared, Op, jit, tl, triton

_STEP = 0x9E3779B97F4A7C15  # SplitMix64: from one state to the next, and the two factors of its finaliser
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_PARTS, _TAIL = 1 << 16, 1 << 15
_LAST = _PARTS - 1  # the part that is the tail
_BLOCK = 1024
_AT_ONCE = 1 << 17  # values that the twin makes at a time on a CPU: their bits stay in its cache


class Corner(NamedTuple):
    """Where cells begin on a canvas of `height` x `width` px: frame, and px from its top and left."""

    height: int
    width: int
    frame: int
    top: int
    left: int


@lru_cache(maxsize=1)
def levels() -> torch.Tensor:
    """The levels above zero, from the smallest: (98303,) float32 on the CPU."""
    middle = torch.arange(_LAST, dtype=torch.float64) + 0.5
    tail = (torch.arange(_TAIL, 0, -1, dtype=torch.float64) - 0.5) / _TAIL  # what is left beyond, of the last part
    beyond = torch.cat((_PARTS - middle, tail)) / (2 * _PARTS)  # probability of more, from 1/2 down
    return -torch.special.ndtri(beyond).float()


def noise_cells_reference(out: torch.Tensor, corner: Corner, patch: int, seed: int, table: torch.Tensor) -> None:
    """Fill out (n, h, w, 3 patch^2), floats of any kind: cells of patch x patch px, values ordered row, column, channel.

    seed: 64 bits; table: `levels`, on the device that is to make the values, which need not be that of `out`.
    """
    frames, rows, columns, cell = out.shape
    across = (torch.arange(columns * patch, device=table.device)[:, None] + corner.left) * 3 + torch.arange(3, device=table.device)
    at_once = max(1, _AT_ONCE // (columns * cell)) if table.device.type == "cpu" else rows
    for number in range(frames):  # whole clips of 64-bit numbers would be many times what is asked for
        for first in range(0, rows, at_once):
            some = out[number, first : first + at_once]
            down = torch.arange(len(some) * patch, device=table.device)[:, None, None] + (first * patch + corner.top)
            place = ((corner.frame + number) * corner.height + down) * (3 * corner.width) + across
            value = _normal(place, seed, table).view(len(some), patch, columns, patch, 3)
            some.view(len(some), columns, patch, patch, 3).copy_(value.transpose(1, 2))


def _normal(place: torch.Tensor, seed: int, table: torch.Tensor) -> torch.Tensor:
    """The values of places, int64, which are written over."""
    bits = _finalised(place.add_(1).mul_(_signed(_STEP)).add_(_signed(_mixed(seed))))
    high, low = _shifted(bits, 47).bitwise_and_(_LAST), _shifted(bits, 32).bitwise_and_(_TAIL - 1)
    value = table[torch.where(high == _LAST, low.add_(_LAST), high)]
    return torch.where(bits < 0, -value, value)


def _mixed(seed: int) -> int:
    """The 64 bits a seed's sequence begins after: those of neighbouring seeds have nothing in common."""
    z = (seed + _STEP) % 2**64
    z = (z ^ z >> 30) * _FIRST % 2**64
    z = (z ^ z >> 27) * _SECOND % 2**64
    return z ^ z >> 31


def _finalised(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's, on the bits of int64, which are written over."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        z.bitwise_xor_(_shifted(z, shift)).mul_(_signed(factor))
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """int64 shifted right without its sign."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(bits: int) -> int:
    """The int64 of 64 bits."""
    return bits - (bits >> 63 << 64)


@partial(jit, general=("start", "rows", "width_out", "height", "width", "frame", "top", "left"))
def _noise_cells(
    out_ptr,  # (n, h, w, 3 PATCH^2), contiguous
    table_ptr,
    start,  # int64: the bits of the mixed seed
    rows,  # h
    width_out,  # w * 3 PATCH^2, numbers in a row of cells
    height,  # of the canvas, px
    width,
    frame,
    top,
    left,
    STEP: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    LAST: tl.constexpr,
    TAIL: tl.constexpr,
    PATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program per row of cells and BLOCK of its numbers."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width_out
    x = at // (3 * PATCH * PATCH) * PATCH + at // 3 % PATCH + left
    y = row % rows * PATCH + at // (3 * PATCH) % PATCH + top
    place = ((row // rows + frame).to(tl.int64) * height + y) * width + x
    z = start.to(tl.uint64) + (place * 3 + at % 3 + 1).to(tl.uint64) * STEP
    z = (z ^ (z >> 30)) * FIRST
    z = (z ^ (z >> 27)) * SECOND
    z = z ^ (z >> 31)
    high = ((z >> 47) & LAST).to(tl.int32)
    low = ((z >> 32) & (TAIL - 1)).to(tl.int32)
    value = tl.load(table_ptr + tl.where(high == LAST, LAST + low, high), mask=there, other=0.0)
    value = tl.where((z >> 63) == 1, -value, value)
    tl.store(out_ptr + row.to(tl.int64) * width_out + at, value.to(out_ptr.dtype.element_ty), mask=there)


def _launch(out: torch.Tensor, corner: Corner, patch: int, seed: int, table: torch.Tensor) -> None:
    frames, rows, columns, cell = out.shape
    width_out = columns * cell
    constants = {"STEP": _STEP, "FIRST": _FIRST, "SECOND": _SECOND, "LAST": _LAST, "TAIL": _TAIL, "PATCH": patch, "BLOCK": _BLOCK}
    if out.numel():
        _noise_cells[(frames * rows, triton.cdiv(width_out, _BLOCK))](out, table, _signed(_mixed(seed)), rows, width_out, *corner, **constants)


def _check(device: torch.device, dtype: torch.dtype) -> list[Compared]:
    compared = []
    for corner, seed in ((Corner(24, 40, 3, 8, 16), 2**64 - 1), (Corner(4096, 4096, 400, 0, 4), 7)):
        twin, truth = torch.empty(2, 3, 5, 48, dtype=dtype), torch.empty(2, 3, 5, 48, dtype=torch.float64)
        got = torch.empty_like(twin, device=device)
        _launch(got, corner, 4, seed, levels().to(device))
        noise_cells_reference(twin, corner, 4, seed, levels())
        noise_cells_reference(truth, corner, 4, seed, levels())
        compared.append((got, twin, truth))
    return compared


_OP = Op("noise_cells", _check)


def noise_cells(out: torch.Tensor, corner: Corner, patch: int, seed: int, table: torch.Tensor) -> None:
    """See `noise_cells_reference`; `out` is contiguous, and where it is on CUDA `table` is there, too."""
    (_launch if _OP.runs(out) else noise_cells_reference)(out, corner, patch, seed, table)
