"""What a merged product of queries, keys and values goes through before grouped attention: norms per head, the rotation.

Every head is normed by itself, queries and keys with a gain, values without; queries and keys are then rotated, halves
a, b of a head becoming (a cos - b sin, b cos + a sin). A product without values lends its keys, as they came, for them.
"""

from __future__ import annotations

import torch

from .dispatch import Compared, Op, jit, power_of_two, row_warps, tl
from .rms_adaln import rms

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def grouped_heads_reference(
    qkv: torch.Tensor,
    q_gain: torch.Tensor,
    k_gain: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
) -> Three:
    """qkv (N, (heads + kv_heads [+ kv_heads]) d), rows may be strided; gains (d,); cos and sin (N, d/2) float32.

    Returns q (N, heads, d), k and v (N, kv_heads, d), contiguous, in qkv's dtype, rounded once.
    """
    normed = rms(qkv.unflatten(-1, (-1, len(q_gain))), eps)  # (N, heads of all three, d)
    q, k, v = normed[:, :heads], normed[:, heads : heads + kv_heads], normed[:, -kv_heads:]
    turned = (_turn(part * gain.to(part.dtype), cos, sin) for part, gain in ((q, q_gain), (k, k_gain)))
    return tuple(part.to(qkv.dtype).contiguous() for part in (*turned, v))


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@jit
def _turned(first, second, gain_ptr, out_ptr, cos, sin, column, there, HALF: tl.constexpr):
    """Gain and rotation of one head's halves, into out_ptr."""
    first *= tl.load(gain_ptr + column, mask=there, other=0.0).to(tl.float32)
    second *= tl.load(gain_ptr + HALF + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + column, first * cos - second * sin, mask=there)
    tl.store(out_ptr + HALF + column, second * cos + first * sin, mask=there)


@jit
def _kernel(
    qkv_ptr,  # (N, all heads, 2 * HALF), tokens qkv_row apart
    q_gain_ptr,  # (2 * HALF,), likewise k
    k_gain_ptr,
    cos_ptr,  # (N, HALF) float32, contiguous; likewise sin
    sin_ptr,
    q_ptr,  # (N, heads, 2 * HALF), contiguous
    k_ptr,  # (N, kv_heads, 2 * HALF), contiguous; likewise v
    v_ptr,
    qkv_row,
    heads,
    kv_heads,
    eps,
    LENT: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program per token and head, those of q, k and v in order; LENT: values are the keys as they came."""
    every = heads + 2 * kv_heads
    token, head = (tl.program_id(0) // every).to(tl.int64), tl.program_id(0) % every
    keys, values = heads, heads + kv_heads
    source = head
    if LENT:
        source = tl.where(head >= values, head - kv_heads, head)
    column = tl.arange(0, WIDTH)
    there = column < HALF
    at = qkv_ptr + token * qkv_row + source * (2 * HALF) + column
    first = tl.load(at, mask=there, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(first * first + second * second, axis=0) / (2 * HALF) + eps)
    first *= scale
    second *= scale
    if head < values:
        cos = tl.load(cos_ptr + token * HALF + column, mask=there, other=0.0)
        sin = tl.load(sin_ptr + token * HALF + column, mask=there, other=0.0)
        if head < keys:
            _turned(first, second, q_gain_ptr, q_ptr + (token * heads + head) * (2 * HALF), cos, sin, column, there, HALF)
        else:
            _turned(first, second, k_gain_ptr, k_ptr + (token * kv_heads + head - keys) * (2 * HALF), cos, sin, column, there, HALF)
    else:
        out = v_ptr + (token * kv_heads + head - values) * (2 * HALF) + column
        tl.store(out, first, mask=there)
        tl.store(out + HALF, second, mask=there)


def _launch(
    qkv: torch.Tensor,
    q_gain: torch.Tensor,
    k_gain: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
) -> Three:
    tokens, width = qkv.shape
    head_dim, every = len(q_gain), heads + 2 * kv_heads
    lent = width == (every - kv_heads) * head_dim
    if head_dim % 2 or not (lent or width == every * head_dim) or cos.shape != (tokens, head_dim // 2) or sin.shape != cos.shape:
        raise ValueError(
            f"a product {tuple(qkv.shape)} with tables {tuple(cos.shape)} does not hold {heads} queries and {kv_heads} keys, values or not, of {head_dim}"
        )
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    q = qkv.new_empty(tokens, heads, head_dim)
    k, v = (qkv.new_empty(tokens, kv_heads, head_dim) for _ in range(2))
    _kernel[(tokens * every,)](
        qkv,
        q_gain,
        k_gain,
        cos.contiguous(),
        sin.contiguous(),
        q,
        k,
        v,
        qkv.stride(0),
        heads,
        kv_heads,
        eps,
        LENT=lent,
        HALF=head_dim // 2,
        WIDTH=power_of_two(head_dim // 2),
        num_warps=row_warps(head_dim),
    )
    return q, k, v


def _check(device: torch.device, dtype: torch.dtype) -> list[Compared]:
    """Both kinds of published layers, with values and without: nothing is compiled for the check alone."""
    generator = torch.Generator().manual_seed(0)
    results: list[Compared] = []
    for kv_heads, head_dim, merged in ((8, 256, 32), (1, 512, 17)):
        qkv = torch.randn(2, merged * head_dim, generator=generator).to(dtype)
        gains = torch.randn(2, head_dim, generator=generator).to(dtype)
        tables = torch.randn(2, 2, head_dim // 2, generator=generator)
        got = _launch(qkv.to(device), *gains.to(device), *tables.to(device), 16, kv_heads, 1e-6)
        twin = grouped_heads_reference(qkv, *gains, *tables, 16, kv_heads, 1e-6)
        truth = grouped_heads_reference(qkv.double(), *gains.double(), *tables.double(), 16, kv_heads, 1e-6)
        results += zip(got, twin, truth, strict=True)
    return results


_OP = Op("grouped_heads", _check)


def grouped_heads(
    qkv: torch.Tensor,
    q_gain: torch.Tensor,
    k_gain: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
) -> Three:
    """See `grouped_heads_reference`. Raises ValueError for a width that is neither with nor without values."""
    return (_launch if _OP.runs(qkv) else grouped_heads_reference)(qkv, q_gain, k_gain, cos, sin, heads, kv_heads, eps)
