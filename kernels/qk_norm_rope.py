"""What queries and keys go through before attention: RMS norm over all heads together, then the split rotation.

The two halves a, b of a head become (a cos - b sin, b cos + a sin). Tables are float32 and the arithmetic is wide, with
one rounding at the end: closer to float64 than the official bf16 tables and its two roundings.
"""

from __future__ import annotations

import torch

from .dispatch import Op, jit, power_of_two, row_warps, tl, wide

Table = torch.Tensor | None


def qk_norm_rope_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: Table,
    sin: Table,
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


@jit
def _rotated(x_ptr, weight_ptr, out_ptr, at, out_at, cos, sin, a, b, there, width, eps, ROTATE: tl.constexpr):
    """Norm and rotate one row: `a` and `b` are the columns of first and second halves of all heads."""
    first = tl.load(x_ptr + at + a, mask=there, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + b, mask=there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(first * first + second * second, axis=0) / width + eps)
    first *= scale * tl.load(weight_ptr + a, mask=there, other=0.0).to(tl.float32)
    second *= scale * tl.load(weight_ptr + b, mask=there, other=0.0).to(tl.float32)
    if ROTATE:
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    tl.store(out_ptr + out_at + a, first, mask=there)
    tl.store(out_ptr + out_at + b, second, mask=there)


@jit
def _kernel(
    q_ptr,  # (R, T, H * d), last dimension contiguous; likewise k, read if PAIR
    k_ptr,
    q_weight_ptr,  # (H * d,)
    k_weight_ptr,
    cos_ptr,  # (U, H * d / 2) float32, contiguous, read if ROTATE
    sin_ptr,
    rows_ptr,  # (T,) int64, read if MAPPED
    q_out_ptr,  # (R, T, H, d), contiguous
    k_out_ptr,
    q_row,
    q_token,
    k_row,
    k_token,
    batch,
    tokens,
    width,
    eps,
    HALF: tl.constexpr,
    ROTATE: tl.constexpr,
    MAPPED: tl.constexpr,
    PAIR: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program per token and row of the batch; those of one token are neighbours, so that its table row is in cache."""
    token, row = (tl.program_id(0) // batch).to(tl.int64), (tl.program_id(0) % batch).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = column < width // 2
    a = column // HALF * (2 * HALF) + column % HALF
    b = a + HALF
    cos = tl.zeros((WIDTH,), tl.float32)
    sin = cos
    if ROTATE:
        table = token
        if MAPPED:
            table = tl.load(rows_ptr + token).to(tl.int64)
        cos = tl.load(cos_ptr + table * (width // 2) + column, mask=there, other=0.0)
        sin = tl.load(sin_ptr + table * (width // 2) + column, mask=there, other=0.0)
    out_at = (row * tokens + token) * width
    _rotated(q_ptr, q_weight_ptr, q_out_ptr, row * q_row + token * q_token, out_at, cos, sin, a, b, there, width, eps, ROTATE)
    if PAIR:
        _rotated(k_ptr, k_weight_ptr, k_out_ptr, row * k_row + token * k_token, out_at, cos, sin, a, b, there, width, eps, ROTATE)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: Table,
    sin: Table,
    rows: torch.Tensor | None,
    heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, tokens, width = q.shape
    q = q if q.stride(2) == 1 else q.contiguous()
    other = q if k is None else k if k.stride(2) == 1 else k.contiguous()
    if other.shape != q.shape or width % (2 * heads):
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(other.shape)} must agree, and {width} be an even number for each of {heads} heads")
    q_out = q.new_empty(batch, tokens, heads, width // heads)
    k_out = q_out if k is None else torch.empty_like(q_out)
    _kernel[(batch * tokens,)](
        q,
        other,
        q_weight,
        k_weight,
        q if cos is None else cos,
        q if sin is None else sin,
        q if rows is None else rows,
        q_out,
        k_out,
        q.stride(0),
        q.stride(1),
        other.stride(0),
        other.stride(1),
        batch,
        tokens,
        width,
        eps,
        HALF=width // heads // 2,
        ROTATE=cos is not None,
        MAPPED=rows is not None,
        PAIR=k is not None,
        WIDTH=power_of_two(width // 2),
        num_warps=row_warps(width),
    )
    return q_out, k_out


def _check(device: torch.device, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 3, 2 * 48 + 5, generator=generator).to(dtype)[..., : 2 * 48].chunk(2, dim=-1)  # rows of a wider product
    weights = torch.randn(2, 48, generator=generator).to(dtype)
    cos, sin = torch.randn(2, 2, 24, generator=generator)
    rows = torch.tensor([1, 0, 1])
    got = _launch(q.to(device), k.to(device), *weights.to(device), cos.to(device), sin.to(device), rows.to(device), 3, 1e-6)
    results = []
    for x, weight, mine in ((q, weights[0], got[0]), (k, weights[1], got[1])):
        twin = qk_norm_rope_reference(x, weight, cos, sin, rows, 3, 1e-6)
        truth = qk_norm_rope_reference(x.double(), weight.double(), cos.double(), sin.double(), rows, 3, 1e-6)
        results.append((mine, twin, truth))
    return results


_OP = Op("qk_norm_rope", _check)


def qk_norm_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: Table,
    sin: Table,
    rows: torch.Tensor | None,
    heads: int,
    eps: float,
) -> torch.Tensor:
    """See `qk_norm_rope_reference`."""
    if not _OP.runs(x):
        return qk_norm_rope_reference(x, weight, cos, sin, rows, heads, eps)
    return _launch(x, None, weight, weight, cos, sin, rows, heads, eps)[0]


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
    if _OP.runs(q):
        return _launch(q, k, q_weight, k_weight, cos, sin, rows, heads, eps)
    return (
        qk_norm_rope_reference(q, q_weight, cos, sin, rows, heads, eps),
        qk_norm_rope_reference(k, k_weight, cos, sin, rows, heads, eps),
    )
