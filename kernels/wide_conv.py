"""Convolution of float32 activations with weights that are bf16 numbers, on tensor cores, at float32 accuracy.

A float32 number is the sum of three bf16 numbers (24 bits in three times 8), and a product of two bf16 numbers is exact in
float32. So three bf16 products with float32 accumulation are a float32 convolution, provided the weights are bf16
numbers: which published weights are. One TF32 product would keep 11 of the activations' 24 bits.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .dispatch import Op, jit, power_of_two, tl


def wide_conv_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, past: int, dilation: int, residual: torch.Tensor | None
) -> torch.Tensor:
    """x (B, C, T, W), weight (O, C, kt, kw), bias (O,) -> (B, O, T, W), plus `residual` of that shape.

    Zeros around x: `past` before the first row and what keeps T after the last, (kw - 1) / 2 on both sides of W.
    `dilation` is that of T.
    """
    rows, columns = weight.shape[2:]
    x = F.pad(x, (0, 0, past, dilation * (rows - 1) - past))
    y = F.conv2d(x, weight, bias, padding=(0, columns // 2), dilation=(dilation, 1))
    return y if residual is None else y + residual


@jit
def _wide_conv_kernel(
    x, w, bias, residual, y, height, width, inputs, outputs, past, dilation,
    TAPS: tl.constexpr, COLUMNS: tl.constexpr, ADD: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_M grid points by BLOCK_N output channels; x and y are (B, T, W, channels), w (kt kw, C, O).

    SPLIT is off in Triton's interpreter alone, which cannot multiply bf16.
    """
    points = height * width
    batch = tl.program_id(2).to(tl.int64)
    x += batch * points * inputs
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row, column = m // width, m % width
    blocks = tl.cdiv(inputs, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(TAPS * blocks):
        tap = step // blocks
        c = (step % blocks) * BLOCK_K + k
        from_row = row + (tap // COLUMNS) * dilation - past
        from_column = column + tap % COLUMNS - COLUMNS // 2
        there = (m < points) & (from_row >= 0) & (from_row < height) & (from_column >= 0) & (from_column < width)
        source = (from_row * width + from_column).to(tl.int64) * inputs
        a = tl.load(x + source[:, None] + c[None, :], mask=there[:, None] & (c < inputs)[None, :], other=0.0)
        b = tl.load(
            w + (tap * inputs + c).to(tl.int64)[:, None] * outputs + n[None, :],
            mask=(c < inputs)[:, None] & (n < outputs)[None, :],
            other=0.0,
        )
        if SPLIT:
            high = a.to(tl.bfloat16)
            a -= high.to(tl.float32)
            middle = a.to(tl.bfloat16)
            low = (a - middle.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(low, b, acc)
            acc = tl.dot(middle, b, acc)
            acc = tl.dot(high, b, acc)
        else:
            acc = tl.dot(a, b.to(tl.float32), acc, input_precision="ieee")
    acc += tl.load(bias + n, mask=n < outputs, other=0.0)[None, :]
    where = (batch * points + m)[:, None] * outputs + n[None, :]
    mask = (m < points)[:, None] & (n < outputs)[None, :]
    if ADD:
        acc += tl.load(residual + where, mask=mask, other=0.0)
    tl.store(y + where, acc, mask=mask)


def launch_wide_conv(
    x: torch.Tensor,
    packed: torch.Tensor,
    columns: int,
    bias: torch.Tensor,
    past: int,
    dilation: int,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """The kernel itself. x and residual are brought to channels-last where they are not; so is the result."""
    batch, inputs, height, width = x.shape
    taps, _, outputs = packed.shape
    x = x.contiguous(memory_format=torch.channels_last)
    residual = x if residual is None else residual.contiguous(memory_format=torch.channels_last)
    y = torch.empty((batch, outputs, height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    tile = _tile(height * width, outputs, inputs)
    grid = (-(-height * width // tile["BLOCK_M"]), -(-outputs // tile["BLOCK_N"]), batch)
    _wide_conv_kernel[grid](
        x, packed, bias, residual, y, height, width, inputs, outputs, past, dilation,
        TAPS=taps, COLUMNS=columns, ADD=residual is not x, SPLIT=x.is_cuda, **tile,
    )  # fmt: skip
    return y


def _tile(points: int, outputs: int, inputs: int) -> dict[str, int]:
    """Tile sizes and warps: wide where channels are many, tall where they are few."""
    block_n = min(128, max(16, power_of_two(outputs)))
    block_k = min(64, max(16, power_of_two(inputs)))
    block_m = 128 if block_n <= 64 or points >= 8192 else 64
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "num_warps": 8 if block_m * block_n >= 16384 else 4,
        "num_stages": 3,
    }


def pack(weight: torch.Tensor) -> torch.Tensor | None:
    """Weights (O, C, kt, kw) as the kernel reads them: (kt kw, C, O) bf16. None where they are not bf16 numbers."""
    rounded = weight.bfloat16()
    if not torch.equal(rounded.to(weight.dtype), weight):
        return None
    return rounded.flatten(2).permute(2, 1, 0).contiguous()


def _check(device: torch.device, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    compared = []
    for (height, width), (rows, columns), past, dilation in (((150, 1), (7, 1), 9, 3), ((9, 16), (3, 3), 2, 1)):
        x = torch.randn(1, 40, height, width, generator=generator).to(dtype)
        weight = torch.randn(24, 40, rows, columns, generator=generator).bfloat16().to(dtype)
        bias, residual = (
            torch.randn(24, generator=generator).to(dtype),
            torch.randn(1, 24, height, width, generator=generator).to(dtype),
        )
        packed = pack(weight.to(device))
        got = launch_wide_conv(x.to(device), packed, columns, bias.to(device), past, dilation, residual.to(device))
        twin = wide_conv_reference(x, weight, bias, past, dilation, residual)
        truth = wide_conv_reference(x.double(), weight.double(), bias.double(), past, dilation, residual.double())
        compared.append((got, twin, truth))
    return compared


_OP = Op("wide_conv", _check)


def wide_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    packed: torch.Tensor | None,
    bias: torch.Tensor,
    past: int,
    dilation: int,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """See `wide_conv_reference`; `packed` is `pack(weight)`, None: the plain version runs."""
    if packed is not None and x.is_cuda and x.dtype == torch.float32 and _OP.runs(x):
        return launch_wide_conv(x, packed, weight.shape[3], bias, past, dilation, residual)
    return wide_conv_reference(x, weight, bias, past, dilation, residual)
