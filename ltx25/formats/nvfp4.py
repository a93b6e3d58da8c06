"""nvfp4: w[n, k] = e2m1 * block scale[n, k // 16] * tensor scale.

Packed (N, K / 2) uint8: element 2 j is the HIGH nibble of byte j (other tools put it low). A nibble is sign, then one of
0, 0.5, 1, 1.5, 2, 3, 4, 6. Block scales are e4m3, (N, K / 16) in the tiles that tensor cores read (kernels/nvfp4_linear.py has
the formula), although the file declares the plain shape. An input scale beside them is the tensor scale of activations, as
calibrated: it matters to products in four bits alone.
"""

from __future__ import annotations

import torch

from ...kernels.nvfp4_linear import BLOCK, dense, plain_scales, scale_shape

__all__ = ["BLOCK", "dequantise_nvfp4", "plain_scales", "scale_shape"]


def dequantise_nvfp4(packed: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """packed (N, K / 2) uint8, scales e4m3 as stored, scale float32 () or (N, 1): (N, K) in `dtype`, rounded once."""
    return dense(packed, scales, scale, dtype)
