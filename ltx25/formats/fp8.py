"""fp8: w = q * scale, q e4m3 or e5m2, scale float32, one for the tensor or one per row; without a scale, w = q.

Files spell the scale `weight_scale`, `scale_weight` or `<whole name>_scale`. An input scale beside it tells how activations
were calibrated for fp8 products; the weight does not depend on it.
"""

from __future__ import annotations

import torch

from .int8 import row_scale


def dequantise_fp8(weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """weight (N, K) or of any shape, scale (), (1,), (N,) or (N, 1) or None: the same shape in `dtype`, rounded once."""
    if scale is None:
        return weight.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    factor = scale.to(wide).reshape(()) if scale.numel() == 1 else row_scale(scale, 1).to(wide)
    return (weight.to(wide) * factor).to(dtype)
