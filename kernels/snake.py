"""The vocoder's anti-aliased activation: up 2x, SnakeBeta, down 2x, in polyphase form.

Up- and downsampling each use a 12-tap low-pass filter, so at the doubled rate even and odd samples are two 6-tap
filters of their own. Working on the pair (even, odd) needs no zero-stuffed tensor and no strided convolution.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .dispatch import Op, jit, power_of_two, tl

TAPS = 12
REACH = 6  # samples on either side that one output sample depends on: 3 going up, 3 coming down


def snake_reference(
    x: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """x (B, C, L) -> (B, C, L); alpha, beta (C,) are logarithms; up, down (12,) the low-pass filters, of sum 1.

    The definition (BigVGAN v2's Activation1d): edges of x repeated 5 times, zero-stuffed, filtered with 2 * up, cropped
    to 2 L; u + sin(exp(alpha) u)^2 / (exp(beta) + 1e-9); edges of that repeated 5 and 6 times, filtered with down, every
    second sample kept. In phases, with e[q] = u[2 q] and o[q] = u[2 q + 1] before the activation:

        e[q] = 2 sum_k x[q - 3 + k] up[11 - 2 k]        o[q] = 2 sum_k x[q - 2 + k] up[10 - 2 k]        k = 0..5
        y[q] = sum_k e[q - 2 + k] down[2 k + 1] + o[q - 3 + k] down[2 k]

    Repeated edges reach both phases: left of the clip stand copies of e[0], right of it copies of o[L - 1].
    """
    length = x.shape[2]
    rise, fall = 2 * up.reshape(TAPS).flip(0), down.reshape(TAPS)
    x = F.pad(x, (3, 3), mode="replicate")
    even = _active(_filtered(x, rise[0::2], 0, length), alpha, beta)
    odd = _active(_filtered(x, rise[1::2], 1, length), alpha, beta)
    before, after = even[..., :1].expand(-1, -1, 3), odd[..., -1:].expand(-1, -1, 3)
    y = _filtered(torch.cat([before, even, after], dim=2), fall[1::2], 1, length)
    return y + _filtered(torch.cat([before, odd, after], dim=2), fall[0::2], 0, length)


def _filtered(x: torch.Tensor, taps: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """sum_k x[start + q + k] taps[k] for q in [0, length). Shifted sums: a convolution is several times slower on a CPU."""
    y = x[..., start : start + length] * taps[0]
    for k in range(1, len(taps)):
        y.addcmul_(x[..., start + k : start + k + length], taps[k])
    return y


def _active(u: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    return u.addcmul(torch.sin(u * alpha.exp()[:, None]).square_(), 1 / (beta.exp()[:, None] + 1e-9))


@jit
def _snake_kernel(
    x, y, alpha, beta, up, down, length, channels, x_batch, x_channel, x_row, y_batch, y_channel, y_row,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS samples of BLOCK channels: walks along time and keeps the last six of each phase in registers."""
    batch = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    first = tl.program_id(0) * ROWS
    last = length - 1
    source = x + batch * x_batch + c.to(tl.int64) * x_channel
    target = y + batch * y_batch + c.to(tl.int64) * y_channel
    frequency = tl.exp(tl.load(alpha + c, mask=inside, other=0.0))
    weight = 1.0 / (tl.exp(tl.load(beta + c, mask=inside, other=0.0)) + 1e-9)
    zero = tl.zeros([BLOCK], tl.float32)
    e0, e1, e2, e3, e4, e5 = zero, zero, zero, zero, zero, zero
    o0, o1, o2, o3, o4, o5, o6 = zero, zero, zero, zero, zero, zero, zero
    for step in range(ROWS + 6):
        q = first + step - 3  # of the pair that enters; outputs follow three samples later
        near = tl.minimum(tl.maximum(q, 0), last)
        even, odd = zero, zero
        for k in tl.static_range(7):
            at = tl.minimum(tl.maximum(near + k - 3, 0), last).to(tl.int64)
            value = tl.load(source + at * x_row, mask=inside, other=0.0)
            if k < 6:
                even += value * (2.0 * tl.load(up + 11 - 2 * k))
            if k > 0:
                odd += value * (2.0 * tl.load(up + 12 - 2 * k))
        s = tl.sin(even * frequency)
        even += weight * s * s
        s = tl.sin(odd * frequency)
        odd += weight * s * s
        e0, e1, e2, e3, e4, e5 = e1, e2, e3, e4, e5, tl.where(q > last, odd, even)
        o0, o1, o2, o3, o4, o5, o6 = o1, o2, o3, o4, o5, o6, tl.where(q < 0, even, odd)
        out = e0 * tl.load(down + 1) + o0 * tl.load(down)
        out += e1 * tl.load(down + 3) + o1 * tl.load(down + 2)
        out += e2 * tl.load(down + 5) + o2 * tl.load(down + 4)
        out += e3 * tl.load(down + 7) + o3 * tl.load(down + 6)
        out += e4 * tl.load(down + 9) + o4 * tl.load(down + 8)
        out += e5 * tl.load(down + 11) + o5 * tl.load(down + 10)
        row = q - 3 + 0 * c
        tl.store(target + row.to(tl.int64) * y_row, out, mask=inside & (row >= first) & (row < length))


ROWS = 32  # samples a program makes; it reads 6 more on either side


def launch_snake(
    x: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The kernel itself, float32, any strides (fastest where channels are adjacent)."""
    batch, channels, length = x.shape
    y = torch.empty_like(x)
    block = min(128, max(32, power_of_two(channels)))
    grid = (-(-length // ROWS), -(-channels // block), batch)
    _snake_kernel[grid](
        x, y, alpha, beta, up, down, length, channels, x.stride(0), x.stride(1), x.stride(2), y.stride(0), y.stride(1), y.stride(2),
        ROWS=ROWS, BLOCK=block, num_warps=block // 32,
    )  # fmt: skip
    return y


def _check(device: torch.device, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, alpha, beta = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((1, 40, 2 * ROWS + 5), (40,), (40,))
    )
    up, down = (torch.rand(TAPS, generator=generator).to(dtype) / TAPS for _ in range(2))
    arguments = (x, alpha, beta, up, down)
    got = launch_snake(*(t.to(device) for t in arguments))
    return [(got, snake_reference(*arguments), snake_reference(*(t.double() for t in arguments)))]


_OP = Op("snake", _check)


def snake(
    x: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """See `snake_reference`. Raises ValueError for shapes that do not fit each other."""
    if (
        x.ndim != 3
        or alpha.shape != x.shape[1:2]
        or beta.shape != alpha.shape
        or up.numel() != TAPS
        or down.numel() != TAPS
    ):
        raise ValueError(
            f"snake takes (B, C, L), C, C, {TAPS} and {TAPS} taps, "
            f"got {tuple(x.shape)}, {tuple(alpha.shape)}, {tuple(beta.shape)}, {up.numel()} and {down.numel()}"
        )
    if x.is_cuda and x.dtype == torch.float32 and _OP.runs(x):
        return launch_snake(x, alpha, beta, up, down)
    return snake_reference(x, alpha, beta, up, down)
