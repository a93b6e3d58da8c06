"""RMS norm without weight, then an affine given per timestep level: RMS(x) * (1 + scale) + shift.

Modulation rows are (K, D), one per distinct timestep of the stream; `index` (T,) names the row of every token, None where
K is 1. They are never spread to (T, D) outside a kernel. Rows may be strided, their last dimension may not.
"""

from __future__ import annotations

import torch

from .dispatch import Op, jit, power_of_two, row_warps, tl, wide

Affine = tuple[torch.Tensor, torch.Tensor]  # (scale, shift), each (K, D)


def rms_adaln_reference(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, index: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x (R, T, D), scale and shift (K, D), index (T,) or None: (R, T, D) in x's dtype, rounded once."""
    return affine(rms(x, eps), scale, shift, index).to(x.dtype)


def rms_adaln_pair_reference(
    x: torch.Tensor, first: Affine, second: Affine, index: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two affines of one norm: what both directions of audio-video attention read from the same stream."""
    normed = rms(x, eps)
    return affine(normed, *first, index).to(x.dtype), affine(normed, *second, index).to(x.dtype)


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, in the wide dtype."""
    x = x.to(wide(x.dtype))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def affine(normed: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """normed (R, T, D) in the wide dtype, modulated by each token's own row."""
    return normed * (1 + rows(scale, index, normed.dtype)) + rows(shift, index, normed.dtype)


def rows(values: torch.Tensor, index: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """(K, D) -> (T, D), or (1, D) where one row serves every token."""
    return values.to(dtype) if index is None else values.to(dtype)[index]


@jit
def _kernel(
    x_ptr,  # (R * T, D), rows x_row apart
    index_ptr,  # (T,) int64, read if LEVELS
    a_scale_ptr,  # (K, D), rows a_scale_row apart; likewise the other three
    a_shift_ptr,
    b_scale_ptr,
    b_shift_ptr,
    a_ptr,  # (R * T, D), contiguous
    b_ptr,
    x_row,
    a_scale_row,
    a_shift_row,
    b_scale_row,
    b_shift_row,
    tokens,
    width,
    eps,
    LEVELS: tl.constexpr,
    PAIR: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """y = x / sqrt(mean(x^2) + eps) * (1 + scale) + shift; one program per row, statistics in float32."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = column < width
    x = tl.load(x_ptr + row * x_row + column, mask=there, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    level = row * 0
    if LEVELS:
        level = tl.load(index_ptr + row % tokens).to(tl.int64)
    scale = tl.load(a_scale_ptr + level * a_scale_row + column, mask=there, other=0.0).to(tl.float32)
    shift = tl.load(a_shift_ptr + level * a_shift_row + column, mask=there, other=0.0).to(tl.float32)
    tl.store(a_ptr + row * width + column, x * (1 + scale) + shift, mask=there)
    if PAIR:
        scale = tl.load(b_scale_ptr + level * b_scale_row + column, mask=there, other=0.0).to(tl.float32)
        shift = tl.load(b_shift_ptr + level * b_shift_row + column, mask=there, other=0.0).to(tl.float32)
        tl.store(b_ptr + row * width + column, x * (1 + scale) + shift, mask=there)


def _launch(x: torch.Tensor, first: Affine, second: Affine | None, index: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, ...]:
    tokens, width = x.shape[-2:]
    x = x.contiguous()
    out = [torch.empty_like(x) for _ in range(1 if second is None else 2)]
    other = second or first
    _kernel[(x.numel() // width,)](
        x,
        x if index is None else index,
        *first,
        *other,
        out[0],
        out[-1],
        width,
        first[0].stride(0),
        first[1].stride(0),
        other[0].stride(0),
        other[1].stride(0),
        tokens,
        width,
        eps,
        LEVELS=index is not None,
        PAIR=second is not None,
        WIDTH=power_of_two(width),
        num_warps=row_warps(width),
    )
    return tuple(out)


def _check(device: torch.device, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 72, generator=generator).to(dtype)
    modulation = torch.randn(2, 4, 72, generator=generator).to(dtype)
    index = torch.tensor([1, 0, 1])
    pairs = [(modulation[:, 0], modulation[:, 1]), (modulation[:, 2], modulation[:, 3])]

    def move(value, to):
        return tuple(part.to(to) for part in value)

    got = _launch(x.to(device), move(pairs[0], device), move(pairs[1], device), index.to(device), 1e-6)
    twin = rms_adaln_pair_reference(x, *pairs, index, 1e-6)
    truth = rms_adaln_pair_reference(x.double(), *(move(pair, torch.float64) for pair in pairs), index, 1e-6)
    return list(zip(got, twin, truth, strict=True))


_OP = Op("rms_adaln", _check)


def rms_adaln(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, index: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See `rms_adaln_reference`."""
    if not _OP.runs(x):
        return rms_adaln_reference(x, scale, shift, index, eps)
    return _launch(x, (scale, shift), None, index, eps)[0]


def rms_adaln_pair(
    x: torch.Tensor, first: Affine, second: Affine, index: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `rms_adaln_pair_reference`."""
    if not _OP.runs(x):
        return rms_adaln_pair_reference(x, first, second, index, eps)
    first_out, second_out = _launch(x, first, second, index, eps)
    return first_out, second_out
