"""What tensor cores do with nvfp4, written out from their documentation: no code of ours in it."""

from __future__ import annotations

import torch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def offset(row: int, block: int, blocks: int) -> int:
    """Where the scale of a block stands: tiles of 128 rows by 4 blocks, in a tile row % 32 first, then row // 32, then the block."""
    tiles_across = -(-blocks // 4)
    tile = row // 128 * tiles_across + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


def multiply(x: torch.Tensor, weight: torch.Tensor, x_scales: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x (M, K / 2), weight (N, K / 2) bytes, scales flat: (M, N) in `dtype`, summed in float64. Low nibbles come first."""
    return (_matrix(x, x_scales) @ _matrix(weight, scales).t()).to(dtype)


def _matrix(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, half = packed.shape
    codes = torch.empty(rows, 2 * half, dtype=torch.long)
    codes[:, 0::2], codes[:, 1::2] = packed.long() % 16, packed.long() // 16
    values = torch.tensor(MAGNITUDES, dtype=torch.float64)[codes % 8] * (1 - 2 * (codes // 8))
    blocks = 2 * half // 16
    places = torch.tensor([[offset(row, block, blocks) for block in range(blocks)] for row in range(rows)])
    assert scales.numel() == -(-rows // 128) * 128 * -(-blocks // 4) * 4
    return values * scales.float().double()[places].repeat_interleave(16, 1)
