"""Telling a lack of memory from other errors: it is no fault of the work, and may be gone the next time."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on any device."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in ("out of memory", "can't allocate memory", "not enough memory"))
    )
