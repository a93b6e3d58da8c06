"""Host memory held against what is about to be made, and the clip that would fit.

Asked before anything is touched: a machine that swaps never says that it ran out, and an allocator says so without a way out.
"""

from __future__ import annotations

from collections.abc import Callable

from .errors import InputError
from .instrument.memory import host_free
from .instrument.units import bytes_text
from .shapes import Compression, VideoShape


def check_host_room(what: str, need: int, advice: Callable[[float], str]) -> None:
    """Raise InputError where the host has no `need` bytes for `what`. advice(free / need): the setting that would fit."""
    check_room(what, need, host_free(), advice)


def check_room(what: str, need: int, free: int | None, advice: Callable[[float], str]) -> None:
    """`check_host_room` against `free` bytes; None: the platform does not say, and nothing is refused."""
    if free is not None and need > free:
        raise InputError(f"{what} needs {bytes_text(need)} of host memory, and {bytes_text(free)} are free; {advice(free / need)}.")


def smaller_clip(clip: VideoShape, compression: Compression, batch: int, share: float, latents: bool) -> str:
    """What to set so that a batch needs `share` of its memory: fewer clips, else a shorter one, else a smaller frame.

    latents: the memory grows with latent frames, not with those of pixels.
    """
    clips, whole = int(batch * share), compression.latent_frames(clip.frames) if latents else clip.frames
    if clips:
        return f"use batch_size {clips}"
    alone = "batch_size 1 and " if batch > 1 else ""
    fitting = int(batch * share * whole)
    if fitting:
        frames = (fitting - 1) * compression.frames + 1 if latents else compression.snap(fitting)
        return f"use {alone}at most {frames} frame{'s' if frames > 1 else ''} at this size, or a smaller width and height"
    scale = (batch * share * whole) ** 0.5
    width, height = (max(1, int(side * scale / compression.side)) * compression.side for side in (clip.width, clip.height))
    return f"use {alone}a width and height of at most {width} x {height} px, and then 1 frame"
