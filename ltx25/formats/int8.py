"""int8: w = q * scale, q (N, K) int8, scale float32, one for the tensor or one per row, (N, 1).

ConvRot: what is stored is the weight with every group of `group` columns (256 in the published files) multiplied by the
regular Hadamard matrix of that size, divided by its row's largest magnitude over 127 and rounded. The matrix is its own
inverse, so the weight is (q * scale) multiplied by it once more.
"""

from __future__ import annotations

import torch

from ...kernels.int8_linear import rotate


def dequantise_int8(weight: torch.Tensor, scale: torch.Tensor, group: int | None, dtype: torch.dtype) -> torch.Tensor:
    """weight (N, K) int8, scale (1,), () or (N, 1): (N, K) in `dtype`; computed in float32 and rounded once."""
    wide = torch.promote_types(dtype, torch.float32)
    dense = weight.to(wide) * row_scale(scale, 1).to(wide)
    return (dense if group is None else rotate(dense, group)).to(dtype)


def row_scale(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """A scale stored as (), (1,), (N,) or (N, 1) as (rows, 1) or, where it is one per row, (N, 1)."""
    scale = scale.reshape(-1, 1)
    return scale.expand(rows, 1) if len(scale) == 1 else scale
