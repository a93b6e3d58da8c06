"""The seam of a layer that norms before and after each half: what a half made is normed, added and scaled, and the sum
normed for whoever reads it next.

z = (x + RMS(y) gain) scale, then RMS(z) following for the next half, and RMS(z) alone into a buffer that collects the
states of all layers. Done op by op it is four to seven passes over rows of a few thousand numbers, launched one by one.
"""

from __future__ import annotations

from functools import partial

import torch

from .dispatch import Compared, Op, jit, power_of_two, row_warps, tl, wide
from .rms_adaln import rms


def sandwich_norm_reference(
    x: torch.Tensor,
    y: torch.Tensor,
    gain: torch.Tensor,
    scale: torch.Tensor | None,
    following: torch.Tensor | None,
    state: torch.Tensor | None,
    eps: float,
    state_eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x and y (N, C), gain and following (C,), scale (1,), None: 1: z (N, C), rounded once, and RMS(z) following (N, C), or None.

    state (N, C), any strides, gets RMS(z) with an eps of its own; None: nobody collects. Norms read the rounded z.
    """
    dtype = wide(x.dtype)
    z = x.to(dtype) + rms(y, eps) * gain.to(dtype)
    z = (z if scale is None else z * scale.to(dtype)).to(x.dtype)
    if state is not None:
        state.copy_(rms(z, state_eps))
    return z, None if following is None else (rms(z, eps) * following.to(dtype)).to(x.dtype)


@partial(jit, general=("state_ptr",))  # every state begins at another place
def _kernel(
    x_ptr,  # (N, C), contiguous; y, z and next alike
    y_ptr,
    gain_ptr,  # (C,), likewise following
    scale_ptr,  # (1,), read if SCALE
    following_ptr,
    z_ptr,
    next_ptr,  # written if NEXT
    state_ptr,  # (N, C), strided, written if STATE
    state_row,
    state_column,
    width,
    eps,
    state_eps,
    SCALE: tl.constexpr,
    NEXT: tl.constexpr,
    STATE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program per row, statistics in float32."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = column < width
    at = row * width + column
    x = tl.load(x_ptr + at, mask=there, other=0.0)
    y = tl.load(y_ptr + at, mask=there, other=0.0).to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, axis=0) / width + eps)
    z = x.to(tl.float32) + y * tl.load(gain_ptr + column, mask=there, other=0.0).to(tl.float32)
    if SCALE:
        z *= tl.load(scale_ptr).to(tl.float32)
    rounded = z.to(x.dtype)
    tl.store(z_ptr + at, rounded, mask=there)
    z = rounded.to(tl.float32)
    square = tl.sum(z * z, axis=0) / width
    if NEXT:
        following = tl.load(following_ptr + column, mask=there, other=0.0).to(tl.float32)
        tl.store(next_ptr + at, (z * tl.rsqrt(square + eps) * following).to(x.dtype), mask=there)
    if STATE:
        place = state_ptr + row * state_row + column.to(tl.int64) * state_column
        tl.store(place, (z * tl.rsqrt(square + state_eps)).to(state_ptr.dtype.element_ty), mask=there)


def _launch(
    x: torch.Tensor,
    y: torch.Tensor,
    gain: torch.Tensor,
    scale: torch.Tensor | None,
    following: torch.Tensor | None,
    state: torch.Tensor | None,
    eps: float,
    state_eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if x.shape != y.shape or (state is not None and state.shape != x.shape):
        raise ValueError(f"sandwich_norm adds rows of one shape, got {tuple(x.shape)} and {tuple(y.shape)}, state {None if state is None else tuple(state.shape)}")
    rows, width = x.shape
    x, y = x.contiguous(), y.contiguous()
    z = torch.empty_like(x)
    normed = None if following is None else torch.empty_like(x)
    _kernel[(rows,)](
        x,
        y,
        gain,
        gain if scale is None else scale,
        gain if following is None else following,
        z,
        z if normed is None else normed,
        z if state is None else state,
        *((0, 0) if state is None else state.stride()),
        width,
        eps,
        state_eps,
        SCALE=scale is not None,
        NEXT=normed is not None,
        STATE=state is not None,
        WIDTH=power_of_two(width),
        num_warps=row_warps(width),
    )
    return z, normed


def _check(device: torch.device, dtype: torch.dtype) -> list[Compared]:
    """Both ways a published layer calls it, at its width: nothing is compiled for the check alone."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, 3840, generator=generator).to(dtype)
    gain, following, scale = (torch.randn(n, generator=generator).to(dtype) for n in (3840, 3840, 1))
    packed = torch.zeros(3, 3840, 49, dtype=dtype).to(device)
    x_, y_, gain_, following_, scale_ = (part.to(device) for part in (x, y, gain, following, scale))
    middle, normed = _launch(x_, y_, gain_, None, following_, None, 1e-6, 1e-6)
    end, _ = _launch(x_, y_, gain_, scale_, None, packed[:, :, 2], 1e-6, 1e-6)
    results: list[Compared] = []
    for z, factor in ((middle, None), (end, scale)):
        twin, _ = sandwich_norm_reference(x, y, gain, factor, None, None, 1e-6, 1e-6)
        true, _ = sandwich_norm_reference(x.double(), y.double(), gain.double(), None if factor is None else factor.double(), None, None, 1e-6, 1e-6)
        results.append((z, twin, true))
    # What the norms read is the kernel's own z, rounded.
    for z, got, weight in ((middle.cpu(), normed, following), (end.cpu(), packed[:, :, 2], torch.ones(3840, dtype=dtype))):
        plain = (rms(z, 1e-6) * weight.to(wide(dtype))).to(dtype)
        results.append((got, plain, rms(z.double(), 1e-6) * weight.double()))
    return results


_OP = Op("sandwich_norm", _check)


def sandwich_norm(
    x: torch.Tensor,
    y: torch.Tensor,
    gain: torch.Tensor,
    scale: torch.Tensor | None,
    following: torch.Tensor | None,
    state: torch.Tensor | None,
    eps: float,
    state_eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `sandwich_norm_reference`."""
    return (_launch if _OP.runs(x) else sandwich_norm_reference)(x, y, gain, scale, following, state, eps, state_eps)
