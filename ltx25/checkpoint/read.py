"""Bytes from file to tensors: large reads by several threads, a few buffers ahead, straight to the device.

Threads read pieces of the file into a bounded ring of staging buffers, pinned where the device is a CUDA one; copies out of
them are queued on the current stream in file order, and a buffer is read into again once its copy is done. Nothing waits per
tensor, nothing is copied twice in host memory, and pages of the file are given back once used. A tensor in host memory of the
file's own dtype is read into directly. Another dtype (bf16 weights widened to fp32 on a CPU) is converted piece by piece.
"""

from __future__ import annotations

import contextlib
import os
import queue
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import BinaryIO

import torch

from ..errors import FileError
from .finite import first_without, numbers
from .header import Header, TensorInfo

BUFFER_BYTES = 32 << 20
READERS = min(8, os.cpu_count() or 1)  # one core copies 3 to 5 GB/s out of the page cache
BUFFERS = READERS + 4  # 384 MiB at most
CHUNK_BYTES = 4 << 20  # of one read call: a cancelled load waits for no more
LOOKED_BYTES = 512 << 10  # the same where they are looked at: they are in a core's own cache yet
CHECK = 0.2  # s between looks for a cancel while the disk is slow


def read_tensors(
    header: Header, destinations: Mapping[str, torch.Tensor], read: Callable[[int], None], reread: bool = False, finite: bool = False
) -> None:
    """Fill each destination tensor with the file's tensor of that name; shapes must agree, dtypes may differ.

    Destinations must be contiguous. `read(n)` is called after every n bytes read, and with 0 while nothing arrives; it may
    raise to cancel, which leaves the destinations partly filled: the caller drops them. reread: the file will be read again
    soon, so its pages stay. Raises FileError when the file is gone, has changed since its header was read, or is cut off, and,
    with `finite`, for a tensor that holds NaN or infinity.
    """
    _unchanged(header)
    pieces = _pieces(header, destinations)
    upcoming = iter(pieces)
    there = {name: target for name, target in destinations.items() if finite and target.device.type != "cpu"}
    with _Readers(header, max((piece.size for piece in pieces), default=0), reread, finite) as readers:
        ahead: deque[_Piece] = deque()
        while True:
            while len(ahead) < BUFFERS and (piece := next(upcoming, None)) is not None:
                readers.start(piece)
                ahead.append(piece)
            if not ahead:
                break
            readers.finish(ahead.popleft(), read)
        readers.drain()
    bad = first_without(there)
    if bad is not None:
        raise _not_finite(header, bad)


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


@dataclass(eq=False)
class _Piece:
    """Consecutive bytes of the file, read in one go."""

    begin: int
    size: int = 0
    spans: list[_Span] = field(default_factory=list)
    direct: memoryview | None = None  # host memory that the bytes belong to as they are
    stage: torch.Tensor | None = None
    slot: _Slot | None = None
    coming: Future[None] | None = None


@dataclass(frozen=True)
class _Span:
    """Bytes [at, at + size) of a piece are bytes [offset, offset + size) of a tensor."""

    info: TensorInfo
    target: torch.Tensor
    offset: int
    at: int
    size: int


@dataclass(eq=False)
class _Slot:
    """A staging buffer and what still copies out of it."""

    buffer: torch.Tensor
    copied: torch.cuda.Event | None = None


class _Readers:
    """Threads that read pieces ahead, and the ring of buffers they read into."""

    def __init__(self, header: Header, largest: int, reread: bool, finite: bool) -> None:
        self._header = header
        self._largest = largest  # bytes of a piece
        self._reread = reread
        self._finite = finite
        self._stopped = False
        self._made = 0
        self._slots: deque[_Slot] = deque()  # those no piece uses, the one used longest ago first
        self._files: queue.SimpleQueue[BinaryIO] = queue.SimpleQueue()  # a file object has one position: one per read under way
        self._open = contextlib.ExitStack()

    def __enter__(self) -> _Readers:
        for _ in range(READERS):
            self._files.put(self._open.enter_context(self._header.path.open("rb", buffering=0)))
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="ltx25-read")
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._open.close()

    def start(self, piece: _Piece) -> None:
        """Begin to read a piece. At most BUFFERS of them are started and not finished."""
        if piece.direct is None:
            piece.slot = self._slot(pinned=piece.spans[0].target.device.type == "cuda")
            piece.stage = piece.slot.buffer[: piece.size]
        piece.coming = self._threads.submit(self._read, piece)

    def finish(self, piece: _Piece, read: Callable[[int], None]) -> None:
        """Wait for a piece and queue its copies."""
        while not wait([piece.coming], CHECK).done:
            read(0)
        piece.coming.result()
        for span in piece.spans if piece.direct is None else ():
            _copy(piece.stage, span)
        if piece.slot is not None:
            device = piece.spans[0].target.device
            if device.type == "cuda":
                piece.slot.copied = torch.cuda.Event(blocking=True)
                piece.slot.copied.record(torch.cuda.current_stream(device))
            self._slots.append(piece.slot)
        read(piece.size)

    def drain(self) -> None:
        """Wait for all copies."""
        for slot in self._slots:
            if slot.copied is not None:
                slot.copied.synchronize()

    def _slot(self, pinned: bool) -> _Slot:
        """A buffer no piece uses; its last copy may still run where all have been made."""
        if self._slots and (self._made == BUFFERS or not pinned or self._slots[0].copied.query()):
            return self._slots.popleft()
        self._made += 1
        return _Slot(torch.empty(self._largest, dtype=torch.uint8, pin_memory=pinned))

    def _read(self, piece: _Piece) -> None:
        """In a thread of its own: touches bytes only."""
        if piece.slot is not None and piece.slot.copied is not None:
            piece.slot.copied.synchronize()
        view = piece.direct if piece.direct is not None else memoryview(piece.stage.numpy())
        file = self._files.get()
        try:
            file.seek(piece.begin)
            done = seen = 0
            looks = self._finite and piece.spans[0].target.device.type == "cpu"
            size = LOOKED_BYTES if looks else CHUNK_BYTES
            while done < piece.size and not self._stopped:
                got = file.readinto(view[done : done + size])
                if not got:
                    raise FileError(f"{self._header.name} is cut off inside {piece.spans[-1].info.name}; download it again.")
                done += got
                if looks:
                    seen = self._look(piece, view, seen, done)
            if not self._reread and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), piece.begin, piece.size, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise FileError(f"{self._header.path} cannot be read ({error.strerror}); check the disk.") from None
        finally:
            self._files.put(file)

    def _look(self, piece: _Piece, view: memoryview, seen: int, done: int) -> int:
        """Raise FileError for NaN or infinity among the whole numbers of bytes [seen, done) of a piece; returns how far it looked."""
        for span in piece.spans:
            begin, end = max(span.at, seen), min(span.at + span.size, done)
            end -= (end - span.at) % span.info.dtype.itemsize
            if begin < end:
                if not numbers(view[begin:end], span.info.dtype):
                    raise _not_finite(self._header, span.info.name)
                seen = end
        return seen


def _not_finite(header: Header, name: str) -> FileError:
    return FileError(f"{header.name}: {name} holds NaN or infinity, wanted finite numbers; download the file again.")


def _unchanged(header: Header) -> None:
    """Offsets of a header are good for the file they were read from only."""
    try:
        stat = header.path.stat()
    except OSError as error:
        raise FileError(f"{header.path} cannot be read any more ({error.strerror}); put it back or choose another one.") from None
    if (stat.st_size, stat.st_mtime_ns) != (header.size, header.mtime_ns):
        raise FileError(f"{header.name} changed on disk since it was opened; load it again.")


def _pieces(header: Header, destinations: Mapping[str, torch.Tensor]) -> list[_Piece]:
    """What is to be read, in file order, as pieces of at most BUFFER_BYTES; tensors that follow each other share them."""
    pieces: list[_Piece] = []
    for info in sorted((header.tensors[name] for name in destinations), key=lambda info: info.begin):
        target = destinations[info.name]
        _check(header, info, target)
        direct = target.device.type == "cpu" and target.dtype == info.dtype
        offset, total = 0, info.end - info.begin
        while offset < total:
            room = 0 if direct or not pieces else _room(pieces[-1], info, offset, target)
            if room == 0:
                pieces.append(_Piece(info.begin + offset))
                room = BUFFER_BYTES
            piece, size = pieces[-1], min(room, total - offset)
            piece.spans.append(_Span(info, target, offset, piece.size, size))
            piece.size += size
            if direct:
                piece.direct = memoryview(target.view(-1).view(torch.uint8).numpy())[offset : offset + size]
            offset += size
    return pieces


def _check(header: Header, info: TensorInfo, target: torch.Tensor) -> None:
    if tuple(target.shape) != info.shape:
        raise FileError(f"{header.name}: {info.name} has shape {info.shape}, wanted {tuple(target.shape)}.")
    if not target.is_contiguous():
        raise ValueError(f"destination of {info.name} is not contiguous")


def _room(piece: _Piece, info: TensorInfo, offset: int, target: torch.Tensor) -> int:
    """Bytes of a tensor from `offset` on that may join `piece`: those right behind it, at a place its dtype can be read from."""
    follows = piece.direct is None and piece.begin + piece.size == info.begin + offset
    if not follows or piece.size % info.dtype.itemsize or piece.spans[0].target.device != target.device:
        return 0
    room = BUFFER_BYTES - piece.size
    return room - room % info.dtype.itemsize


def _copy(stage: torch.Tensor, span: _Span) -> None:
    """Elsewhere than on CUDA nothing tells when a copy is done, so it must be done on return: the buffer is reused."""
    values = stage[span.at : span.at + span.size].view(span.info.dtype)
    first = span.offset // span.info.dtype.itemsize
    part = span.target.view(-1)[first : first + values.numel()]
    cuda = part.device.type == "cuda"
    if part.dtype == values.dtype or part.device.type == "cpu":
        part.copy_(values, non_blocking=cuda)
    else:  # cross the bus in the stored dtype, convert on the device
        part.copy_(values.to(part.device, non_blocking=cuda))
