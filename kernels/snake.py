"""The vocoder's anti-aliased activation: up 2x, SnakeBeta, down 2x, in polyphase form.

Up- and downsampling each use a 12-tap low-pass filter, so at the doubled rate even and odd samples are two 6-tap
filters of their own. Working on the pair (even, odd) needs no zero-stuffed tensor and no strided convolution.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F

from .dispatch import Op, jit, tl

TAPS = 12
REACH = 6  # samples on either side that one output sample depends on: 3 going up, 3 coming down


def snake_reference(
    x: torch.Tensor, frequency: torch.Tensor, weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """x (B, C, L) -> (B, C, L); frequency, weight (C,), see `factors`; up, down (12,) the low-pass filters, of sum 1.

    The definition (BigVGAN v2's Activation1d): edges of x repeated 5 times, zero-stuffed, filtered with 2 * up, cropped
    to 2 L; u + weight * sin(frequency * u)^2; edges of that repeated 5 and 6 times, filtered with down, every second sample
    kept. In phases, with e[q] = u[2 q] and o[q] = u[2 q + 1]:

        e[q] = 2 sum_k x[q - 3 + k] up[11 - 2 k]        o[q] = 2 sum_k x[q - 2 + k] up[10 - 2 k]        k = 0..5
        y[q] = sum_k e[q - 2 + k] down[2 k + 1] + o[q - 3 + k] down[2 k]

    Repeated edges reach both phases: left of the clip stand copies of e[0], right of it copies of o[L - 1].
    """
    length = x.shape[2]
    rise, fall = 2 * up.reshape(TAPS).flip(0), down.reshape(TAPS)
    x = F.pad(x, (3, 3), mode="replicate")
    even = _active(_filtered(x, rise[0::2], 0, length), frequency, weight)
    odd = _active(_filtered(x, rise[1::2], 1, length), frequency, weight)
    before, after = even[..., :1].expand(-1, -1, 3), odd[..., -1:].expand(-1, -1, 3)
    y = _filtered(torch.cat([before, even, after], dim=2), fall[1::2], 1, length)
    return y + _filtered(torch.cat([before, odd, after], dim=2), fall[0::2], 0, length)


def _filtered(x: torch.Tensor, taps: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """sum_k x[start + q + k] taps[k] for q in [0, length). Shifted sums: a convolution is several times slower on a CPU."""
    y = x[..., start : start + length] * taps[0]
    for k in range(1, len(taps)):
        y.addcmul_(x[..., start + k : start + k + length], taps[k])
    return y


def _active(u: torch.Tensor, frequency: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return u.addcmul(torch.sin(u * frequency[:, None]).square_(), weight[:, None])


def factors(alpha: torch.Tensor, beta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(frequency, weight) of SnakeBeta's parameters, which are logarithms: exp(alpha) and 1 / (exp(beta) + 1e-9)."""
    return alpha.exp(), 1 / (beta.exp() + 1e-9)


@jit
def _sine_squared(t):
    """sin(t)^2 to float32 accuracy without a branch: t less the nearest multiple of pi (in three parts), then its series."""
    n = tl.floor(t * 0.3183098861837907 + 0.5)
    t = ((t - n * 3.140625) - n * 0.000967502593994140625) - n * 1.509957990978376e-7
    s = t * t
    p = s * 1.6059043836821613e-10 - 2.505210838544172e-08
    p = (
        ((p * s + 2.7557319223985893e-06) * s - 0.0001984126984126984) * s + 0.008333333333333333
    ) * s - 0.16666666666666666
    t += t * s * p
    return t * t


@jit
def _pair(x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, f, w):
    """The two samples at the doubled rate that x3 becomes, activated."""
    even = x0 * a11 + x1 * a9 + x2 * a7 + x3 * a5 + x4 * a3 + x5 * a1
    odd = x1 * a10 + x2 * a8 + x3 * a6 + x4 * a4 + x5 * a2 + x6 * a0
    return even + w * _sine_squared(even * f), odd + w * _sine_squared(odd * f)


@partial(jit, general=("length", "channels", "x_batch", "x_row", "y_batch", "y_row"))
def _snake_kernel(
    x, y, frequency, weight, up, down, length, channels, x_batch, x_channel, x_row, y_batch, y_channel, y_row,
    ROWS: tl.constexpr, TOGETHER: tl.constexpr, SEGMENTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Every lane makes ROWS samples of one channel, one after the other, with what the filters reach in registers."""
    batch = tl.program_id(2).to(tl.int64)
    lane = tl.arange(0, SEGMENTS * CHANNELS)
    c = tl.program_id(1) * CHANNELS + lane % CHANNELS
    first = (tl.program_id(0) * SEGMENTS + lane // CHANNELS) * ROWS
    last = length - 1
    inside = (c < channels) & (first < length)
    source = x + batch * x_batch + c.to(tl.int64) * x_channel
    target = y + batch * y_batch + c.to(tl.int64) * y_channel
    f = tl.load(frequency + c, mask=c < channels, other=0.0)
    w = tl.load(weight + c, mask=c < channels, other=0.0)
    a0, a1, a2, a3 = 2.0 * tl.load(up), 2.0 * tl.load(up + 1), 2.0 * tl.load(up + 2), 2.0 * tl.load(up + 3)
    a4, a5, a6, a7 = 2.0 * tl.load(up + 4), 2.0 * tl.load(up + 5), 2.0 * tl.load(up + 6), 2.0 * tl.load(up + 7)
    a8, a9, a10, a11 = 2.0 * tl.load(up + 8), 2.0 * tl.load(up + 9), 2.0 * tl.load(up + 10), 2.0 * tl.load(up + 11)
    d0, d1, d2, d3, d4, d5 = (
        tl.load(down),
        tl.load(down + 1),
        tl.load(down + 2),
        tl.load(down + 3),
        tl.load(down + 4),
        tl.load(down + 5),
    )
    d6, d7, d8, d9, d10, d11 = (
        tl.load(down + 6),
        tl.load(down + 7),
        tl.load(down + 8),
        tl.load(down + 9),
        tl.load(down + 10),
        tl.load(down + 11),
    )
    x1 = tl.load(source + tl.minimum(tl.maximum(first - 6, 0), last).to(tl.int64) * x_row, mask=inside, other=0.0)
    x2 = tl.load(source + tl.minimum(tl.maximum(first - 5, 0), last).to(tl.int64) * x_row, mask=inside, other=0.0)
    x3 = tl.load(source + tl.minimum(tl.maximum(first - 4, 0), last).to(tl.int64) * x_row, mask=inside, other=0.0)
    x4 = tl.load(source + tl.minimum(tl.maximum(first - 3, 0), last).to(tl.int64) * x_row, mask=inside, other=0.0)
    x5 = tl.load(source + tl.minimum(tl.maximum(first - 2, 0), last).to(tl.int64) * x_row, mask=inside, other=0.0)
    x6 = tl.load(source + tl.minimum(tl.maximum(first - 1, 0), last).to(tl.int64) * x_row, mask=inside, other=0.0)
    e0 = tl.zeros([SEGMENTS * CHANNELS], tl.float32)
    e1, e2, e3, e4, e5 = e0, e0, e0, e0, e0
    o0, o1, o2, o3, o4, o5, o6 = e0, e0, e0, e0, e0, e0, e0
    for step in tl.static_range(6):  # pairs that come before those an output ends with
        q = first + (step - 3)
        x0, x1, x2, x3, x4, x5 = x1, x2, x3, x4, x5, x6
        x6 = tl.load(source + tl.minimum(tl.maximum(q + 3, 0), last).to(tl.int64) * x_row, mask=inside, other=0.0)
        even, odd = _pair(x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, f, w)
        e0, e1, e2, e3, e4, e5 = e1, e2, e3, e4, e5, tl.where(q > last, o6, even)
        o0, o1, o2, o3, o4, o5, o6 = o1, o2, o3, o4, o5, o6, tl.where(q > last, o6, odd)
        if step == 3:  # the clip's first pair has entered: everything before it is its even half
            e0, e1, e2 = tl.where(q == 0, e5, e0), tl.where(q == 0, e5, e1), tl.where(q == 0, e5, e2)
            e3, e4 = tl.where(q == 0, e5, e3), tl.where(q == 0, e5, e4)
            o0, o1, o2 = tl.where(q == 0, e5, o0), tl.where(q == 0, e5, o1), tl.where(q == 0, e5, o2)
            o3, o4, o5 = tl.where(q == 0, e5, o3), tl.where(q == 0, e5, o4), tl.where(q == 0, e5, o5)
    for turn in range(ROWS // TOGETHER):
        for step in tl.static_range(TOGETHER):
            q = first + turn * TOGETHER + (step + 3)  # of the pair that enters; its output lies three samples before
            x0, x1, x2, x3, x4, x5 = x1, x2, x3, x4, x5, x6
            x6 = tl.load(source + tl.minimum(q + 3, last).to(tl.int64) * x_row, mask=inside, other=0.0)
            even, odd = _pair(x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, f, w)
            e0, e1, e2, e3, e4, e5 = e1, e2, e3, e4, e5, tl.where(q > last, o6, even)
            o0, o1, o2, o3, o4, o5, o6 = o1, o2, o3, o4, o5, o6, tl.where(q > last, o6, odd)
            out = e0 * d1 + e1 * d3 + e2 * d5 + e3 * d7 + e4 * d9 + e5 * d11
            out += o0 * d0 + o1 * d2 + o2 * d4 + o3 * d6 + o4 * d8 + o5 * d10
            tl.store(target + (q - 3).to(tl.int64) * y_row, out, mask=inside & (q - 3 < length))


ROWS = 16  # samples a lane makes; it reads 6 more on either side
TOGETHER = 2  # of them between two turns of the loop: all 16 take 4 % off the time and 11 s to compile, for which the first sound waits
LANES = 128


def launch_snake(
    x: torch.Tensor, frequency: torch.Tensor, weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The kernel itself, float32, any strides (fastest where channels are adjacent)."""
    batch, channels, length = x.shape
    y = torch.empty_like(x)
    side = 32 if channels % 32 == 0 else 8
    segments = LANES // side
    grid = (-(-length // (ROWS * segments)), -(-channels // side), batch)
    _snake_kernel[grid](
        x, y, frequency, weight, up, down, length, channels,
        x.stride(0), x.stride(1), x.stride(2), y.stride(0), y.stride(1), y.stride(2),
        ROWS=ROWS, TOGETHER=TOGETHER, SEGMENTS=segments, CHANNELS=side, num_warps=LANES // 32,
    )  # fmt: skip
    return y


def _check(device: torch.device, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    compared = []
    for channels in (24, 32):
        x, alpha, beta = (
            torch.randn(shape, generator=generator).to(dtype)
            for shape in ((1, channels, 300), (channels,), (channels,))
        )
        up, down = (torch.rand(TAPS, generator=generator).to(dtype) / TAPS for _ in range(2))
        arguments = (x, *factors(alpha, beta), up, down)
        adjacent = (
            x.to(device).transpose(1, 2).contiguous().transpose(1, 2)
        )  # as the vocoder calls it: nothing is compiled for the check alone
        got = launch_snake(adjacent, *(t.to(device) for t in arguments[1:]))
        compared.append((got, snake_reference(*arguments), snake_reference(*(t.double() for t in arguments))))
    return compared


_OP = Op("snake", _check)


def snake(
    x: torch.Tensor, frequency: torch.Tensor, weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """See `snake_reference`. Raises ValueError for shapes that do not fit each other."""
    if (
        x.ndim != 3
        or frequency.shape != x.shape[1:2]
        or weight.shape != frequency.shape
        or up.numel() != TAPS
        or down.numel() != TAPS
    ):
        raise ValueError(
            f"snake takes (B, C, L), C, C, {TAPS} and {TAPS} taps, "
            f"got {tuple(x.shape)}, {tuple(frequency.shape)}, {tuple(weight.shape)}, {up.numel()} and {down.numel()}"
        )
    if x.is_cuda and x.dtype == torch.float32 and _OP.runs(x):
        return launch_snake(x, frequency, weight, up, down)
    return snake_reference(x, frequency, weight, up, down)
