"""An affine without a norm, x * (1 + scale) + shift: the text contexts, once per block and prompt."""

from __future__ import annotations

import torch

from .dispatch import Op, jit, power_of_two, row_warps, tl, wide
from .rms_adaln import affine


def modulate_reference(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """x (R, S, D), scale and shift (1, D): (R, S, D) in x's dtype, rounded once."""
    return affine(x.to(wide(x.dtype)), scale, shift, None).to(x.dtype)


@jit
def _kernel(x_ptr, scale_ptr, shift_ptr, out_ptr, width, WIDTH: tl.constexpr):
    """out = x * (1 + scale) + shift; one program per row of (R * S, D)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = column < width
    x = tl.load(x_ptr + row * width + column, mask=there, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + column, mask=there, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, x * (1 + scale) + shift, mask=there)


def _launch(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    width = x.shape[-1]
    x = x.contiguous()
    out = torch.empty_like(x)
    _kernel[(x.numel() // width,)](x, scale, shift, out, width, WIDTH=power_of_two(width), num_warps=row_warps(width))
    return out


def _check(device: torch.device, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 72, generator=generator).to(dtype)
    scale, shift = torch.randn(2, 1, 72, generator=generator).to(dtype)
    got = _launch(x.to(device), scale.to(device), shift.to(device))
    return [(got, modulate_reference(x, scale, shift), modulate_reference(x.double(), scale.double(), shift.double()))]


_OP = Op("modulate", _check)


def modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """See `modulate_reference`."""
    return _launch(x, scale, shift) if _OP.runs(x) else modulate_reference(x, scale, shift)
