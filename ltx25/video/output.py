"""Frames on their way out: mapped to 0..1 on the device, copied to the host while the device goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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

    From CUDA they go through a few page-locked buffers on a stream of their own. light: what a frame (H, W, 3) in 0..1 on
    the device is turned into before it leaves; None: nothing.
    """

    def __init__(self, out: torch.Tensor, device: torch.device, light: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self._out = out
        self._device = device
        self._light = light
        self._poison = torch.zeros((), device=device)  # NaN once a value was not finite
        self._flying: deque[tuple[torch.cuda.Event, torch.Tensor, torch.Tensor]] = deque()
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            floats = max(_SLOT_BYTES // 4, out[0].numel())
            self._free = [torch.empty(floats, dtype=torch.float32, pin_memory=True) for _ in range(_SLOTS)]

    def put(self, part: Part) -> None:
        """Take over a part; -1..1 becomes 0..1, values beyond are clamped, and then what `light` makes of it."""
        self._poison += part.pixels.sum(dtype=torch.float32) * 0
        mapped = part.pixels.to(torch.float32, copy=True).mul_(0.5).add_(0.5).clamp_(0, 1).contiguous()
        if self._light is not None:
            for frame in mapped:  # one at a time: a curve takes several times the memory of what it bends
                frame.copy_(self._light(frame))
        frames, height, width, _ = mapped.shape
        target = self._out[part.first : part.first + frames, part.top : part.top + height, part.left : part.left + width]
        if self._device.type != "cuda":
            target.copy_(mapped)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        step = max(1, _SLOT_BYTES // (mapped[0].numel() * 4))
        for begin in range(0, frames, step):
            self._send(mapped[begin : begin + step], target[begin : begin + step])
        mapped.record_stream(self._stream)

    def finish(self) -> bool:
        """Wait for the last copies. False: some value that was put was NaN or infinite."""
        while self._flying:
            self._land()
        return bool(torch.isfinite(self._poison))

    def _send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if not self._free:
            self._land()
        slot = self._free.pop()
        with torch.cuda.stream(self._stream):
            slot[: source.numel()].copy_(source.view(-1), non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._flying.append((event, slot, target))

    def _land(self) -> None:
        event, slot, target = self._flying.popleft()
        wait(event)
        target.copy_(slot[: target.numel()].view(target.shape))
        self._free.append(slot)
