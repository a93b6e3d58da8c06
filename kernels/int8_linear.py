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
def _product_kernel(
    x_ptr,  # (M, K) int8
    weight_ptr,  # (N, K) int8
    x_scale_ptr,  # (M,)
    scale_ptr,  # (N,)
    bias_ptr,  # (N,)
    out_ptr,  # (M, N)
    rows,
    outputs,
    inputs,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,  # inputs are a multiple of DEPTH
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """One program per tile of ROWS x OUTPUTS. Tiles of TOGETHER rows of tiles follow each other, so that weights stay in the L2 cache."""
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(outputs, OUTPUTS)
    tile = tl.program_id(0)
    first = tile // (TOGETHER * across) * TOGETHER
    high = tl.minimum(down - first, TOGETHER)
    row = (first + tile % (TOGETHER * across) % high) * ROWS + tl.arange(0, ROWS)
    output = tile % (TOGETHER * across) // high * OUTPUTS + tl.arange(0, OUTPUTS)
    inner = tl.arange(0, DEPTH)
    x_at = x_ptr + (row % rows)[:, None].to(tl.int64) * inputs + inner[None, :]  # beyond the end: rows that are there, never stored
    weight_at = weight_ptr + (output % outputs)[None, :].to(tl.int64) * inputs + inner[:, None]
    sums = tl.zeros((ROWS, OUTPUTS), tl.int32)
    for start in range(0, inputs, DEPTH):
        if WHOLE:
            x, weight = tl.load(x_at), tl.load(weight_at)
        else:
            there = inner < inputs - start
            x = tl.load(x_at, mask=there[None, :], other=0)
            weight = tl.load(weight_at, mask=there[:, None], other=0)
        sums = tl.dot(x, weight, sums, out_dtype=tl.int32)
        x_at += DEPTH
        weight_at += DEPTH
    y = sums.to(tl.float32) * tl.load(x_scale_ptr + row, mask=row < rows, other=0.0)[:, None]
    y = y * tl.load(scale_ptr + output, mask=output < outputs, other=0.0)[None, :]
    if BIAS:
        y = y + tl.load(bias_ptr + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + row[:, None].to(tl.int64) * outputs + output[None, :]
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (output < outputs)[None, :])


def _quantise_launch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, (rows, width) = x.contiguous(), x.shape
    out, scale = torch.empty_like(x, dtype=torch.int8), x.new_empty((rows, 1), dtype=torch.float32)
    _quantise_kernel[(rows,)](x, out, scale, width, WIDTH=power_of_two(width), num_warps=row_warps(width))
    return out, scale


def _product_launch(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Sums and `rescale_reference` in one: int32 sums never leave the multiprocessor. All contiguous."""
    (rows, inputs), outputs = x.shape, len(weight)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    high, wide_, deep, warps = _tile(rows, x.device)
    grid = (-(-rows // high) * -(-outputs // wide_),)
    tile = {"ROWS": high, "OUTPUTS": wide_, "DEPTH": deep, "TOGETHER": 8, "num_warps": warps, "num_stages": 3}
    whole, filled = inputs % deep == 0, scale if bias is None else bias
    _product_kernel[grid](x, weight, x_scale, scale, filled, out, rows, outputs, inputs, BIAS=bias is not None, WHOLE=whole, **tile)
    return out


def _tile(rows: int, device: torch.device) -> tuple[int, int, int, int]:
    """Rows, outputs and depth of a tile, and its warps: as much as shared memory holds three times."""
    if rows <= 64:
        return 64, 64, 128, 4
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    shared = getattr(properties, "shared_memory_per_block_optin", 0)  # AMD's cards do not tell, and have 64 KB
    return (128, 256, 128, 8) if shared >= 160 << 10 else (128, 128, 64, 8)


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
    if _OP.runs(x):
        values, x_scale = _quantise_launch(flat)
        return _product_launch(values, weight.contiguous(), x_scale, scale, bias, dtype).unflatten(0, x.shape[:-1])
    values, x_scale = quantise_rows_reference(flat)
    at_once = max(256, _ROWS_AT_ONCE // (4 * len(weight)))
    parts = [
        rescale_reference(multiply(values[i : i + at_once], weight), x_scale[i : i + at_once], scale, bias, dtype)
        for i in range(0, len(values), at_once)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unflatten(0, x.shape[:-1])


def _check(device: torch.device, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Rows whose scale is a power of two, so that no value lies between two whole numbers by rounding alone; as few as make
    the small tile, and more than one of the large."""
    generator = torch.Generator().manual_seed(0)
    results = []
    for rows, inputs, outputs in ((33, 96, 40), (130, 160, 264), (130, 256, 264)):
        x = torch.randint(-127, 128, (rows, inputs), generator=generator).float()
        x[:, 5] = 127.0
        x = (x / 64).to(dtype)
        weight = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
        scale, bias = torch.rand(outputs, 1, generator=generator), torch.randn(outputs, generator=generator).to(dtype)
        values, x_scale = _quantise_launch(x.to(device))
        wanted, wanted_scale = quantise_rows_reference(x)
        results.append((values * x_scale, wanted * wanted_scale, x.double()))
        sums = multiply(wanted, weight)
        for one in (bias, None):
            moved = None if one is None else one.to(device)
            got = _product_launch(values, weight.to(device), x_scale, scale.to(device), moved, dtype)
            twin = rescale_reference(sums, wanted_scale, scale, one, dtype)
            results.append((got, twin, rescale_reference(sums, wanted_scale, scale, one, torch.float64)))
    return results


_OP = Op("int8_linear", _check)
