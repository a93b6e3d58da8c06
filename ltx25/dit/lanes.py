"""The audio stream beside the video stream: two CUDA streams that meet once a block.

A few dozen audio tokens do not fill a device, thousands of video tokens do, so the audio's many small launches cost
nothing where they run meanwhile. Off CUDA, and where one of them is missing, everything stays on the current stream.

Memory: what is allocated in the audio lane returns to that lane, what is allocated outside to the current stream. A tensor
that crosses is held until the lanes have met again: only then has its reader passed.
"""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager

import torch


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The audio lane of a device, the same for every model: cuBLAS keeps 32 MiB for each stream it ever ran on."""
    return torch.cuda.Stream(device)


class Lanes:
    """`side` None: one lane."""

    def __init__(self, side: torch.cuda.Stream | None) -> None:
        self._side = side
        self._held: tuple[object, ...] = ()

    def audio(self) -> AbstractContextManager[object]:
        """Inside, work goes to the audio lane."""
        return contextlib.nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def follow(self) -> None:
        """The audio lane goes on after what the current stream holds so far."""
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())

    def meet(self, *crossing: object) -> None:
        """Both lanes go on after what either holds so far. `crossing`: whatever is made in one and read in the other."""
        if self._side is None:
            return
        current = torch.cuda.current_stream()
        current.wait_stream(self._side)
        self._side.wait_stream(current)
        self._held = crossing

    def join(self) -> None:
        """The current stream goes on after the audio lane, which ends here."""
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        self._held = ()
