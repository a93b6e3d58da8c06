"""RMS norm without weight, then an affine given per timestep level: RMS(x) * (1 + scale) + shift.

Modulation rows are (K, D), one per distinct timestep of the stream; `index` (T,) names the row of every token, None where
K is 1. They are never spread to (T, D) outside a kernel. Rows may be strided, their last dimension may not.
"""

from __future__ import annotations

import torch

from .dispatch import wide

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


def rms_adaln(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, index: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See `rms_adaln_reference`."""
    return rms_adaln_reference(x, scale, shift, index, eps)


def rms_adaln_pair(
    x: torch.Tensor, first: Affine, second: Affine, index: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `rms_adaln_pair_reference`."""
    return rms_adaln_pair_reference(x, first, second, index, eps)
