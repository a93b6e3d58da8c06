"""Rotary tables: positions in seconds and pixels to cos and sin, once per clip.

A token's angles are separable: frequency k of axis a depends on its position on that axis alone. So tables have a row per
distinct position of each axis, and a clip of 14080 tokens has some 53,000 sines instead of 29 million; tokens on no grid,
as those of conditions and references are, name their rows as well as any. Angles reach 1.6e4 rad, where the order of float32 roundings decides cos in the third digit; the order is the
official one: frequencies in float64 rounded to float32, times (2 p - 1) in float32, p = midpoint / largest position.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

STEP = 64  # rows


@dataclass(frozen=True)
class Rope:
    """cos and sin (U, K) float32; rows (axes, T): each token's row on each axis, None: one axis, a row per token.

    Pair m of a token, heads laid out one after the other: after the first width/2 - K * axes, which stay still, frequencies
    are dealt out to the axes in turn (kernels/qk_norm_rope.py).

    Kept in float32 for every activation dtype: the official bf16 tables lose half a percent of a rotation, and one
    rounding after float32 arithmetic is the closer to float64.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor | None


def rope(positions: torch.Tensor, width: int, theta: float, max_position: tuple[int, ...], device: torch.device) -> Rope:
    """The table of tokens at `positions` (axes, T, 2), [start, end) in s or px; `width` is that of all heads together.

    Rows of several axes lie one axis below the other, filled up to a multiple of STEP: how many positions a clip's
    conditions add is no new shape for a captured graph.
    """
    positions = positions.detach().to("cpu", torch.float32)
    axes = len(positions)
    middle = (positions[..., 0] + positions[..., 1]) / 2.0  # (axes, T)
    step = frequencies(width // (2 * axes), theta)
    tables, rows = [], []
    for axis, largest in enumerate(max_position):
        distinct, row = torch.unique(middle[axis], return_inverse=True)
        own_row = torch.equal(row, torch.arange(len(row)))
        angle = step * ((distinct / largest).unsqueeze(-1) * 2 - 1)  # (U, K)
        tables.append(torch.stack((angle.cos(), angle.sin())))
        rows.append(row)
    if axes == 1:
        return Rope(tables[0][0].to(device), tables[0][1].to(device), None if own_row else rows[0][None].to(device))
    begins = list(itertools.accumulate((table.shape[1] for table in tables), initial=0))
    cos, sin = F.pad(torch.cat(tables, dim=1), (0, 0, 0, -begins[-1] % STEP)).to(device)
    return Rope(cos, sin, torch.stack([row + begin for row, begin in zip(rows, begins, strict=False)]).to(device))


def frequencies(count: int, theta: float) -> torch.Tensor:
    """theta^(k / (count - 1)) * pi / 2 for k = 0..count-1, computed in float64 on the CPU, rounded to float32: (count,)."""
    exponent = torch.linspace(0.0, 1.0, count, dtype=torch.float64)
    return (torch.pow(torch.tensor(theta, dtype=torch.float64), exponent) * (math.pi / 2)).to(torch.float32)
