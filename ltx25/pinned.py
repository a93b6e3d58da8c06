"""Host memory for what waits there, which a CUDA device copies from on its own.

Registered, not allocated as pinned: pinned allocations are rounded up to a power of two and kept for good. A system gives
a part of its memory away like this (half of it on Windows, what `ulimit -l` allows on Linux) and then refuses: the copies
go on from pageable memory.
"""

from __future__ import annotations

import contextlib
import logging
import weakref

import torch

from .pages import in_large_pages

log = logging.getLogger(__name__)


def host_memory(size: int) -> torch.Tensor | None:
    """(size,) uint8, unwritten; None where the system has no more to give."""
    try:
        return torch.empty(size, dtype=torch.uint8)
    except (RuntimeError, MemoryError):  # the allocator of the CPU has no other error
        return None


class Pins:
    """What this process has registered. After a refusal nothing more is asked for until something registered goes."""

    def __init__(self) -> None:
        self._refused = False
        self._told = False

    def pin(self, owner: object, buffer: torch.Tensor, device: torch.device) -> None:
        """Let a CUDA `device` copy from `buffer` (n,) uint8 on its own, until `owner`, which holds it, goes. Its values are lost."""
        if device.type != "cuda" or buffer.numel() == 0:
            return
        in_large_pages(buffer)
        if self._refused:
            return
        address = buffer.fill_(0).data_ptr()  # with its pages there, registering them goes faster
        if int(torch.cuda.cudart().cudaHostRegister(address, buffer.numel(), 0)):
            _drop_error(device)
            self._refused = True
            if not self._told:
                log.warning("The system pins no more host memory: weights that take turns are copied from pageable memory, which is slower.")
            self._told = True
        else:
            weakref.finalize(owner, self._unpin, address, device)  # runs before the buffer goes

    def _unpin(self, address: int, device: torch.device) -> None:
        if int(torch.cuda.cudart().cudaHostUnregister(address)):
            _drop_error(device)
        self._refused = False


def _drop_error(device: torch.device) -> None:
    """Take back the error that CUDA keeps of a call that failed: torch tells the code, and would raise the error itself at the next kernel."""
    with contextlib.suppress(RuntimeError):
        _run_something(device)


def _run_something(device: torch.device) -> None:
    torch.ones(1, device=device)
    torch.cuda.synchronize(device)


pin = Pins().pin
