"""What queries and keys go through before attention: RMS norm over all heads together, then the split rotation.

The two halves a, b of a head become (a cos - b sin, b cos + a sin). Tables are float32 and the arithmetic is wide, with
one rounding at the end: closer to float64 than the official bf16 tables and its two roundings.
"""

from __future__ import annotations

import torch

from .dispatch import wide


def qk_norm_rope_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    rows: torch.Tensor | None,
    heads: int,
    eps: float,
) -> torch.Tensor:
    """x (R, T, H*d), rows may be strided; weight (H*d,); cos and sin (U, H*d/2), None: no rotation.

    rows (T,) names the table row of every token, None where U is T. Returns (R, T, H, d), contiguous.
    """
    y = x.to(wide(x.dtype))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.to(y.dtype)
    y = y.unflatten(-1, (heads, -1))
    if cos is not None:
        cos, sin = (table if rows is None else table[rows] for table in (cos, sin))
        cos, sin = (table.unflatten(-1, (heads, -1)) for table in (cos, sin))  # (T, H, d/2)
        a, b = y.chunk(2, dim=-1)
        y = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return y.to(x.dtype)


def qk_norm_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    rows: torch.Tensor | None,
    heads: int,
    eps: float,
) -> torch.Tensor:
    """See `qk_norm_rope_reference`."""
    return qk_norm_rope_reference(x, weight, cos, sin, rows, heads, eps)


def qk_norm_rope_pair(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rows: torch.Tensor | None,
    heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of one stream, same tokens and same tables: each as `qk_norm_rope` gives it."""
    return (
        qk_norm_rope_reference(q, q_weight, cos, sin, rows, heads, eps),
        qk_norm_rope_reference(k, k_weight, cos, sin, rows, heads, eps),
    )
