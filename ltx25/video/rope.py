"""Absolute 3-D rope of the diffusion decoder: positions 0, 1, 2, ... per axis of a stage's whole grid.

Rope is relative but for its rounding: a tile takes the positions it has in the whole, and then computes what the whole does.
"""

from __future__ import annotations

import torch

from ...kernels.head_norm_rope import Rope

_BASE = 10000.0


def rope_split(head_dim: int) -> tuple[int, int, int]:
    """Channels of a head that turn with t, h and w; all even. 64 -> (16, 24, 24)."""
    t = head_dim // 4 // 2 * 2
    side = (head_dim - t) // 2
    return (t - 2, side + 1, side + 1) if side % 2 else (t, side, side)


def rope(grid: tuple[int, int, int], first: tuple[int, int, int], head_dim: int, device: torch.device) -> Rope:
    """float32 tables for a grid (T, H, W) whose first cell is at `first`: angle = position * 10000^(-2 j / channels), frequencies from float64."""
    cos, sin = [], []
    for length, begin, channels in zip(grid, first, rope_split(head_dim), strict=True):
        inverse = (_BASE ** -(torch.arange(0, channels, 2, dtype=torch.float64) / channels)).to(torch.float32)
        angles = torch.arange(begin, begin + length, dtype=torch.float32)[:, None] * inverse
        cos.append(angles.cos().to(device))
        sin.append(angles.sin().to(device))
    return Rope(tuple(cos), tuple(sin))
