"""nvfp4: w[n, k] = e2m1 * block scale[n, k // 16] * tensor scale.

Packed (N, K / 2) uint8: element 2 j is the HIGH nibble of byte j (other tools put it low). A nibble is sign, then one of
0, 0.5, 1, 1.5, 2, 3, 4, 6. Block scales are e4m3, (N, K / 16) laid out for tensor cores: padded to 128 rows and 4 columns,
scale (r, c) stands at ((r // 128) * (columns / 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4, although
the file declares the plain shape.
"""

from __future__ import annotations

import torch

BLOCK = 16
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Padded shape of the block scales of a weight (rows, columns)."""
    return -(-rows // 128) * 128, -(-columns // BLOCK // 4) * 4


def plain_scales(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Block scales as stored, any shape of the padded count, e4m3: (rows, columns / 16) in order, e4m3."""
    padded_rows, padded_columns = scale_shape(rows, columns)
    # Bytes, not numbers: what moves is a view of the scales.
    tiles = scales.contiguous().view(torch.uint8).view(padded_rows // 128, padded_columns // 4, 32, 4, 4)  # (r/128, c/4, r%32, r/32, c%4)
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_columns)
    return plain[:rows, : columns // BLOCK].contiguous().view(torch.float8_e4m3fn)


def dequantise_nvfp4(packed: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """packed (N, K / 2) uint8, scales e4m3 as stored, scale float32 (): (N, K) in `dtype`, rounded once."""
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=wide, device=packed.device)
    values = table[torch.stack((packed >> 4, packed & 15), dim=-1).int()].view(rows, -1, BLOCK)
    factors = plain_scales(scales, rows, columns).to(wide) * scale.to(wide).reshape(())
    return (values * factors.unsqueeze(-1)).view(rows, columns).to(dtype)
