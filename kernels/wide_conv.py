"""Convolution of float32 activations with weights that are bf16 numbers, on tensor cores, at float32 accuracy.

A float32 number is the sum of three bf16 numbers (24 bits in three times 8), and a product of two bf16 numbers is exact in
float32. So three bf16 products with float32 accumulation are a float32 convolution, provided the weights are bf16
numbers: which published weights are. One TF32 product would keep 11 of the activations' 24 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from .dispatch import Op, jit, tl


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


@partial(jit, general=("height", "input_groups", "output_groups", "past", "dilation", "taps", "columns", "add"))
def _wide_conv_kernel(
    x, w, bias, residual, y, height, width, input_groups, output_groups, past, dilation, taps, columns, add,
    IN: tl.constexpr, OUT: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_M grid points by BLOCK_N output channels; x and y are (B, T, W, channels), w (kt kw, C, O).

    Channels come as groups of IN and OUT, which tells the compiler how far rows are aligned. SPLIT is off in Triton's
    interpreter alone, which cannot multiply bf16.
    """
    inputs, outputs = input_groups * IN, output_groups * OUT
    points = height * width
    batch = tl.program_id(2).to(tl.int64)
    x += batch * points * inputs
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row, column = m // width, m % width
    blocks = tl.cdiv(inputs, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(taps * blocks):
        tap = step // blocks
        c = (step % blocks) * BLOCK_K + k
        from_row = row + (tap // columns) * dilation - past
        from_column = column + tap % columns - columns // 2
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
            part = tl.dot(low, b)  # small to large, and added outside: tensor cores truncate where they add up
            part = tl.dot(middle, b, part)
            acc += tl.dot(high, b, part)
        else:
            acc = tl.dot(a, b.to(tl.float32), acc, input_precision="ieee")
    acc += tl.load(bias + n, mask=n < outputs, other=0.0)[None, :]
    where = (batch * points + m)[:, None] * outputs + n[None, :]
    mask = (m < points)[:, None] & (n < outputs)[None, :]
    if add != 0:
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
    tile = _tile(outputs)
    groups = tuple(math.gcd(channels, 16) for channels in (inputs, outputs))
    grid = (-(-height * width // tile["BLOCK_M"]), -(-outputs // tile["BLOCK_N"]), batch)
    _wide_conv_kernel[grid](
        x, packed, bias, residual, y, height, width, inputs // groups[0], outputs // groups[1], past, dilation,
        taps, columns, int(residual is not x), IN=groups[0], OUT=groups[1], SPLIT=x.is_cuda, **tile,
    )  # fmt: skip
    return y


def _tile(outputs: int) -> dict[str, int]:
    """Tile sizes by the channels made: the fastest of those tried at the vocoder's shapes on a Hopper card."""
    if outputs % 128 == 0:
        tile = (64, 128, 64, 3)
    elif outputs > 32:
        tile = (64, 64, 32, 4)
    else:
        tile = (64, 32, 32, 4) if outputs > 16 else (128, 16, 16, 4)
    return {"BLOCK_M": tile[0], "BLOCK_N": tile[1], "BLOCK_K": tile[2], "num_stages": tile[3], "num_warps": 4}


def pack(weight: torch.Tensor) -> torch.Tensor | None:
    """Weights (O, C, kt, kw) as the kernel reads them: (kt kw, C, O) bf16. None where they are not bf16 numbers."""
    rounded = weight.bfloat16()
    if not torch.equal(rounded.to(weight.dtype), weight):
        return None
    return rounded.flatten(2).permute(2, 1, 0).contiguous()


@dataclass(frozen=True)
class PackedTranspose:
    """A transposed convolution over time as a plain one that makes all samples of a stride at once, as channels."""

    weight: torch.Tensor  # (taps, C, stride * O) bf16
    bias: torch.Tensor  # (stride * O,)
    past: int
    stride: int


def pack_transpose(weight: torch.Tensor, bias: torch.Tensor, stride: int, padding: int) -> PackedTranspose | None:
    """Weights (C, O, k) and bias (O,) of a transposed convolution; None where they are not bf16 numbers.

    Sample stride * q + p is the sum over d of x[q + d] weight[p + padding - stride * d]. Every p has its own d; the taps
    cover them all, with zeros between.
    """
    inputs, outputs, kernel = weight.shape
    first, last = -((kernel - 1 - padding) // stride), (stride - 1 + padding) // stride
    plain = weight.new_zeros(stride, outputs, inputs, last - first + 1)
    for p in range(stride):
        for d in range(first, last + 1):
            tap = p + padding - stride * d
            if 0 <= tap < kernel:
                plain[p, :, :, d - first] = weight[:, :, tap].T
    packed = pack(plain.flatten(0, 1)[..., None])
    return None if packed is None else PackedTranspose(packed, bias.repeat(stride), -first, stride)


def wide_conv_transpose_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, stride: int, padding: int
) -> torch.Tensor:
    """x (B, C, L) -> (B, O, stride * L): kernel and padding are such that the length is exactly that."""
    return F.conv_transpose1d(x, weight, bias, stride, padding)


def launch_wide_conv_transpose(x: torch.Tensor, packed: PackedTranspose) -> torch.Tensor:
    """The kernel itself; channels of the result are adjacent in memory, so that its samples need no reordering."""
    y = launch_wide_conv(x[..., None], packed.weight, 1, packed.bias, packed.past, 1, None)[..., 0].transpose(
        1, 2
    )  # (B, L, stride * O)
    return y.reshape(y.shape[0], y.shape[1] * packed.stride, -1).transpose(1, 2)


def wide_conv_transpose(
    x: torch.Tensor, weight: torch.Tensor, packed: PackedTranspose | None, bias: torch.Tensor, stride: int, padding: int
) -> torch.Tensor:
    """See `wide_conv_transpose_reference`; `packed` is `pack_transpose(...)`, None: the plain version runs."""
    if packed is not None and x.is_cuda and x.dtype == torch.float32 and _OP.runs(x):
        return launch_wide_conv_transpose(x, packed)
    return wide_conv_transpose_reference(x, weight, bias, stride, padding)


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
