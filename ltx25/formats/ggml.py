"""The blocks of GGUF files. A row of K weights is K / 32 or K / 256 blocks of bytes, each with its own scales.

Sub-blocks of the K types are 16 or 32 weights long, with small integer scales (and minima) under one or two float16 factors
of the block. Nibbles and bit pairs of a byte belong to weights 32 apart, not to neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockType:
    """weights: of one block; size: its bytes; halves: where its float16 numbers begin; decode: (B, size) uint8 -> (B, weights) float32."""

    name: str
    weights: int
    size: int
    halves: tuple[int, ...]
    decode: Callable[[torch.Tensor], torch.Tensor]


def dequantise_ggml(rows: torch.Tensor, kind: BlockType, dtype: torch.dtype) -> torch.Tensor:
    """rows (N, K / weights * size) uint8: (N, K) in `dtype`."""
    blocks = rows.reshape(-1, kind.size)
    return kind.decode(blocks).view(rows.shape[0], -1).to(dtype)


def halves_of(rows: torch.Tensor, kind: BlockType) -> list[torch.Tensor]:
    """The float16 numbers of all blocks of rows (N, K / weights * size) uint8: (B, 1) float32 each."""
    blocks = rows.reshape(-1, kind.size)
    return [_half(blocks, at) for at in kind.halves]


def _q8_0(b: torch.Tensor) -> torch.Tensor:
    """float16 factor, 32 int8."""
    return _half(b, 0) * b[:, 2:].view(torch.int8)


def _q4_0(b: torch.Tensor) -> torch.Tensor:
    """float16 factor, 16 bytes: low nibbles are weights 0 to 15, high ones 16 to 31; less 8."""
    return _half(b, 0) * (_nibbles(b[:, 2:], 16) - 8.0)


def _q4_1(b: torch.Tensor) -> torch.Tensor:
    """As q4_0 with a float16 minimum in place of the 8."""
    return _half(b, 0) * _nibbles(b[:, 4:], 16) + _half(b, 2)


def _q5_0(b: torch.Tensor) -> torch.Tensor:
    """As q4_0 with fifth bits in a 32-bit word, weight i at bit i; less 16."""
    return _half(b, 0) * (_nibbles(b[:, 6:], 16) + 16.0 * _bits(b[:, 2:6]) - 16.0)


def _q5_1(b: torch.Tensor) -> torch.Tensor:
    return _half(b, 0) * (_nibbles(b[:, 8:], 16) + 16.0 * _bits(b[:, 4:8])) + _half(b, 2)


def _q2_k(b: torch.Tensor) -> torch.Tensor:
    """16 bytes of scale (low nibble) and minimum (high), 64 of bit pairs, factor and minimum factor; sub-blocks of 16."""
    scale = _half(b, 80) * (b[:, :16] & 15)
    least = _half(b, 82) * (b[:, :16] >> 4)
    q = _pairs(b[:, 16:80]).view(-1, 16, 16)
    return (scale.unsqueeze(-1) * q - least.unsqueeze(-1)).flatten(1)


def _q3_k(b: torch.Tensor) -> torch.Tensor:
    """32 bytes of third bits (0: subtract 4), 64 of bit pairs, 12 of 6-bit scales less 32, factor; sub-blocks of 16."""
    low, high = b[:, 96:104], b[:, 104:108]
    scale = torch.cat((low & 15, low >> 4), 1) | (torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], 1) << 4)
    third = torch.cat([(b[:, :32] >> bit) & 1 for bit in range(8)], 1)
    q = _pairs(b[:, 32:96]) - 4.0 * (1 - third.float())
    factor = _half(b, 108) * (scale.float() - 32.0)
    return (factor.unsqueeze(-1) * q.view(-1, 16, 16)).flatten(1)


def _q4_k(b: torch.Tensor) -> torch.Tensor:
    """Factor, minimum factor, 12 bytes of 6-bit scales and minima, 128 of nibbles; sub-blocks of 32."""
    return _scaled(b, _nibbles(b[:, 16:], 32))


def _q5_k(b: torch.Tensor) -> torch.Tensor:
    """As q4_k with 32 bytes of fifth bits before the nibbles: bit j of byte i is of weight i of sub-block j."""
    fifth = torch.cat([(b[:, 16:48] >> bit) & 1 for bit in range(8)], 1)
    return _scaled(b, _nibbles(b[:, 48:], 32) + 16.0 * fifth)


def _q6_k(b: torch.Tensor) -> torch.Tensor:
    """128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales, factor; each half of 128 weights on its own; less 32."""
    low = _nibbles(b[:, :128], 64)
    high = _pairs(b[:, 128:192])
    factor = _half(b, 208) * b[:, 192:208].view(torch.int8)
    return (factor.unsqueeze(-1) * (low + 16.0 * high - 32.0).view(-1, 16, 16)).flatten(1)


def _half(b: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of every block, as (B, 1) float32."""
    return b[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(b: torch.Tensor, run: int) -> torch.Tensor:
    """Low nibbles of `run` bytes, then their high ones, then the next run: (B, 2 * bytes) float32."""
    runs = b.unflatten(1, (-1, run))
    return torch.stack((runs & 15, runs >> 4), dim=2).flatten(1).float()


def _pairs(b: torch.Tensor) -> torch.Tensor:
    """Bit pairs 0 of 32 bytes, then pairs 1, 2, 3, then those of the next 32 bytes: (B, 4 * bytes) float32."""
    runs = b.unflatten(1, (-1, 32))
    return torch.stack([(runs >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2).flatten(1).float()


def _bits(b: torch.Tensor) -> torch.Tensor:
    """Bits of 4 bytes from the lowest on: (B, 32) float32."""
    return torch.stack([(b >> bit) & 1 for bit in range(8)], dim=2).flatten(1).float()


def _scaled(b: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """q (B, 256) with the head of q4_k and q5_k: 6-bit scales and minima, the first four whole, the others in two parts."""
    first, second, rest = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = torch.cat((first & 63, (rest & 15) | ((first >> 2) & 48)), 1)
    least = torch.cat((second & 63, (rest >> 4) | ((second >> 2) & 48)), 1)
    factor, offset = _half(b, 0) * scale, _half(b, 2) * least
    return (factor.unsqueeze(-1) * q.view(-1, 8, 32) - offset.unsqueeze(-1)).flatten(1)


# By the format's own type numbers.
BLOCK_TYPES = {
    2: BlockType("Q4_0", 32, 18, (0,), _q4_0),
    3: BlockType("Q4_1", 32, 20, (0, 2), _q4_1),
    6: BlockType("Q5_0", 32, 22, (0,), _q5_0),
    7: BlockType("Q5_1", 32, 24, (0, 2), _q5_1),
    8: BlockType("Q8_0", 32, 34, (0,), _q8_0),
    10: BlockType("Q2_K", 256, 84, (80, 82), _q2_k),
    11: BlockType("Q3_K", 256, 110, (108,), _q3_k),
    12: BlockType("Q4_K", 256, 144, (0, 2), _q4_k),
    13: BlockType("Q5_K", 256, 176, (0, 2), _q5_k),
    14: BlockType("Q6_K", 256, 210, (208,), _q6_k),
}
