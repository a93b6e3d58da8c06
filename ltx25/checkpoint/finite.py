"""Whether the weights of a file are numbers. One NaN spreads to black or noise, or an attention makes zeros of it: then the
clip is finite and nothing of the prompt. Either way nobody would look for it in the file.

Reading stays as fast. On the host, bytes that were just read are looked at in the reading threads, as integers: sign aside,
all that is infinite or NaN stands above all that is a number. On a device all tensors of a read are looked at together, in a
few launches and one wait behind the wait for their copies.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

# The bits, sign aside, from which on a value is infinite or NaN. e4m3fn has no infinity and one NaN. No weight is used in
# float64: of such a file, numbers that are infinite in float32 (from 2^128 - 2^103 on) are none either.
_FIRST = {
    torch.float64: 0x47EFFFFFF0000000,
    torch.float32: 0x7F800000,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,
}


def numbers(raw: memoryview, dtype: torch.dtype) -> bool:
    """Whether all values in `raw`, whole ones of `dtype`, are finite. Integers are."""
    first = _FIRST.get(dtype)
    if first is None or not len(raw):
        return True
    size = dtype.itemsize
    negative = first | 1 << 8 * size - 1
    return int(np.frombuffer(raw, f"<i{size}").max()) < first and int(np.frombuffer(raw, f"<u{size}").max()) < negative


def first_without(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The name of a tensor that holds NaN or infinity, of some on one device, or None. Waits for the device once."""
    floating = {name: tensor for name, tensor in tensors.items() if tensor.dtype in _FIRST and tensor.numel()}
    answers = []
    for dtype in {tensor.dtype for tensor in floating.values()}:
        alike = [tensor for tensor in floating.values() if tensor.dtype is dtype]
        if dtype.itemsize == 1:
            answers += map(_is_finite, alike)
        else:
            answers.append(torch.stack(torch._foreach_norm(alike, float("inf"))).float().isfinite().all())  # NaN passes through it
    if not answers or bool(torch.stack(answers).all()):
        return None
    return next(name for name, tensor in floating.items() if not _is_finite(tensor))


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.itemsize > 1:
        return tensor.float().isfinite().all()
    first = _FIRST[tensor.dtype]
    return (tensor.view(torch.int8).amax() < first) & (tensor.view(torch.uint8).amax() < first + 128)
