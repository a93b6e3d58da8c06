"""What every op in this folder shares: when its kernel runs, and the precision its arithmetic is done in."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .memory import is_out_of_memory

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton has no build for this platform: the twins run
    triton = tl = None

log = logging.getLogger(__name__)

# (kernel's result, its twin's in the same dtype, the twin's in float64 on the CPU)
Compared = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


_preparing: list[str] = []  # ops on their first use, the innermost last


def preparing() -> str | None:
    """The op that is on its first use: compiled, which may take seconds, and checked. Any thread may ask."""
    return next(reversed(_preparing.copy()), None)


class Op:
    """When the kernel of one op runs: with Triton, on CUDA, unless LTX25_KERNELS=reference, and where it was seen right.

    `check(device, dtype)` runs once per dtype and device, on first use. Where it raises, or the kernel's error against
    float64 is more than twice its twin's, the twin runs for the rest of the process, which is logged. Out of memory says
    nothing about the kernel: it passes on, and the next use checks again.
    """

    def __init__(self, name: str, check: Callable[[torch.device, torch.dtype], Iterable[Compared]]) -> None:
        self.name = name
        self._check = check
        self._right: dict[tuple[torch.device, torch.dtype], bool] = {}

    def runs(self, like: torch.Tensor) -> bool:
        """Whether the kernel runs on tensors like `like`."""
        if triton is None or like.device.type != "cuda" or like.dtype == torch.float64 or os.environ.get("LTX25_KERNELS") == "reference":
            return False
        key = (like.device, like.dtype)
        if key not in self._right:
            self._right[key] = self._first_use(*key)
        return self._right[key]

    def _first_use(self, device: torch.device, dtype: torch.dtype) -> bool:
        _preparing.append(self.name)
        try:
            for got, twin, truth in self._check(device, dtype):
                error, allowed = _error(got, truth), 2 * _error(twin, truth)
                if not error <= allowed:  # also when it is not a number
                    raise ArithmeticError(f"its error is {error:.3g}, allowed {allowed:.3g}")
        except Exception as error:  # whatever a compiler or driver raises: the twin is always there
            if is_out_of_memory(error):
                raise
            log.warning("kernel %s is off for %s on %s, its plain version runs: %s", self.name, dtype, device, error)
            return False
        finally:
            _preparing.remove(self.name)
        return True


def _error(got: torch.Tensor, truth: torch.Tensor) -> float:
    return (got.cpu().double() - truth).abs().max().item()


def jit(function: Callable[..., Any], general: Sequence[str] = ()) -> Any:
    """triton.jit; without Triton the function stays as it is, and is never called.

    `general` names arguments, whole numbers or pointers, for which no separate kernel is compiled where they are 1 or a multiple of 16.
    """
    return function if triton is None else triton.jit(function, do_not_specialize=list(general))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def row_warps(width: int) -> int:
    """Warps for a program that holds a row of `width` numbers: 8 numbers a thread or so."""
    return min(16, max(1, power_of_two(width) // 256))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype statistics and elementwise arithmetic run in: float32, or float64 for a float64 tensor."""
    return torch.float64 if dtype == torch.float64 else torch.float32
