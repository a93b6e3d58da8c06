"""How much memory a piece of work holds at once: from the allocations a CPU profile records, or counted on meta; and what is alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes_held(work: Callable[[], Iterable]) -> int:
    """Largest number of bytes allocated since the start and not freed yet, while what `work()` yields is consumed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for _ in work():
            pass
    held = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def living_tensors() -> list[torch.Tensor]:
    """All that hold numbers now, whoever holds them: garbage that was not collected yet, too."""
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor) and not found.is_meta and found.numel()]


class HeldOnMeta(TorchDispatchMode):
    """Counts the bytes of meta tensors alive at once, and of the largest: what a device would hold, without one. `given` are not counted."""

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._live = {tensor.untyped_storage()._cdata: 0 for tensor in given}
        self.held = self.peak = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._live:
            self._live[storage._cdata] = storage.nbytes()
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)
            self.largest = max(self.largest, storage.nbytes())
            weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, key: int) -> None:
        self.held -= self._live.pop(key)


class OutOfMemoryAt(TorchDispatchMode):
    """Operation `number` (from 0) of those inside that take memory fails for the lack of it; `reached`: whether there were so many."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left = number
        self.reached = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._left -= not func.is_view
        if self._left < 0 and not self.reached:
            self.reached = True
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))
