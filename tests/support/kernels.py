"""Where kernels are tested: Triton's interpreter on a CPU (float32 only, it truncates bfloat16), the card where there is one."""

from __future__ import annotations

import pytest
import torch

CUDA = torch.cuda.is_available()

# (device, dtype) of a kernel test. The CPU cases need TRITON_INTERPRET=1 before Triton is imported: tests/conftest.py.
PLACES = (
    pytest.param(torch.device("cpu"), torch.float32, id="interpreter", marks=pytest.mark.skipif(CUDA, reason="the card runs the kernel itself")),
    pytest.param(torch.device("cuda"), torch.float32, id="cuda-float32", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]),
    pytest.param(torch.device("cuda"), torch.bfloat16, id="cuda-bfloat16", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]),
)


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Seeded values on the CPU, rounded to `dtype`."""
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)
