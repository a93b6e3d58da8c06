"""Memory of the device and of this process, in bytes. One query per value: what a platform cannot give is None."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache
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
    """Bytes the host could still give to this process, file pages that can go included and a container's limit, too."""
    if sys.platform.startswith("linux"):
        return min((free for free in (query(lambda: _kib_line("/proc/meminfo", "MemAvailable")), query(group_free)) if free is not None), default=None)
    if sys.platform == "win32":
        return query(_windows_free)
    return query(_macos_free) if sys.platform == "darwin" else None


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


class _WindowsMemory(ctypes.Structure):
    """MEMORYSTATUSEX of sysinfoapi.h, bytes."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("length", "load")] + [
        (name, ctypes.c_uint64) for name in ("total", "available", "total_commit", "available_commit", "total_virtual", "available_virtual", "extended")
    ]


def _windows_free() -> int:
    """Memory that nobody needs, or what this process may still commit, where that is less."""
    status = _WindowsMemory(length=ctypes.sizeof(_WindowsMemory))
    kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
    if not kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise ctypes.WinError(ctypes.get_last_error())
    return min(status.available, status.available_commit)


class _MacOSPages(ctypes.Structure):
    """vm_statistics64 of mach/vm_statistics.h, in pages: the head of it, which is all that is read."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("free", "active", "inactive", "wired")] + [("rest", ctypes.c_uint32 * 34)]


_HOST_VM_INFO64 = 4  # mach/host_info.h


def _macos_free() -> int:
    """Pages that hold nothing, and those nobody looked at for a while, which the system takes first."""
    pages, count = _MacOSPages(), ctypes.c_uint32(ctypes.sizeof(_MacOSPages) // 4)
    if ctypes.CDLL(None).host_statistics64(ctypes.c_uint32(_macos_host()), _HOST_VM_INFO64, ctypes.byref(pages), ctypes.byref(count)):
        raise OSError("host_statistics64 says nothing")
    return (pages.free + pages.inactive) * mmap.PAGESIZE


@cache
def _macos_host() -> int:
    """The port of the host: asked for once, each asking would hold it once more."""
    ask = ctypes.CDLL(None).mach_host_self
    ask.restype = ctypes.c_uint32
    return ask()


def _windows_counters() -> tuple[int, int]:
    """(working set, peak working set) of this process."""
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
