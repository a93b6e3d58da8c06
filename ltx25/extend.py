"""A clip made longer: the given part kept, the rest still empty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .conditions import Condition, Frozen, TemporalRegions, from_start
from .errors import InputError
from .latents import audio_positions, mask_tokens, video_positions
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
    whole = _shape(video).pixels(compression).frames + frames
    made = Longer(
        _longer(video, compression.latent_frames(whole)),
        None,
        _mask(video, video_mask, compression.latent_frames(whole), compression),
        None,
    )
    if audio is None:
        return made
    wanted = max(AudioLatentShape.of_clip(whole, frame_rate).frames, audio.shape[2])
    return made._replace(audio=_longer(audio, wanted), audio_mask=_mask(audio, audio_mask, wanted, compression))


class Settled(NamedTuple):
    """Conditions, and the noise masks of both streams; a mask is None where there is none."""

    conditions: tuple[Condition, ...]
    video_mask: torch.Tensor | None
    audio_mask: torch.Tensor | None


def settled(
    conditions: Sequence[Condition],
    video: torch.Tensor,
    audio: torch.Tensor | None,
    video_mask: torch.Tensor | None,
    audio_mask: torch.Tensor | None,
    frames: int,
    frame_rate: float,
    compression: Compression,
) -> Settled:
    """What keeps a stream, whole or outside of stretches, as masks of the clip as it is now, for a clip that grows.

    Kept as conditions they would keep the part that is added, too, which is empty. What stands at a frame from the end of the
    clip of `frames` pixel frames stays there: the end of the longer one is another. Grids and masks as in `extend`.
    """
    masks = {"video": video_mask, "audio": audio_mask}
    grids = {"video": video} if audio is None else {"video": video, "audio": audio}
    for name, grid in grids.items():
        items = [item for item in conditions if item.stream == name]
        if any(isinstance(item, Frozen) for item in items):
            masks[name] = torch.zeros(1, 1, *grid.shape[2:])
        windows = [window for item in items if isinstance(item, TemporalRegions) for window in item.windows]
        if windows:
            shape = _shape(grid)
            positions = video_positions(shape, compression, frame_rate) if name == "video" else audio_positions(shape)
            made = _by_token(grid, TemporalRegions(name, tuple(windows)).touched(positions).float())
            masks[name] = made if masks[name] is None else made * _fitting(grid, masks[name], compression)
    rest = tuple(from_start(item, frames) for item in conditions if not isinstance(item, (Frozen, TemporalRegions)))
    return Settled(rest, masks["video"], masks["audio"])


def _longer(grid: torch.Tensor, wanted: int) -> torch.Tensor:
    more = grid.new_zeros(*grid.shape[:2], wanted - grid.shape[2], *grid.shape[3:])
    return torch.cat([grid, more], 2)


def _mask(grid: torch.Tensor, mask: torch.Tensor | None, wanted: int, compression: Compression) -> torch.Tensor:
    """(1, 1, frames, ...) float32: old frames kept, or as their own mask says; new ones made."""
    size = grid.shape[2:]
    old = torch.zeros(1, 1, *size) if mask is None else _fitting(grid, mask, compression)
    return torch.cat([old, torch.ones(1, 1, wanted - size[0], *size[1:])], 2)


def _fitting(grid: torch.Tensor, mask: torch.Tensor, compression: Compression) -> torch.Tensor:
    """A noise mask as (1, 1, frames, ...) float32 of the grid's size, as the sampler reads it."""
    return _by_token(grid, mask_tokens(mask, _shape(grid), compression))


def _by_token(grid: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values per token (T,) as (1, 1, frames, ...) of the grid's size: a token of sound is a whole latent frame."""
    return values.reshape(1, 1, *grid.shape[2:] if grid.ndim == 5 else (-1, 1)).expand(1, 1, *grid.shape[2:])


def _shape(grid: torch.Tensor) -> VideoLatentShape | AudioLatentShape:
    return (VideoLatentShape if grid.ndim == 5 else AudioLatentShape)(*grid.shape[1:])
