"""The seam between two parts of a video block: what one made is added to the stream, and the norm of the next is taken.

x <- x + y, then RMS(x) * gain + shift. In place, because the stream is the one tensor that lives through the block.
"""

from __future__ import annotations

import torch

from .dispatch import Compared, Op, jit, power_of_two, row_warps, tl, wide


def add_rms_norm_reference(x: torch.Tensor, y: torch.Tensor | None, gain: torch.Tensor, shift: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x and y (N, C), y None: nothing is added; gain and shift (C,), may be wider than x. Updates x, returns the norm of it (N, C)."""
    if y is not None:
        x += y
    return rms_norm(x, gain, shift, eps)


def rms_norm(x: torch.Tensor, gain: torch.Tensor, shift: torch.Tensor | None, eps: float, keep_wide: bool = False) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * gain + shift over the last dimension, wide inside; rounded to x's dtype unless `keep_wide`."""
    dtype = wide(x.dtype)
    z = x.to(dtype)
    z = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps) * gain.to(dtype)
    if shift is not None:
        z = z + shift.to(dtype)
    return z if keep_wide else z.to(x.dtype)


@jit
def _add_rms_norm(
    x_ptr,  # (N, C), contiguous
    y_ptr,  # (N, C), contiguous, read if ADD
    gain_ptr,  # (C,) float32
    shift_ptr,  # (C,) float32, read if SHIFT
    out_ptr,  # (N, C), contiguous
    rows,
    width,
    eps,
    ADD: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """ROWS rows per program, statistics in float32 of the sum as it is stored."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    there = (row[:, None] < rows) & (column[None, :] < width)
    at = row[:, None] * width + column[None, :]
    x = tl.load(x_ptr + at, mask=there, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(y_ptr + at, mask=there, other=0.0).to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + at, x, mask=there)
    z = x.to(tl.float32)
    z *= tl.rsqrt(tl.sum(z * z, axis=1) / width + eps)[:, None]
    z *= tl.load(gain_ptr + column, mask=column < width, other=0.0)[None, :]
    if SHIFT:
        z += tl.load(shift_ptr + column, mask=column < width, other=0.0)[None, :]
    tl.store(out_ptr + at, z.to(out_ptr.dtype.element_ty), mask=there)


def _launch(x: torch.Tensor, y: torch.Tensor | None, gain: torch.Tensor, shift: torch.Tensor | None, eps: float) -> torch.Tensor:
    rows, width = x.shape
    out = torch.empty_like(x)
    together = max(1, 2048 // power_of_two(width))
    _add_rms_norm[(-(-rows // together),)](
        x,
        x if y is None else y,
        gain,
        gain if shift is None else shift,
        out,
        rows,
        width,
        eps,
        ADD=y is not None,
        SHIFT=shift is not None,
        ROWS=together,
        WIDTH=power_of_two(width),
        num_warps=max(4, row_warps(width)),
    )
    return out


def _check(device: torch.device, dtype: torch.dtype) -> list[Compared]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(5, 96, generator=generator).to(dtype) for _ in range(2))
    gain, shift = torch.randn(96, generator=generator), torch.randn(96, generator=generator)
    mine, plain, true = x.to(device), x.clone(), x.double()
    got = _launch(mine, y.to(device), gain.to(device), shift.to(device), 1e-6)
    twin = add_rms_norm_reference(plain, y, gain, shift, 1e-6)
    truth = add_rms_norm_reference(true, y.double(), gain.double(), shift.double(), 1e-6)
    return [(got, twin, truth), (mine, plain, true)]


_OP = Op("add_rms_norm", _check)


def add_rms_norm(x: torch.Tensor, y: torch.Tensor | None, gain: torch.Tensor, shift: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See `add_rms_norm_reference`. x and y contiguous."""
    return (_launch if _OP.runs(x) else add_rms_norm_reference)(x, y, gain, shift, eps)
