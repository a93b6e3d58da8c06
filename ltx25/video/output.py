"""Frames on their way out: mapped to 0..1 on the device, and copied to the host while the device goes on.

Memory that the host has never touched takes it longer to fill than the device to send, so a thread does it: the one that
queues the device's work never waits for it, but for the part before the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from .pace import wait

_SLOT_BYTES = 32 << 20  # page-locked host memory of one copy in flight, or one frame where that is more
_SLOTS = 3


@dataclass(frozen=True)
class Part:
    """Finished pixels (f, H, W, 3) in about -1..1, not clamped, at (first frame, top px, left px) of the clip."""

    first: int
    top: int
    left: int
    pixels: torch.Tensor


class FrameOutput:
    """Fills `out` (F, H, W, 3) float32 on the CPU with the parts that a device finishes; every value is written once.

    From CUDA they go through a few page-locked buffers on a stream and a thread of their own. light: what a frame (H, W, 3)
    in 0..1 on the device is turned into before it leaves; None: nothing. Use as a context manager.
    """

    def __init__(self, out: torch.Tensor, device: torch.device, light: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self._out = out
        self._device = device
        self._light = light
        self._poison = torch.zeros((), device=device)  # NaN once a value was not finite
        self._bringing: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        if device.type == "cuda":
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ltx25-frames")
            self._stream = torch.cuda.Stream(device)
            floats = _slot_bytes(*out.shape[1:3]) // 4
            self._slots = [torch.empty(floats, dtype=torch.float32, pin_memory=True) for _ in range(_SLOTS)]

    def __enter__(self) -> FrameOutput:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def put(self, part: Part) -> None:
        """Take over a part; -1..1 becomes 0..1, values beyond are clamped, and then what `light` makes of it.

        Waits until the part before it is out.
        """
        self._poison += part.pixels.sum(dtype=torch.float32) * 0
        frames, height, width, _ = part.pixels.shape
        target = self._out[part.first : part.first + frames, part.top : part.top + height, part.left : part.left + width]
        if self._thread is None:
            target.copy_(self._mapped(part.pixels))
            return
        made = torch.cuda.Event()
        made.record()
        part.pixels.record_stream(self._stream)
        self._land()
        self._bringing = self._thread.submit(self._bring, part.pixels, target, made)

    def finish(self) -> bool:
        """Wait for the last copies. False: some value that was put was NaN or infinite."""
        self._land()
        return bool(torch.isfinite(self._poison))

    def _land(self) -> None:
        bringing, self._bringing = self._bringing, None
        if bringing is not None:
            bringing.result()

    @torch.inference_mode()
    def _bring(self, pixels: torch.Tensor, target: torch.Tensor, made: torch.cuda.Event) -> None:
        """In the thread: some frames at a time into a buffer, and from there out, while the next ones come."""
        free, flying = deque(self._slots), deque()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            made.wait()
            for source, place in zip(*(frames.split(max(1, _SLOT_BYTES // (pixels[0].numel() * 4))) for frames in (pixels, target)), strict=True):
                if not free:
                    free.append(_landed(*flying.popleft()))
                slot = free.popleft()
                slot[: source.numel()].copy_(self._mapped(source).view(-1), non_blocking=True)
                sent = torch.cuda.Event()
                sent.record()
                flying.append((sent, slot, place))
            while flying:
                _landed(*flying.popleft())

    def _mapped(self, pixels: torch.Tensor) -> torch.Tensor:
        """(f, H, W, 3) in about -1..1 -> a copy in 0..1 or light, float32 and contiguous."""
        mapped = pixels.to(torch.float32, copy=True).mul_(0.5).add_(0.5).clamp_(0, 1).contiguous()
        if self._light is not None:
            for frame in mapped:  # one at a time: a curve takes several times the memory of what it bends
                frame.copy_(self._light(frame))
        return mapped


def copying_bytes(height: int, width: int) -> int:
    """Page-locked host memory that frames of this size, px, leave a CUDA device through."""
    return _SLOTS * _slot_bytes(height, width)


def _slot_bytes(height: int, width: int) -> int:
    return max(_SLOT_BYTES, height * width * 3 * 4)


def _landed(sent: torch.cuda.Event, slot: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Copy what came into a buffer to where it belongs; the buffer, free again."""
    wait(sent)
    place.copy_(slot[: place.numel()].view(place.shape))
    return slot
