"""Keeping float32 products float32 on a GPU, whatever the process allows elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """cuDNN convolutions of this stretch use no TF32 (its 10-bit mantissa is on by default); the old choice returns after."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32
    if not torch.cuda.is_available() or not before:
        yield
        return
    cudnn.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32 = before
