"""What q, k and v of a video block go through between their product and windowed attention: head norms and 3-D rope.

Wide arithmetic, one rounding. The product's rows are q, k, v, each head by head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .add_rms_norm import rms_norm
from .dispatch import Compared, Op, jit, tl


@dataclass(frozen=True)
class Rope:
    """Angles of one grid: cos and sin per axis, (T, a), (H, b), (W, b) float32 with a + 2 b pairs of neighbouring channels."""

    cos: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    sin: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def frames(self, first: int, count: int) -> Rope:
        """The angles of `count` frames from `first` on."""
        return Rope(*((table[0][first : first + count], *table[1:]) for table in (self.cos, self.sin)))


def head_norm_rope_reference(
    qkv: torch.Tensor,
    q_gain: torch.Tensor,
    k_gain: torch.Tensor,
    rope: Rope,
    eps: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """qkv (F, H, W, 3 * heads * d) -> q, k, v (F, H, W, heads, d), written in place; they may be parts of larger buffers.

    q and k per head RMS(.) * gain, gains (d,); then rope over neighbouring channel pairs. A scale of q is part of q_gain.
    """
    heads, width = q.shape[-2:]
    parts = qkv.unflatten(-1, (3, heads, width))
    q.copy_(rotate(rms_norm(parts[..., 0, :, :], q_gain, None, eps, keep_wide=True), rope))
    k.copy_(rotate(rms_norm(parts[..., 1, :, :], k_gain, None, eps, keep_wide=True), rope))
    v.copy_(parts[..., 2, :, :])


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """3-D rope of x (F, H, W, heads, d): channels split (2 a, 2 b, 2 b) over the axes, pairs (2 j, 2 j + 1)."""
    out = torch.empty_like(x)
    begin = 0
    for axis, (cos, sin) in enumerate(zip(rope.cos, rope.sin, strict=True)):
        end = begin + 2 * cos.shape[1]
        place = [1, 1, 1, 1, cos.shape[1]]
        place[axis] = cos.shape[0]
        cos, sin = cos.view(place).to(x.dtype), sin.view(place).to(x.dtype)
        even, odd = x[..., begin:end:2], x[..., begin + 1 : end : 2]
        out[..., begin:end:2] = even * cos - odd * sin
        out[..., begin + 1 : end : 2] = even * sin + odd * cos
        begin = end
    return out


@jit
def _turned(x, gain_ptr, cos, sin, eps, TOKENS: tl.constexpr, PAIRS: tl.constexpr):
    """Norm and rotate (TOKENS, 2 * PAIRS) of one head."""
    x = x.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=1) / (2 * PAIRS) + eps)[:, None]
    x *= tl.load(gain_ptr + tl.arange(0, 2 * PAIRS))[None, :]
    even, odd = tl.split(tl.reshape(x, (TOKENS, PAIRS, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (TOKENS, 2 * PAIRS))


@jit
def _head_norm_rope(
    qkv_ptr,  # (N, 3, heads, 2 * PAIRS), contiguous
    q_gain_ptr,  # (2 * PAIRS,) float32, likewise k
    k_gain_ptr,
    cos_t_ptr,  # (F, T_PAIRS) float32; h and w alike
    sin_t_ptr,
    cos_h_ptr,
    sin_h_ptr,
    cos_w_ptr,
    sin_w_ptr,
    q_ptr,  # (N, heads, 2 * PAIRS), contiguous; k and v alike
    k_ptr,
    v_ptr,
    tokens,
    height,
    width,
    heads,
    eps,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
    T_PAIRS: tl.constexpr,
    SIDE_PAIRS: tl.constexpr,
):
    """TOKENS tokens of all heads per program."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there = token < tokens
    token = tl.minimum(token, tokens - 1)
    t = (token // (height * width)).to(tl.int32)
    h = (token // width % height).to(tl.int32)
    w = (token % width).to(tl.int32)
    pair = tl.arange(0, PAIRS)
    in_t = (pair < T_PAIRS)[None, :]
    in_h = ((pair >= T_PAIRS) & (pair < T_PAIRS + SIDE_PAIRS))[None, :]
    in_w = (pair >= T_PAIRS + SIDE_PAIRS)[None, :]
    at_t = t[:, None] * T_PAIRS + pair[None, :]
    at_h = h[:, None] * SIDE_PAIRS + (pair - T_PAIRS)[None, :]
    at_w = w[:, None] * SIDE_PAIRS + (pair - T_PAIRS - SIDE_PAIRS)[None, :]
    cos = tl.load(cos_t_ptr + at_t, mask=in_t, other=0.0) + tl.load(cos_h_ptr + at_h, mask=in_h, other=0.0)
    cos += tl.load(cos_w_ptr + at_w, mask=in_w, other=0.0)
    sin = tl.load(sin_t_ptr + at_t, mask=in_t, other=0.0) + tl.load(sin_h_ptr + at_h, mask=in_h, other=0.0)
    sin += tl.load(sin_w_ptr + at_w, mask=in_w, other=0.0)
    column = tl.arange(0, 2 * PAIRS)
    for head in range(0, heads):
        source = (token * 3 * heads + head)[:, None] * (2 * PAIRS) + column[None, :]
        target = (token * heads + head)[:, None] * (2 * PAIRS) + column[None, :]
        part = heads * 2 * PAIRS
        q = _turned(tl.load(qkv_ptr + source), q_gain_ptr, cos, sin, eps, TOKENS, PAIRS)
        tl.store(q_ptr + target, q.to(q_ptr.dtype.element_ty), mask=there[:, None])
        k = _turned(tl.load(qkv_ptr + source + part), k_gain_ptr, cos, sin, eps, TOKENS, PAIRS)
        tl.store(k_ptr + target, k.to(k_ptr.dtype.element_ty), mask=there[:, None])
        v = tl.load(qkv_ptr + source + 2 * part)
        tl.store(v_ptr + target, v, mask=there[:, None])


def _launch(
    qkv: torch.Tensor,
    q_gain: torch.Tensor,
    k_gain: torch.Tensor,
    rope: Rope,
    eps: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    frames, height, width, heads, head_dim = q.shape
    tokens, together = frames * height * width, 16
    tables = [table for pair in zip(rope.cos, rope.sin, strict=True) for table in pair]
    _head_norm_rope[(-(-tokens // together),)](
        qkv,
        q_gain,
        k_gain,
        *tables,
        q,
        k,
        v,
        tokens,
        height,
        width,
        heads,
        eps,
        TOKENS=together,
        PAIRS=head_dim // 2,
        T_PAIRS=rope.cos[0].shape[1],
        SIDE_PAIRS=rope.cos[1].shape[1],
        num_warps=4,
    )


def _check(device: torch.device, dtype: torch.dtype) -> list[Compared]:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 3, 5, 3 * 2 * 16, generator=generator).to(dtype)
    q_gain, k_gain = (torch.randn(16, generator=generator) for _ in range(2))
    angles = [torch.randn(n, pairs, generator=generator) for n, pairs in ((2, 2), (3, 3), (5, 3))]
    rope = Rope(tuple(a.cos() for a in angles), tuple(a.sin() for a in angles))

    def run(run, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        made = [torch.empty(2, 3, 5, 2, 16, device=device, dtype=dtype) for _ in range(3)]
        there = Rope(*(tuple(table.to(device) for table in tables) for tables in (rope.cos, rope.sin)))
        run(qkv.to(device, dtype), q_gain.to(device), k_gain.to(device), there, 1e-6, *made)
        return made

    cpu = torch.device("cpu")
    mine, plain = run(_launch, device, dtype), run(head_norm_rope_reference, cpu, dtype)
    return list(zip(mine, plain, run(head_norm_rope_reference, cpu, torch.float64), strict=True))


_OP = Op("head_norm_rope", _check)


def head_norm_rope(
    qkv: torch.Tensor,
    q_gain: torch.Tensor,
    k_gain: torch.Tensor,
    rope: Rope,
    eps: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """See `head_norm_rope_reference`. All contiguous."""
    head_dim = q.shape[-1]
    runs = head_dim >= 16 and head_dim & (head_dim - 1) == 0 and _OP.runs(qkv)
    (_launch if runs else head_norm_rope_reference)(qkv, q_gain, k_gain, rope, eps, q, k, v)
