"""The int8 product: activations turned by a Hadamard matrix per group of channels (ConvRot) and quantised per row, weights
stored turned and quantised, sums in int32.

Turning spreads outliers over a group, so that eight bits are enough; as the matrix is its own inverse and stands on both
sides, it falls out of the product.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .dispatch import Op, jit, power_of_two, row_warps, tl, wide

LARGEST = 127.0
LEAST = 1e-30  # of a row's scale: a row of zeros stays zeros
_ROWS_AT_ONCE = 1 << 28  # int32 sums held at a time, in bytes


@lru_cache(maxsize=16)
def hadamard(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The regular Hadamard matrix (size, size) over sqrt(size): a Kronecker power of the 4 x 4 one with -1 on its
    anti-diagonal. Symmetric, orthogonal, every row of equal sum; Sylvester's matrix is another one. `size`: a power of 4.
    """
    four = 1.0 - 2.0 * torch.eye(4, dtype=torch.float64).flip(0)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(matrix, four)
    if len(matrix) != size:
        raise ValueError(f"a regular Hadamard matrix of size {size} is not a power of 4")
    return (matrix / size**0.5).to(device, dtype)  # powers of two: exact in every dtype


def rotate(x: torch.Tensor, group: int) -> torch.Tensor:
    """x (..., K), K a multiple of `group`: every run of `group` channels times the matrix, in x's dtype. Its own inverse."""
    return (x.unflatten(-1, (-1, group)) @ hadamard(group, x.dtype, x.device)).flatten(-2)


def quantise_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K): int8 values and float32 scales (M, 1), x = values * scale; the largest magnitude of a row becomes 127."""
    x = x.to(wide(x.dtype))
    scale = (x.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=LEAST)
    return (x / scale).round().clamp(-LARGEST - 1, LARGEST).to(torch.int8), scale


def rescale_reference(
    sums: torch.Tensor, x_scale: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """sums (M, N) int32, x_scale (M, 1), scale (N, 1): sums * scales + bias, rounded once."""
    full = wide(dtype)
    y = sums.to(full) * x_scale.to(full) * scale.to(full).t()
    return (y if bias is None else y + bias.to(full)).to(dtype)


@jit
def _quantise_kernel(x_ptr, out_ptr, scale_ptr, width, WIDTH: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = column < width
    x = tl.load(x_ptr + row * width + column, mask=there, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0) / 127.0, 1e-30)
    tl.store(scale_ptr + row, scale)
    # Adding and taking 1.5 * 2^23 leaves the nearest whole number, halves to even, as round() does.
    y = (x / scale + 12582912.0) - 12582912.0
    tl.store(out_ptr + row * width + column, y.to(tl.int8), mask=there)


@jit
def _rescale_kernel(sums_ptr, x_scale_ptr, scale_ptr, bias_ptr, out_ptr, width, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    y = tl.load(sums_ptr + row * width + column, mask=there, other=0).to(tl.float32)
    y = y * tl.load(x_scale_ptr + row) * tl.load(scale_ptr + column, mask=there, other=0.0)
    if BIAS:
        y = y + tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, y.to(out_ptr.dtype.element_ty), mask=there)


def _quantise_launch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, (rows, width) = x.contiguous(), x.shape
    out, scale = torch.empty_like(x, dtype=torch.int8), x.new_empty((rows, 1), dtype=torch.float32)
    _quantise_kernel[(rows,)](x, out, scale, width, WIDTH=power_of_two(width), num_warps=row_warps(width))
    return out, scale


def _rescale_launch(
    sums: torch.Tensor, x_scale: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    rows, width = sums.shape
    out = torch.empty_like(sums, dtype=dtype)
    block = min(1024, power_of_two(width))
    grid = (rows, -(-width // block))
    _rescale_kernel[grid](
        sums, x_scale, scale, scale if bias is None else bias, out, width, BIAS=bias is not None, BLOCK=block
    )
    return out


def supported(device: torch.device) -> bool:
    """Whether int8 products run there: on the CPU and on CUDA cards since Ampere."""
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0))


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (M, K) int8, weight (N, K) int8: (M, N) int32 sums. CUDA's product wants more than 16 rows and widths of 8."""
    rows, outputs = len(x), len(weight)
    if x.device.type == "cuda":
        down, right, inner = max(17 - rows, 0), -outputs % 8, -x.shape[1] % 8
        x = torch.nn.functional.pad(x, (0, inner, 0, down)) if down or inner else x
        weight = torch.nn.functional.pad(weight, (0, inner, 0, right)) if right or inner else weight
    return torch._int_mm(x, weight.t())[:rows, :outputs]


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, group: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """x (..., K) floating, weight (N, K) int8 with scale (N, 1) float32, turned in groups of `group` (None: not turned),
    bias (N,) or None: (..., N) in `dtype`.
    """
    if group is not None:
        x = rotate(x, group)
    flat = x.flatten(0, -2)
    quantise, rescale = (_quantise_launch, _rescale_launch) if _OP.runs(x) else (quantise_rows_reference, rescale_reference)
    values, x_scale = quantise(flat)
    at_once = max(256, _ROWS_AT_ONCE // (4 * len(weight)))
    parts = [
        rescale(multiply(values[i : i + at_once], weight).contiguous(), x_scale[i : i + at_once], scale, bias, dtype)
        for i in range(0, len(values), at_once)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unflatten(0, x.shape[:-1])


def _check(device: torch.device, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Rows whose scale is a power of two, so that no value lies between two whole numbers by rounding alone."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-127, 128, (33, 96), generator=generator).float()
    x[:, 5] = 127.0
    x = (x / 64).to(dtype)
    weight = torch.randint(-127, 128, (40, 96), generator=generator, dtype=torch.int8)
    scale, bias = torch.rand(40, 1, generator=generator), torch.randn(40, generator=generator).to(dtype)
    values, x_scale = _quantise_launch(x.to(device))
    results = [(values * x_scale, (lambda q, s: q * s)(*quantise_rows_reference(x)), x.double())]
    wanted, wanted_scale = quantise_rows_reference(x)
    sums = multiply(wanted, weight)
    for one in (bias, None):
        moved = None if one is None else one.to(device)
        got = _rescale_launch(multiply(values, weight.to(device)).contiguous(), x_scale, scale.to(device), moved, dtype)
        twin = rescale_reference(sums, wanted_scale, scale, one, dtype)
        results.append((got, twin, rescale_reference(sums, wanted_scale, scale, one, torch.float64)))
    return results


_OP = Op("int8_linear", _check)
