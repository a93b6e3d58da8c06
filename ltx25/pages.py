"""Host memory in large pages: for frames, and for weights that wait there.

A clip is a gigabyte or more of memory that nobody has touched; in pages of 4 KiB the first write to it takes the kernel
longer than in large ones (measured: 1.3 GB in 0.7 to 1.9 s, in 0.3 s with them), and each page is locked on its own where a
device is to copy from it. Only Linux is asked; elsewhere, and where it says no, memory stays as it is. Having the pages of
frames there beforehand was tried and lost: tests/bench/LOG.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

import torch

_HUGE = 14  # MADV_HUGEPAGE of linux/mman.h


def in_large_pages(memory: torch.Tensor) -> torch.Tensor:
    """Ask for large pages behind a contiguous CPU tensor, whose values stay as they are; the tensor."""
    address, size = memory.data_ptr(), memory.nbytes
    begin, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and begin < end:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _HUGE)
    return memory
