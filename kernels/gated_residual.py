"""The end of a sub-layer: x += y * gate in place, alone or with the norm that opens the next sub-layer.

In place, because the residual stream is the one tensor that lives through all blocks, and rows of several legs are
updated as slices of it. Gate rows are (K, D) as in rms_adaln.py.
"""

from __future__ import annotations

import torch

from .dispatch import wide
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


def gated_residual(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """See `gated_residual_reference`."""
    return gated_residual_reference(x, y, gate, index)


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
    return gated_residual_rms_adaln_reference(x, y, gate, scale, shift, index, eps)
