"""What a device can do, measured in two seconds: the yardstick for achieved rates and for plans without records."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..device import compute_dtype

SECONDS = 2.0
SIDE = {"cuda": 8192, "xpu": 4096, "mps": 2048}  # of the square product; 512 elsewhere
COPY_BYTES = {"cuda": 1 << 30, "xpu": 1 << 29, "mps": 1 << 28}  # large enough to miss every cache; 64 MiB elsewhere
LINK_BYTES = 1 << 28
QUICK_SIDE = 2048  # at most, of the product in quick_product: 24 MiB in bf16
QUICK = 0.05  # s


@dataclass(frozen=True)
class Speed:
    """Rates of one device: FLOP/s of a square product in `dtype`, bytes/s of a copy on it (read + write), bytes/s from
    pinned host memory (None where host and device are one)."""

    dtype: str
    flops: float
    copy: float
    link: float | None


def self_test(device: torch.device, seconds: float = SECONDS) -> Speed:
    """Measure `device` for about `seconds`. Runs on its current stream and waits for it: not for inside a render."""
    dtype = compute_dtype(device)
    flops = _product(device, dtype, SIDE.get(device.type, 512), seconds / 2)
    copy = _copy(device, seconds / 4)
    link = _link(device, seconds / 4) if device.type == "cuda" else None
    return Speed(str(dtype).removeprefix("torch."), flops, copy, link)


@functools.cache
def quick_product(device: torch.device) -> float:
    """FLOP/s of a square product, roughly, in `QUICK` s and little memory, once per process: for a render that has its
    weights loaded and no record to go by."""
    dtype = compute_dtype(device)
    return _product(device, dtype, min(QUICK_SIDE, SIDE.get(device.type, 512)), QUICK)


def _product(device: torch.device, dtype: torch.dtype, side: int, seconds: float) -> float:
    generator = torch.Generator(device)  # its own: the process's is not ours to move on
    a, b = (torch.randn(side, side, device=device, dtype=dtype, generator=generator) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * side**3 / _seconds_per_call(lambda: torch.matmul(a, b, out=out), device, seconds)


def _copy(device: torch.device, seconds: float) -> float:
    source = torch.zeros(COPY_BYTES.get(device.type, 1 << 26) // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds_per_call(lambda: target.copy_(source), device, seconds)


def _link(device: torch.device, seconds: float) -> float:
    pinned = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    landing = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    return LINK_BYTES / _seconds_per_call(lambda: landing.copy_(pinned, non_blocking=True), device, seconds)


def _seconds_per_call(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The fastest of rounds of calls that together last `seconds`, after one round to warm up."""
    wait = getattr(getattr(torch, device.type, None), "synchronize", lambda: None)
    call()
    wait()
    begin = time.perf_counter()
    call()
    wait()
    calls = max(1, int(seconds / 10 / max(time.perf_counter() - begin, 1e-6)))
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        best = min(best, (time.perf_counter() - begin) / calls)
    return best
