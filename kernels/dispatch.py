"""What every op in this folder shares: the precision its arithmetic is done in."""

from __future__ import annotations

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype statistics and elementwise arithmetic run in: float32, or float64 for a float64 tensor."""
    return torch.float64 if dtype == torch.float64 else torch.float32
