"""Whether latents, pictures and sound are numbers."""

from __future__ import annotations

import torch


def count_not_finite(values: torch.Tensor) -> int:
    """How many values are NaN or infinite. Mostly none are: then they were read once, and nothing of their size was made."""
    # Both are NaN where a value is; of other devices not all have them, or pass a NaN on.
    if values.device.type in ("cpu", "cuda") and values.numel() and bool(torch.isfinite(torch.stack(torch.aminmax(values))).all()):
        return 0
    return int((~torch.isfinite(values)).sum())


def all_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    return count_not_finite(values) == 0
