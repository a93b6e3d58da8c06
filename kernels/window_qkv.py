"""What a video token goes through before windowed attention: norm, one product for q, k and v, head norms, 3-D rope.

All of it is wide arithmetic around one matrix product; q, k and v are rounded once, when they are written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .dispatch import wide

_TOKENS = 1 << 16  # tokens the twin works on at once


@dataclass(frozen=True)
class Rope:
    """Angles of one grid: cos and sin per axis, (T, a), (H, b), (W, b) with a + 2 b pairs of neighbouring channels."""

    cos: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    sin: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def frames(self, first: int, count: int) -> Rope:
        """The angles of `count` frames from `first` on."""
        return Rope(*((table[0][first : first + count], *table[1:]) for table in (self.cos, self.sin)))


def window_qkv_reference(
    x: torch.Tensor,
    gain: torch.Tensor,
    shift: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    q_gain: torch.Tensor,
    k_gain: torch.Tensor,
    rope: Rope,
    eps: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """x (F, H, W, C) -> q, k, v (F, H, W, heads, d), written in place; they may be parts of larger buffers.

    RMS(x) * gain + shift, times weight (3 C, C) rows q, k, v; q and k per head RMS(.) * q_gain or k_gain, then rope over
    neighbouring channel pairs. A scale of q is part of q_gain. gain and shift (C,) and the gains (d,) may be wider than x.
    """
    frames, height, width, _ = x.shape
    heads, head = q.shape[-2:]
    step = max(1, _TOKENS // (height * width))
    for first in range(0, frames, step):
        part = x[first : first + step]
        made = F.linear(rms_norm(part, gain, shift, eps), weight, bias).unflatten(-1, (3, heads, head))
        here = rope.frames(first, part.shape[0])
        q[first : first + step] = rotate(rms_norm(made[..., 0, :, :], q_gain, None, eps, keep_wide=True), here)
        k[first : first + step] = rotate(rms_norm(made[..., 1, :, :], k_gain, None, eps, keep_wide=True), here)
        v[first : first + step] = made[..., 2, :, :]


def window_qkv(
    x: torch.Tensor,
    gain: torch.Tensor,
    shift: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    q_gain: torch.Tensor,
    k_gain: torch.Tensor,
    rope: Rope,
    eps: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """See `window_qkv_reference`."""
    window_qkv_reference(x, gain, shift, weight, bias, q_gain, k_gain, rope, eps, q, k, v)


def rms_norm(x: torch.Tensor, gain: torch.Tensor, shift: torch.Tensor | None, eps: float, keep_wide: bool = False) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * gain + shift over the last dimension, wide inside; rounded to x's dtype unless `keep_wide`."""
    dtype = wide(x.dtype)
    y = x.to(dtype)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * gain.to(dtype)
    if shift is not None:
        y = y + shift.to(dtype)
    return y if keep_wide else y.to(x.dtype)


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
