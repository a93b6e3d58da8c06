"""Rotary tables: positions in seconds and pixels to cos and sin, once per clip.

A table row is separable: frequency k of axis a depends on the token's position on that axis alone. So angles are formed
for the distinct positions of each axis and gathered, and a clip of 14080 tokens evaluates some 53,000 sines instead of
29 million. Angles reach 1.6e4 rad, where the order of float32 roundings decides cos in the third digit; the order is the
official one: frequencies in float64 rounded to float32, times (2 p - 1) in float32, p = midpoint / largest position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rope:
    """cos and sin (U, width/2) float32, heads laid out one after the other; rows (T,): a token's row, None where U is T.

    Kept in float32 for every activation dtype: the official bf16 tables lose half a percent of a rotation, and one
    rounding after float32 arithmetic is the closer to float64.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor | None


def rope(positions: torch.Tensor, width: int, theta: float, max_position: tuple[int, ...], device: torch.device) -> Rope:
    """The table of tokens at `positions` (axes, T, 2), [start, end) in s or px; `width` is that of all heads together.

    One axis: distinct rows and each token's row (video tokens of one latent frame share theirs between the streams).
    Three axes: a row per token, frequency-major and axis-minor, the remainder of width/2 as pairs (1, 0) in front.
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
        tables.append(torch.stack((angle.cos(), angle.sin())).to(device))
        rows.append(row.to(device))
    if axes == 1:
        return Rope(tables[0][0], tables[0][1], None if own_row else rows[0])
    cos, sin = torch.stack([table[:, row] for table, row in zip(tables, rows, strict=True)], dim=-1).flatten(2)  # (T, K * axes)
    pad = width // 2 - cos.shape[-1]
    return Rope(
        torch.cat((cos.new_ones(len(cos), pad), cos), dim=-1),
        torch.cat((sin.new_zeros(len(sin), pad), sin), dim=-1),
        None,
    )


def frequencies(count: int, theta: float) -> torch.Tensor:
    """theta^(k / (count - 1)) * pi / 2 for k = 0..count-1, computed in float64 on the CPU, rounded to float32: (count,)."""
    exponent = torch.linspace(0.0, 1.0, count, dtype=torch.float64)
    return (torch.pow(torch.tensor(theta, dtype=torch.float64), exponent) * (math.pi / 2)).to(torch.float32)
