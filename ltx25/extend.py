"""A clip made longer: the given part kept, the rest still empty."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .errors import InputError
from .shapes import AudioLatentShape, Compression, VideoLatentShape


class Longer(NamedTuple):
    """Grids as before with zeros behind, and noise masks (1 = generate) that keep what was there. audio: None where there is none."""

    video: torch.Tensor
    audio: torch.Tensor | None
    video_mask: torch.Tensor
    audio_mask: torch.Tensor | None


def extend(
    video: torch.Tensor,
    audio: torch.Tensor | None,
    video_mask: torch.Tensor | None,
    audio_mask: torch.Tensor | None,
    frames: int,
    frame_rate: float,
    compression: Compression,
) -> Longer:
    """A clip (B, C, t, h, w) with sound (B, c, n, bins) and `frames` more pixel frames at its end.

    The sound grows to the length that a clip of all frames has, round(F / frame_rate * 25), so both stay on one clock. Masks
    that were there still hold in the old part. Raises InputError unless `frames` is a positive multiple of a latent frame.
    """
    if frames < compression.frames or frames % compression.frames:
        raise InputError(f"{frames} frames cannot be added, wanted a multiple of {compression.frames} from {compression.frames} on.")
    shape = VideoLatentShape(*video.shape[1:])
    whole = shape.pixels(compression).frames + frames
    made = Longer(
        _longer(video, compression.latent_frames(whole)),
        None,
        _mask(video, video_mask, compression.latent_frames(whole)),
        None,
    )
    if audio is None:
        return made
    wanted = max(AudioLatentShape.of_clip(whole, frame_rate).frames, audio.shape[2])
    return made._replace(audio=_longer(audio, wanted), audio_mask=_mask(audio, audio_mask, wanted))


def _longer(grid: torch.Tensor, wanted: int) -> torch.Tensor:
    more = grid.new_zeros(*grid.shape[:2], wanted - grid.shape[2], *grid.shape[3:])
    return torch.cat([grid, more], 2)


def _mask(grid: torch.Tensor, mask: torch.Tensor | None, wanted: int) -> torch.Tensor:
    """(1, 1, frames, ...) float32: old frames kept, or as their own mask says; new ones made."""
    size = grid.shape[2:]
    old = torch.zeros(1, 1, *size) if mask is None else mask.float()[:1].amax(1, keepdim=True)
    if tuple(old.shape[2:]) != tuple(size):
        if any(had not in (1, want) for had, want in zip(old.shape[2:], size, strict=True)):
            raise InputError(f"the noise_mask {tuple(old.shape)} does not fit the latent {tuple(grid.shape)}; extend first and set the mask after.")
        old = old.expand(1, 1, *size)
    return torch.cat([old, torch.ones(1, 1, wanted - size[0], *size[1:])], 2)
