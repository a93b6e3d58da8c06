"""An affine without a norm, x * (1 + scale) + shift: the text contexts, once per block and prompt."""

from __future__ import annotations

import torch

from .dispatch import wide
from .rms_adaln import affine


def modulate_reference(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """x (R, S, D), scale and shift (1, D): (R, S, D) in x's dtype, rounded once."""
    return affine(x.to(wide(x.dtype)), scale, shift, None).to(x.dtype)


def modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """See `modulate_reference`."""
    return modulate_reference(x, scale, shift)
