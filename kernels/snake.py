"""The vocoder's anti-aliased activation: up 2x, SnakeBeta, down 2x, in polyphase form.

Up- and downsampling each use a 12-tap low-pass filter, so at the doubled rate even and odd samples are two 6-tap
filters of their own. Working on the pair (even, odd) needs no zero-stuffed tensor and no strided convolution.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

TAPS = 12
REACH = 6  # samples on either side that one output sample depends on: 3 going up, 3 coming down


def snake(
    x: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """x (B, C, L) -> (B, C, L); alpha, beta (C,) are logarithms; up, down (12,) the low-pass filters, of sum 1."""
    if (
        x.ndim != 3
        or alpha.shape != x.shape[1:2]
        or beta.shape != alpha.shape
        or up.numel() != TAPS
        or down.numel() != TAPS
    ):
        raise ValueError(
            f"snake takes (B, C, L), C, C, {TAPS} and {TAPS} taps, "
            f"got {tuple(x.shape)}, {tuple(alpha.shape)}, {tuple(beta.shape)}, {up.numel()} and {down.numel()}"
        )
    return snake_reference(x, alpha, beta, up, down)


def snake_reference(
    x: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """What `snake` computes.

    The definition (BigVGAN v2's Activation1d): edges of x repeated 5 times, zero-stuffed, filtered with 2 * up, cropped
    to 2 L; u + sin(exp(alpha) u)^2 / (exp(beta) + 1e-9); edges of that repeated 5 and 6 times, filtered with down, every
    second sample kept. In phases, with e[q] = u[2 q] and o[q] = u[2 q + 1] before the activation:

        e[q] = 2 sum_k x[q - 3 + k] up[11 - 2 k]        o[q] = 2 sum_k x[q - 2 + k] up[10 - 2 k]        k = 0..5
        y[q] = sum_k e[q - 2 + k] down[2 k + 1] + o[q - 3 + k] down[2 k]

    Both are 7-tap convolutions between one channel and two, one tap zero. Repeated edges reach both phases: left of the
    clip stand copies of e[0], right of it copies of o[L - 1].
    """
    batch, channels, length = x.shape
    mirrored = 2 * up.reshape(TAPS).flip(0)
    rise = torch.stack([F.pad(mirrored[0::2], (0, 1)), F.pad(mirrored[1::2], (1, 0))])[:, None]  # (2, 1, 7)
    fall = down.reshape(TAPS)
    fall = torch.stack([F.pad(fall[1::2], (1, 0)), F.pad(fall[0::2], (0, 1))])[None]  # (1, 2, 7)
    x = F.pad(x, (3, 3), mode="replicate").view(batch * channels, 1, length + 6)
    u = F.conv1d(x, rise).view(batch, channels, 2, length)
    frequency, weight = alpha.exp()[:, None, None], 1 / (beta.exp()[:, None, None] + 1e-9)
    u = u + weight * torch.sin(u * frequency).square()
    u = torch.cat([u[:, :, :1, :1].expand(-1, -1, 2, 3), u, u[:, :, 1:, -1:].expand(-1, -1, 2, 3)], dim=3)
    return F.conv1d(u.view(batch * channels, 2, length + 6), fall).view(batch, channels, length)
