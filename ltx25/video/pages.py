"""Host memory for frames: in large pages, and there before it is written.

A clip is a gigabyte or more of memory that nobody has touched. In pages of 4 KiB the first write to it takes the kernel
longer than the device needs to send what is written (measured: 1.3 GB in 0.7 to 1.9 s, in 0.3 s with large pages). Only
Linux is asked; elsewhere, and where it says no, memory stays as it is.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable

import torch

_HUGE, _POPULATE = 14, 23  # MADV_HUGEPAGE, MADV_POPULATE_WRITE of linux/mman.h
_AT_ONCE = 64 << 20  # bytes between two looks whether to stop


def in_large_pages(memory: torch.Tensor) -> torch.Tensor:
    """Ask for large pages behind a contiguous CPU tensor; the tensor."""
    _advise(memory.data_ptr(), memory.nbytes, _HUGE)
    return memory


def populate(memory: torch.Tensor, stop: Callable[[], bool]) -> int:
    """Have a contiguous CPU tensor's memory there, from its start until `stop()`; values stay as they are. Bytes done."""
    for done in range(0, memory.nbytes, _AT_ONCE):
        if stop() or not _advise(memory.data_ptr() + done, min(_AT_ONCE, memory.nbytes - done), _POPULATE):
            return done
    return memory.nbytes


def _advise(address: int, size: int, advice: int) -> bool:
    """madvise of the whole pages in a range; False where it is not to be had."""
    if sys.platform != "linux":
        return False
    begin, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        madvise = ctypes.CDLL(None).madvise  # ctypes lets other threads run meanwhile
    except (OSError, AttributeError):
        return False
    return begin >= end or madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice) == 0
