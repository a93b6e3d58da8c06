"""How much host memory weights that wait there leave to everybody else."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .instrument.memory import host_free, is_unified

HOST_SPARE = 4 << 30  # bytes, where nobody asks for more
_asked: list[Callable[[], int]] = []  # at most one


def ask_host_spare(asked: Callable[[], int]) -> None:
    """From now on parked blocks leave `asked()` bytes of host memory, where that is more than HOST_SPARE: the process belongs to
    a program that wants them. It holds for all engines, and may answer anew each time.
    """
    _asked[:] = [asked]


def host_spare() -> int:
    """Bytes of host memory that parked blocks leave to everybody else."""
    return max([HOST_SPARE, *(asked() for asked in _asked)])


def host_has_room(size: int, device: torch.device) -> bool:
    """Whether weights may be kept in host memory, too: never where device and host are one."""
    free = host_free()
    return not is_unified(device) and (free is None or free - size >= host_spare())
