"""What queries and keys go through before attention: RMS norm over all heads together, then the split rotation.

The two halves a, b of a head become (a cos - b sin, b cos + a sin). Tables are float32 and the arithmetic is wide, with
one rounding at the end: closer to float64 than the official bf16 tables and its two roundings.

A token's angles are those of its position on each axis, dealt out in turn. So tables hold a row per distinct position of an
axis, and tokens name theirs: rows of full width for every token would be a third of all bytes this op moves.
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
    """x (R, T, H*d), rows may be strided; weight (H*d,); cos and sin (U, K), None: no rotation.

    rows (A, T) names the table row of every token on every axis, None: A is 1 and U is T. See `spread`.
    Returns (R, T, H, d), contiguous.
    """
    y = x.to(wide(x.dtype))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.to(y.dtype)
    y = y.unflatten(-1, (heads, -1))
    if cos is not None:
        half = x.shape[-1] // 2
        cos, sin = (spread(table, rows, half, still).unflatten(-1, (heads, -1)) for table, still in ((cos, 1.0), (sin, 0.0)))  # (T, H, d/2)
        a, b = y.chunk(2, dim=-1)
        y = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return y.to(x.dtype)


def spread(table: torch.Tensor, rows: torch.Tensor | None, half: int, still: float) -> torch.Tensor:
    """A table (U, K) as every token's own row (T, half): axes take turns, and `still` stands before them where A K < half."""
    if rows is None:
        return table
    turns = table[rows].movedim(0, -1).flatten(1)  # (A, T, K) -> (T, K * A)
    return torch.nn.functional.pad(turns, (half - turns.shape[1], 0), value=still)


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
    cos_ptr,  # (U, K) float32, contiguous, read if ROTATE
    sin_ptr,
    rows_ptr,  # (AXES, T) int64, contiguous, read if AXES
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
    AXES: tl.constexpr,
    STILL: tl.constexpr,
    PAIR: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program per token and row of the batch; those of one token are neighbours, so that its table rows are in cache.

    AXES 0: tables have a row per token. STILL: pairs that do not turn, in front of those that do.
    """
    token, row = (tl.program_id(0) // batch).to(tl.int64), (tl.program_id(0) % batch).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = column < width // 2
    a = column // HALF * (2 * HALF) + column % HALF
    b = a + HALF
    cos = tl.zeros((WIDTH,), tl.float32)
    sin = cos
    if ROTATE:
        if AXES == 0:
            at = token * (width // 2) + column
        elif AXES == 1:
            at = tl.load(rows_ptr + token) * (width // 2) + column
        else:
            turn = column - STILL
            table = tl.load(rows_ptr + token)
            for axis in tl.static_range(1, AXES):
                table = tl.where(turn % AXES == axis, tl.load(rows_ptr + axis * tokens + token), table)
            at = table * ((width // 2 - STILL) // AXES) + turn // AXES
        turns = there & (column >= STILL)
        cos = tl.load(cos_ptr + at, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + at, mask=turns, other=0.0)
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
    axes = 0 if rows is None or cos is None else len(rows)
    still = width // 2 - max(axes, 1) * cos.shape[1] if cos is not None else 0
    if still < 0 or (axes < 2 and still):
        raise ValueError(f"tables of {cos.shape[1]} angles for {max(axes, 1)} axes do not fit {width // 2} pairs")
    q_out = q.new_empty(batch, tokens, heads, width // heads)
    k_out = q_out if k is None else torch.empty_like(q_out)
    _kernel[(batch * tokens,)](
        q,
        other,
        q_weight,
        k_weight,
        q if cos is None else cos,
        q if sin is None else sin,
        q if rows is None else rows.contiguous(),
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
        AXES=axes,
        STILL=still,
        PAIR=k is not None,
        WIDTH=power_of_two(width // 2),
        num_warps=row_warps(width),
    )
    return q_out, k_out


def _check(device: torch.device, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 3, 2 * 48 + 5, generator=generator).to(dtype)[..., : 2 * 48].chunk(2, dim=-1)  # rows of a wider product
    weights = torch.randn(2, 48, generator=generator).to(dtype)
    results = []
    for rows, angles in ((torch.tensor([[1, 0, 1]]), 24), (torch.tensor([[1, 0, 1], [2, 2, 3], [4, 4, 4]]), 7)):
        cos, sin = torch.randn(2, 5, angles, generator=generator)
        got = _launch(q.to(device), k.to(device), *weights.to(device), cos.to(device), sin.to(device), rows.to(device), 3, 1e-6)
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
