"""The end of a sub-layer: x += y * gate in place, alone or with the norm that opens the next sub-layer.

In place, because the residual stream is the one tensor that lives through all blocks, and rows of several legs are
updated as slices of it. Gate rows are (K, D) as in rms_adaln.py.
"""

from __future__ import annotations

import torch

from .dispatch import Op, jit, power_of_two, row_warps, tl, wide
from .rms_adaln import rms_adaln_reference, rows


def gated_residual_reference(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """x and y (R, T, D), gate (K, D), index (T,) or None. Writes x + y * gate into x, rounded once, and returns x."""
    dtype = wide(x.dtype)
    return x.copy_(x.to(dtype) + y.to(dtype) * rows(gate, index, dtype))


def gated_residual_rms_adaln_reference(
    x: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    index: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """As above; returns RMS(x) * (1 + scale) + shift of the updated (and rounded) x. scale and shift (K, D)."""
    return rms_adaln_reference(gated_residual_reference(x, y, gate, index), scale, shift, index, eps)


@jit
def _kernel(
    x_ptr,  # (R * T, D), contiguous, updated in place
    y_ptr,  # (R * T, D), contiguous
    index_ptr,  # (T,) int64, read if LEVELS
    gate_ptr,  # (K, D), rows gate_row apart; likewise scale and shift, read if NORM
    scale_ptr,
    shift_ptr,
    out_ptr,  # (R * T, D), contiguous, written if NORM
    gate_row,
    scale_row,
    shift_row,
    tokens,
    width,
    eps,
    LEVELS: tl.constexpr,
    NORM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """x = round(x + y * gate); out = x / sqrt(mean(x^2) + eps) * (1 + scale) + shift. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = column < width
    at = row * width + column
    level = row * 0
    if LEVELS:
        level = tl.load(index_ptr + row % tokens).to(tl.int64)
    x = tl.load(x_ptr + at, mask=there, other=0.0)
    y = tl.load(y_ptr + at, mask=there, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + level * gate_row + column, mask=there, other=0.0).to(tl.float32)
    rounded = (x.to(tl.float32) + y * gate).to(x.dtype)
    tl.store(x_ptr + at, rounded, mask=there)
    if NORM:
        z = rounded.to(tl.float32)
        z *= tl.rsqrt(tl.sum(z * z, axis=0) / width + eps)
        scale = tl.load(scale_ptr + level * scale_row + column, mask=there, other=0.0).to(tl.float32)
        shift = tl.load(shift_ptr + level * shift_row + column, mask=there, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, z * (1 + scale) + shift, mask=there)


def _launch(
    x: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor] | None,
    index: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Updates x; returns the modulated norm of it where `norm` (scale, shift) asks for one, x otherwise."""
    if x.shape != y.shape or not x.is_contiguous():
        raise ValueError(f"gated_residual updates a contiguous x by a y of its shape, got {tuple(x.shape)} and {tuple(y.shape)}")
    tokens, width = x.shape[-2:]
    y = y.contiguous()
    out = x if norm is None else torch.empty_like(x)
    scale, shift = norm or (gate, gate)
    _kernel[(x.numel() // width,)](
        x,
        y,
        x if index is None else index,
        gate,
        scale,
        shift,
        out,
        gate.stride(0),
        scale.stride(0),
        shift.stride(0),
        tokens,
        width,
        eps,
        LEVELS=index is not None,
        NORM=norm is not None,
        WIDTH=power_of_two(width),
        num_warps=row_warps(width),
    )
    return out


def _check(device: torch.device, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 2, 3, 72, generator=generator).to(dtype)
    gate, scale, shift = torch.randn(3, 2, 72, generator=generator).to(dtype)
    index = torch.tensor([1, 0, 1])
    got_x = x.to(device, copy=True)
    got = _launch(got_x, y.to(device), gate.to(device), (scale.to(device), shift.to(device)), index.to(device), 1e-6)
    twin_x = x.clone()
    twin = gated_residual_rms_adaln_reference(twin_x, y, gate, scale, shift, index, 1e-6)
    truth_x = gated_residual_reference(x.double(), y.double(), gate.double(), index)
    # The norm reads the rounded x, so its truth starts from that.
    truth = rms_adaln_reference(twin_x.double(), scale.double(), shift.double(), index, 1e-6)
    return [(got_x, twin_x, truth_x), (got, twin, truth)]


_OP = Op("gated_residual", _check)


def gated_residual(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """See `gated_residual_reference`."""
    if not _OP.runs(x):
        return gated_residual_reference(x, y, gate, index)
    return _launch(x, y, gate, None, index, 0.0)


def gated_residual_rms_adaln(
    x: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    index: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """See `gated_residual_rms_adaln_reference`."""
    if not _OP.runs(x):
        return gated_residual_rms_adaln_reference(x, y, gate, scale, shift, index, eps)
    return _launch(x, y, gate, (scale, shift), index, eps)
