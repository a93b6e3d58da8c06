"""What the engine asks of any device: points in its work that can be asked about later, and memory back."""

from __future__ import annotations

import functools
import time

import torch

from .errors import InputError


class Mark:
    """Made after work was queued: `done` tells whether the device got there. On the CPU work is done when it returns."""

    def __init__(self, device: torch.device) -> None:
        self._event = None
        self._clock = 0.0
        events = None if device.type == "cpu" else getattr(getattr(torch, device.type, None), "Event", None)
        if events is None:
            self._clock = time.perf_counter()
        else:
            self._event = events(enable_timing=True)
            self._event.record()

    def done(self) -> bool:
        """Whether all work queued before this mark is complete. Never waits."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Return once the device got there."""
        if self._event is not None:
            self._event.synchronize()

    def before(self, stream: torch.cuda.Stream) -> None:
        """What `stream` is given from here on runs behind this mark."""
        if self._event is not None:
            stream.wait_event(self._event)

    def seconds_since(self, earlier: Mark) -> float:
        """Device seconds between two marks of one device, both done."""
        if self._event is None:
            return self._clock - earlier._clock
        return earlier._event.elapsed_time(self._event) / 1000


def check_current(device: torch.device) -> None:
    """Raise InputError for a CUDA device that is not the current one: events, streams and kernels go to the current one."""
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        raise InputError(f"the engine was asked for {device} while cuda:{torch.cuda.current_device()} is current; call torch.cuda.set_device('{device}') before.")


def copied(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`target`, with the values of `source`. On CUDA the copy is queued, and host memory is to outlive it unless torch pinned it;
    elsewhere it is done on return: a copy that MPS queues does not hold on to host memory, and nothing tells when it was done.
    """
    return target.copy_(source, non_blocking=source.is_cuda or target.is_cuda)


def capture_stream() -> torch.cuda.Stream:
    """Where graphs of the current card are captured. PyTorch's own is made once in a process, on the card that captured first."""
    return _capture_stream(torch.cuda.current_device())


@functools.cache
def _capture_stream(number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(number)


def compute_dtype(device: torch.device) -> torch.dtype:
    """What weights and activations are in where nothing asks for more."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def release(device: torch.device) -> None:
    """Give cached, unused device memory back."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def release_host() -> None:
    """Give pinned host memory back that torch keeps for the next copies."""
    empty = getattr(torch.accelerator, "empty_host_cache", None)  # newer than the API floor
    if empty is not None and torch.cuda.is_available():
        empty()
