"""What every convolution of the video VAE reads: silu of the norm over channels, written where the convolution wants it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .dispatch import Compared, Op, jit, power_of_two, row_warps, tl, wide


def pixel_norm_silu_reference(x: torch.Tensor, bias: torch.Tensor | None, eps: float, out: torch.Tensor) -> None:
    """out = silu(y / sqrt(mean over channels of y^2 + eps)), y = x + bias. x and out (..., C), contiguous, of one shape.

    bias (C,) or None; it may be wider than x.
    """
    if bias is not None:
        x = x.to(wide(x.dtype)) + bias
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide(x.dtype))
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    torch.mul(x, scale, out=out)
    F.silu(out, inplace=True)


@jit
def _pixel_norm_silu(x_ptr, bias_ptr, out_ptr, rows, width, eps, BIASED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """ROWS pixels per program; x and out (N, C), contiguous; bias (C,)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    there = (row[:, None] < rows) & (column[None, :] < width)
    at = row[:, None] * width + column[None, :]
    x = tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32)
    if BIASED:
        x += tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    x *= tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None]
    x = x / (1 + tl.exp(-x))
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=there)


def _launch(x: torch.Tensor, bias: torch.Tensor | None, eps: float, out: torch.Tensor) -> None:
    width = x.shape[-1]
    rows = x.numel() // width
    together = max(1, 2048 // power_of_two(width))
    if rows:
        _pixel_norm_silu[(-(-rows // together),)](
            x,
            x if bias is None else bias,
            out,
            rows,
            width,
            eps,
            BIASED=bias is not None,
            ROWS=together,
            WIDTH=power_of_two(width),
            num_warps=max(4, row_warps(width)),
        )


def _check(device: torch.device, dtype: torch.dtype) -> list[Compared]:
    generator = torch.Generator().manual_seed(0)
    x, bias = torch.randn(7, 96, generator=generator).to(dtype), torch.randn(96, generator=generator)
    got, twin, truth = torch.empty_like(x, device=device), torch.empty_like(x), torch.empty_like(x, dtype=torch.float64)
    _launch(x.to(device), bias.to(device), 1e-8, got)
    pixel_norm_silu_reference(x, bias, 1e-8, twin)
    pixel_norm_silu_reference(x.double(), bias.double(), 1e-8, truth)
    return [(got, twin, truth)]


_OP = Op("pixel_norm_silu", _check)


def pixel_norm_silu(x: torch.Tensor, bias: torch.Tensor | None, eps: float, out: torch.Tensor) -> None:
    """See `pixel_norm_silu_reference`."""
    (_launch if _OP.runs(x) else pixel_norm_silu_reference)(x, bias, eps, out)
