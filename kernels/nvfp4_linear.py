"""The nvfp4 product: four-bit floats on both sides in blocks of 16 along the rows, an e4m3 scale per block and one float32
scale above all of them; sums in float32.

Tensor cores since Blackwell multiply it (torch._scaled_mm). NOT RUN ON SUCH A CARD YET: what surrounds the product (packing,
the layout of block scales, scales above them, choice and fallback) is tested on the CPU against independent formulas, with the
product itself written out there. The first use on a device compares it with that, and where it is not right it stays off, by
name, and weights are decoded for each product.

Layouts, of weights as in the published files and of activations alike, so that no weight is ever rearranged:
* two values a byte, the first of them in the HIGH four bits. Hardware takes the low ones first, which swaps neighbours of one
  block on both sides, and a sum of products does not see that;
* block scales in tiles of 128 rows by 4 columns, padded with zeros to whole ones: scale (r, c) stands at
  ((r // 128) * (columns / 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4.
"""

from __future__ import annotations

import torch

from .dispatch import Op, wide

BLOCK = 16
TILE_ROWS = 128
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low three bits of a code; the fourth is the sign
LARGEST = VALUES[-1]
E4M3_LARGEST = 448.0
LEAST = 1e-30  # of a tensor's scale: zeros stay zeros
# Between two neighbours lies their mean; one that stands exactly there goes to the even code: up at every second of them.
_MEANS = tuple((low + high) / 2 for low, high in zip(VALUES, VALUES[1:], strict=False))
_SUMS_AT_ONCE = 1 << 28  # bytes of float32 results, or of widened activations, held at a time


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Padded shape of the block scales of a matrix (rows, columns)."""
    return -(-rows // 128) * 128, -(-columns // BLOCK // 4) * 4


def plain_scales(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Block scales in tiles, any shape of the padded count, e4m3: (rows, columns / 16) in order, e4m3."""
    padded_rows, padded_columns = scale_shape(rows, columns)
    # Bytes, not numbers: what moves is a view of the scales.
    tiles = scales.contiguous().view(torch.uint8).view(padded_rows // 128, padded_columns // 4, 32, 4, 4)  # (r/128, c/4, r%32, r/32, c%4)
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_columns)
    return plain[:rows, : columns // BLOCK].contiguous().view(torch.float8_e4m3fn)


def tiled_scales(scales: torch.Tensor) -> torch.Tensor:
    """Block scales (rows, columns / 16) e4m3 in order: (padded count,) e4m3 in tiles, zeros between."""
    rows, blocks = scales.shape
    padded_rows, padded_columns = scale_shape(rows, blocks * BLOCK)
    plain = torch.nn.functional.pad(scales.view(torch.uint8), (0, padded_columns - blocks, 0, padded_rows - rows))
    tiles = plain.view(padded_rows // 128, 4, 32, padded_columns // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e4m3fn)


def unpacked(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """packed (rows, columns / 2) uint8: (rows, columns) without scales."""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=dtype, device=packed.device)
    return table[torch.stack((packed >> 4, packed & 15), dim=-1).int()].flatten(-2)


def dense(packed: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """packed (N, K / 2) uint8, scales e4m3 in tiles, scale float32 () or (N, 1): (N, K) in `dtype`, rounded once."""
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    full = torch.promote_types(dtype, torch.float32)
    scale = scale.to(full).reshape(-1, 1) if scale.numel() > 1 else scale.to(full).reshape(())
    factors = plain_scales(scales, rows, columns).to(full) * scale
    return (unpacked(packed, full).view(rows, -1, BLOCK) * factors.unsqueeze(-1)).view(rows, columns).to(dtype)


def tensor_scale(x: torch.Tensor) -> torch.Tensor:
    """() float32: the scale that lets both levels below it be used to their ends."""
    return (x.abs().amax().float() / (LARGEST * E4M3_LARGEST)).clamp(min=LEAST)


def quantise_blocks(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K) and its tensor scale (): packed (M, K / 2) uint8 and block scales (M, K / 16) e4m3 in order.

    The largest magnitude of a block becomes 6 over its rounded scale; what is beyond that, or beyond e4m3, is held at the end.
    """
    blocks = x.to(torch.float32).unflatten(-1, (-1, BLOCK)) / scale
    scales = (blocks.abs().amax(-1) / LARGEST).clamp(max=E4M3_LARGEST).to(torch.float8_e4m3fn)
    factors = scales.float().unsqueeze(-1)
    values = torch.where(factors > 0, blocks / factors, 0.0).flatten(-2)
    size = values.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for number, mean in enumerate(_MEANS):
        code += (size >= mean if number % 2 else size > mean).to(torch.uint8)
    code |= (values < 0).to(torch.uint8) << 3
    return code[:, 0::2] << 4 | code[:, 1::2], scales


def nvfp4_linear_reference(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor, x_scale: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """x (..., K) is quantised too, by `x_scale` () or, without one, by its own largest magnitude: (..., N) in `dtype`.

    Weight: packed (N, K / 2) uint8, scales e4m3 in tiles, scale (N, 1) float32. bias (N,) or None.
    """
    full, flat = wide(dtype), x.flatten(0, -2)
    x_scale = tensor_scale(flat) if x_scale is None else x_scale
    values, blocks = quantise_blocks(flat, x_scale)
    seen = dense(values, tiled_scales(blocks), x_scale, full)
    y = seen @ dense(packed, scales, scale, full).t()
    return (y if bias is None else y + bias.to(full)).to(dtype).unflatten(0, x.shape[:-1])


def supported(device: torch.device) -> bool:
    """Whether the device multiplies nvfp4: NVIDIA cards since Blackwell, with a torch that knows the type."""
    if device.type != "cuda" or torch.version.hip is not None or not hasattr(torch, "float4_e2m1fn_x2"):
        return False
    return torch.cuda.get_device_capability(device) >= (10, 0)


def fits(packed: torch.Tensor) -> bool:
    """Whether a card's product takes the shape of a weight (N, K / 2): K in 32s, N in 16s, as all published ones are."""
    return packed.shape[0] % 16 == 0 and packed.shape[1] % 16 == 0


def runs(packed: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether activations like `like` are multiplied with `packed` in four bits; else the weight is to be decoded."""
    return supported(like.device) and fits(packed) and _OP.runs(like)


def nvfp4_linear(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor, x_scale: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """See `nvfp4_linear_reference`; to be called where it `runs`."""
    flat = x.flatten(0, -2)
    x_scale = tensor_scale(flat) if x_scale is None else x_scale
    at_once = max(128, _SUMS_AT_ONCE // (4 * max(len(packed), flat.shape[1])) // 128 * 128)
    parts = [_rows(rows, packed, scales, scale, x_scale, bias, dtype) for rows in flat.split(at_once)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unflatten(0, x.shape[:-1])


def _rows(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor, x_scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    values, blocks = quantise_blocks(x, x_scale)
    y = _multiply(values, packed, tiled_scales(blocks), scales.flatten(), dtype).float() * (scale.t() * x_scale)
    return (y if bias is None else y + bias.float()).to(dtype)


def _multiply(x: torch.Tensor, weight: torch.Tensor, x_scales: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x (M, K / 2) and weight (N, K / 2) uint8, their block scales in tiles: (M, N) in `dtype`."""
    four = torch.float4_e2m1fn_x2
    return torch._scaled_mm(x.view(four), weight.view(four).t(), scale_a=x_scales, scale_b=scales, out_dtype=dtype)


def _check(device: torch.device, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Activations that four bits hold exactly: no device can round them otherwise. Scales differ from block to block, and
    rows and columns go beyond one tile, so that whoever mixes them up is off by far.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
        codes[:, ::BLOCK] = 7  # the largest: the block's scale is what it was made with
        scales = 2.0 ** torch.randint(-3, 4, (rows, columns // BLOCK), generator=generator)
        return codes[:, 0::2] << 4 | codes[:, 1::2], scales.to(torch.float8_e4m3fn)

    one = torch.ones(())
    values, blocks = draw(144, 160)
    x = dense(values, tiled_scales(blocks), one, torch.float32).to(dtype)
    packed, scales = draw(176, 160)
    weight = packed, tiled_scales(scales), 2.0 ** -torch.randint(0, 4, (176, 1), generator=generator).float(), one
    results = []
    for bias in (None, torch.randn(176, generator=generator).to(dtype)):
        got = nvfp4_linear(x.to(device), *(part.to(device) for part in weight), None if bias is None else bias.to(device), dtype)
        truth = nvfp4_linear_reference(x, *weight, None if bias is None else bias.double(), torch.float64)
        results.append((got, nvfp4_linear_reference(x, *weight, bias, dtype), truth))
    return results


_OP = Op("nvfp4_linear", _check)
