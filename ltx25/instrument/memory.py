"""Memory of the device and of this process, in bytes. One query per value: what a platform cannot give is None."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from .cgroup import group_free

T = TypeVar("T")


def query(ask: Callable[[], T]) -> T | None:
    """The answer of `ask`, or None where this platform has none: one missing value never costs another."""
    try:
        return ask()
    except Exception:
        return None


def host_now() -> int | None:
    """Resident bytes of this process."""
    if sys.platform.startswith("linux"):
        return query(lambda: _status("VmRSS"))
    return query(lambda: _windows_counters()[0]) if sys.platform == "win32" else None


def host_peak() -> int | None:
    """The most this process was ever resident with, bytes."""
    if sys.platform.startswith("linux"):
        return query(lambda: _status("VmHWM"))
    if sys.platform == "win32":
        return query(lambda: _windows_counters()[1])
    return query(_rusage_peak)


def host_free() -> int | None:
    """Bytes the host could still give to this process, a container's limit included; the whole memory where only that is known."""
    if sys.platform.startswith("linux"):
        return min((free for free in (query(lambda: _kib_line("/proc/meminfo", "MemAvailable")), query(group_free)) if free is not None), default=None)
    return query(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def device_now(device: torch.device) -> int | None:
    """Bytes in tensors of this process on `device`; None for a CPU, whose tensors are host memory."""
    if device.type == "cuda":
        return query(lambda: torch.cuda.memory_allocated(device))
    if device.type == "xpu":
        return query(lambda: torch.xpu.memory_allocated(device))
    return query(torch.mps.current_allocated_memory) if device.type == "mps" else None


def device_peak(device: torch.device) -> int | None:
    """Most bytes in tensors on `device` since the last `reset_device_peak`; None where only samples can be had."""
    if device.type == "cuda":
        return query(lambda: torch.cuda.max_memory_allocated(device))
    return query(lambda: torch.xpu.max_memory_allocated(device)) if device.type == "xpu" else None


def reset_device_peak(device: torch.device) -> None:
    """Start a new peak. The counter belongs to the process: torch offers no second one."""
    if device.type == "cuda":
        query(lambda: torch.cuda.reset_peak_memory_stats(device))
    elif device.type == "xpu":
        query(lambda: torch.xpu.reset_peak_memory_stats(device))


def device_free(device: torch.device) -> int | None:
    """Bytes another allocation could take on `device`, those this process holds in reserve included; CPU: the host's."""
    if device.type == "cuda":
        return query(lambda: _cuda_free(device))
    return host_free() if device.type in ("cpu", "mps") else None


def device_total(device: torch.device) -> int | None:
    if device.type == "cuda":
        return query(lambda: torch.cuda.get_device_properties(device).total_memory)
    return query(lambda: torch.xpu.get_device_properties(device).total_memory) if device.type == "xpu" else None


def is_unified(device: torch.device) -> bool:
    """Whether device and host draw from one memory, so that their sum is what runs out."""
    if device.type == "cuda":
        return bool(query(lambda: torch.cuda.get_device_properties(device).is_integrated))
    return device.type == "mps"


def _cuda_free(device: torch.device) -> int:
    """The process may have been given a share of the device (torch.cuda.set_per_process_memory_fraction)."""
    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    reserved = torch.cuda.memory_reserved(index)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(index)  # newer than the API floor
    return max(0, min(free, int(share * total) - reserved)) + reserved - torch.cuda.memory_allocated(index)


def _status(name: str) -> int:
    return _kib_line("/proc/self/status", name)


def _kib_line(path: str, name: str) -> int:
    with open(path, "rb") as file:
        text = file.read()
    start = text.index(name.encode() + b":")
    return int(text[start:].split(None, 2)[1]) * 1024


def _rusage_peak() -> int:
    import resource  # POSIX only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _windows_counters() -> tuple[int, int]:
    """(working set, peak working set) of this process."""
    import ctypes
    from ctypes import wintypes

    class Counters(ctypes.Structure):
        _fields_ = [("cb", wintypes.DWORD), ("PageFaultCount", wintypes.DWORD)] + [
            (name, ctypes.c_size_t)
            for name in ("peak", "now", "peak_paged", "paged", "peak_nonpaged", "nonpaged", "pagefile", "peak_pagefile")
        ]

    counters = Counters(cb=ctypes.sizeof(Counters))
    kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel32.GetCurrentProcess.restype = wintypes.HANDLE
    kernel32.K32GetProcessMemoryInfo.argtypes = [wintypes.HANDLE, ctypes.POINTER(Counters), wintypes.DWORD]
    if not kernel32.K32GetProcessMemoryInfo(kernel32.GetCurrentProcess(), ctypes.byref(counters), counters.cb):
        raise ctypes.WinError(ctypes.get_last_error())
    return counters.now, counters.peak
