"""Bytes from file to tensors: large sequential reads through a bounded ring of staging buffers, straight to the device.

On CUDA the staging buffers are pinned and the copies asynchronous, so reading and copying overlap; nothing is copied
twice in host memory and pages of the file are given back once used. A destination of another dtype (bf16 weights
widened to fp32 on a CPU) is converted piece by piece.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import BinaryIO

import torch

from ..errors import FileError
from .header import Header, TensorInfo

BUFFER_BYTES = 64 << 20
BUFFERS = 4


def read_tensors(header: Header, destinations: Mapping[str, torch.Tensor], read: Callable[[int], None]) -> None:
    """Fill each destination tensor with the file's tensor of that name; shapes must agree, dtypes may differ.

    Destinations must be contiguous. `read(n)` is called after every n bytes read; it may raise to cancel, which leaves
    the destinations partly filled: the caller drops them. Raises FileError when the file is gone, has changed since its
    header was read, or is cut off.
    """
    wanted = [header.tensors[name] for name in destinations]
    _unchanged(header)
    for info in wanted:
        target = destinations[info.name]
        if tuple(target.shape) != info.shape:
            raise FileError(f"{header.name}: {info.name} has shape {info.shape}, wanted {tuple(target.shape)}.")
        if not target.is_contiguous():
            raise ValueError(f"destination of {info.name} is not contiguous")
    cuda = any(target.device.type == "cuda" for target in destinations.values())
    largest = max((info.end - info.begin for info in wanted), default=0)
    ring = _Ring(size=min(BUFFER_BYTES, largest), pinned=cuda)
    with header.path.open("rb", buffering=0) as file:
        for info, offset, size in _pieces(wanted):
            stage = ring.next(size)
            _read_exactly(file, info, offset, memoryview(stage.numpy()), header)
            _copy(stage, info, offset, destinations[info.name], non_blocking=cuda)
            ring.used()
            _release_pages(file, info.begin + offset, size)
            read(size)
    ring.drain()


def read_bytes(header: Header, name: str) -> bytes:
    """The raw bytes of one tensor: tokenizer files are stored that way. Raises FileError when the file changed or is cut off."""
    info = header.tensors[name]
    _unchanged(header)
    with header.path.open("rb") as file:
        file.seek(info.begin)
        raw = file.read(info.end - info.begin)
    if len(raw) != info.end - info.begin:
        raise FileError(f"{header.name} is cut off inside {name}; download it again.")
    return raw


def _unchanged(header: Header) -> None:
    """Offsets of a header are good for the file they were read from only."""
    try:
        stat = header.path.stat()
    except OSError as error:
        raise FileError(f"{header.path} cannot be read any more ({error.strerror}); put it back or choose another one.") from None
    if (stat.st_size, stat.st_mtime_ns) != (header.size, header.mtime_ns):
        raise FileError(f"{header.name} changed on disk since it was opened; load it again.")


def _pieces(wanted: Iterable[TensorInfo]) -> Iterable[tuple[TensorInfo, int, int]]:
    for info in sorted(wanted, key=lambda info: info.begin):
        total = info.end - info.begin
        for offset in range(0, total, BUFFER_BYTES):  # a multiple of every item size
            yield info, offset, min(BUFFER_BYTES, total - offset)


def _read_exactly(file: BinaryIO, info: TensorInfo, offset: int, view: memoryview, header: Header) -> None:
    file.seek(info.begin + offset)
    done = 0
    while done < len(view):
        got = file.readinto(view[done:])
        if not got:
            raise FileError(f"{header.name} is cut off inside {info.name}; download it again.")
        done += got


def _copy(stage: torch.Tensor, info: TensorInfo, offset: int, target: torch.Tensor, non_blocking: bool) -> None:
    """Elsewhere than on CUDA nothing tells when a copy is done, so it must be done on return: the buffer is reused."""
    values = stage.view(info.dtype)
    first = offset // info.dtype.itemsize
    part = target.view(-1)[first : first + values.numel()]
    if part.dtype == values.dtype or part.device.type == "cpu":
        part.copy_(values, non_blocking=non_blocking)
    else:  # cross the bus in the stored dtype, convert on the device
        part.copy_(values.to(part.device, non_blocking=non_blocking))


def _release_pages(file: BinaryIO, begin: int, size: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), begin, size, os.POSIX_FADV_DONTNEED)


class _Ring:
    """A few staging buffers of `size` bytes, reused in turn once the copy out of them is done."""

    def __init__(self, size: int, pinned: bool) -> None:
        self._size = size
        self._pinned = pinned
        self._buffers: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event | None] = []
        self._turn = -1

    def next(self, size: int) -> torch.Tensor:
        """A uint8 buffer of `size` bytes that no copy is still reading."""
        self._turn = (self._turn + 1) % (BUFFERS if self._pinned else 1)
        if self._turn == len(self._buffers):
            self._buffers.append(torch.empty(self._size, dtype=torch.uint8, pin_memory=self._pinned))
            self._copied.append(None)
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        return self._buffers[self._turn][:size]

    def used(self) -> None:
        if self._pinned:
            event = torch.cuda.Event()
            event.record()
            self._copied[self._turn] = event

    def drain(self) -> None:
        for copied in self._copied:
            if copied is not None:
                copied.synchronize()
