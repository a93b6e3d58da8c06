"""What devices say when they run out of memory."""

from __future__ import annotations

import torch


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed, on any device."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in ("out of memory", "can't allocate memory", "not enough memory")
    )
