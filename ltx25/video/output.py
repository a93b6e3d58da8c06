"""Frames on their way out: mapped to 0..1 on the device, copied to the host while the device goes on."""

from __future__ import annotations

from collections import deque

import torch

from .pace import wait

_SLOT_BYTES = 32 << 20  # page-locked host memory of one copy in flight
_SLOTS = 3


class FrameOutput:
    """Fills `out` (F, H, W, 3) float32 on the CPU with frames that a device finishes in any order of whole stretches.

    From CUDA the frames go through a few page-locked buffers on a stream of their own; `out` itself is written once.
    """

    def __init__(self, out: torch.Tensor, device: torch.device) -> None:
        self._out = out
        self._device = device
        self._poison = torch.zeros((), device=device)  # NaN once a value was not finite
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._free = [torch.empty(_SLOT_BYTES // 4, dtype=torch.float32, pin_memory=True) for _ in range(_SLOTS)]
            self._flying: deque[tuple[torch.cuda.Event, torch.Tensor, torch.Tensor]] = deque()

    def put(self, first: int, frames: torch.Tensor) -> None:
        """Frames (f, H, W, 3) in -1..1 for out[first:first + f]; values beyond the range are clamped."""
        self._poison += frames.sum(dtype=torch.float32) * 0
        mapped = frames.to(torch.float32).mul(0.5).add_(0.5).clamp_(0, 1)
        target = self._out[first : first + frames.shape[0]]
        if self._device.type != "cuda":
            target.copy_(mapped)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        source, target = mapped.view(-1), target.view(-1)
        for begin in range(0, source.numel(), _SLOT_BYTES // 4):
            piece = source[begin : begin + _SLOT_BYTES // 4]
            if not self._free:
                self._land()
            slot = self._free.pop()
            with torch.cuda.stream(self._stream):
                slot[: piece.numel()].copy_(piece, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            self._flying.append((event, slot, target[begin : begin + piece.numel()]))
        mapped.record_stream(self._stream)

    def finish(self) -> bool:
        """Wait for the last copies. False: some value that was put was NaN or infinite."""
        if self._device.type == "cuda":
            while self._flying:
                self._land()
        return bool(torch.isfinite(self._poison))

    def _land(self) -> None:
        event, slot, target = self._flying.popleft()
        wait(event)
        target.copy_(slot[: target.numel()])
        self._free.append(slot)
