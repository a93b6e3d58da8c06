"""The gated MLP of a windowed-attention block with the norm before it and the residual around it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .window_qkv import rms_norm

_TOKENS = 1 << 16  # tokens the twin works on at once: its hidden tensors stay small


def swiglu_residual_reference(
    x: torch.Tensor,
    gain: torch.Tensor,
    shift: torch.Tensor | None,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> None:
    """out = x + w_down(silu(w_gate n) * (w_up n)) with n = RMS(x) * gain + shift. x and out (N, C), out may be x.

    w_gate and w_up (hidden, C), w_down (C, hidden); no biases.
    """
    for first in range(0, x.shape[0], _TOKENS):
        part = x[first : first + _TOKENS]
        normed = rms_norm(part, gain, shift, eps)
        hidden = F.silu(F.linear(normed, w_gate)).mul_(F.linear(normed, w_up))
        torch.add(part, F.linear(hidden, w_down), out=out[first : first + _TOKENS])


def swiglu_residual(
    x: torch.Tensor,
    gain: torch.Tensor,
    shift: torch.Tensor | None,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> None:
    """See `swiglu_residual_reference`."""
    swiglu_residual_reference(x, gain, shift, w_gate, w_up, w_down, eps, out)
