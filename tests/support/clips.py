"""Streams of a plain text-to-video clip, positions written out from their definition and not taken from the engine."""

from __future__ import annotations

import torch

from ...ltx25.dit import Stream


def clip_streams(grid: tuple[int, int, int], audio_tokens: int, frame_rate: float) -> tuple[Stream, Stream]:
    """Latent grid (t, h, w) of 8-frame, 32 px cells, and 25 audio latent frames a second: everything is generated."""
    video, audio = clip_positions(grid, audio_tokens, frame_rate)
    tokens = video.shape[1]
    marked = torch.arange(tokens) < grid[1] * grid[2]
    return Stream(video, torch.ones(tokens), marked, False, None), Stream(audio, torch.ones(audio_tokens), None, False, None)


def clip_positions(grid: tuple[int, int, int], audio_tokens: int, frame_rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[start, end): (3, t*h*w, 2) in s, px, px and (1, n, 2) in s."""
    t, h, w = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
    video = torch.stack(
        [
            torch.stack([(8 * t - 7).clamp(min=0) / frame_rate, (8 * t + 1) / frame_rate], -1),
            torch.stack([32.0 * h, 32.0 * h + 32], -1),
            torch.stack([32.0 * w, 32.0 * w + 32], -1),
        ]
    ).flatten(1, 3)
    i = torch.arange(audio_tokens)
    return video, torch.stack([(4 * i - 3).clamp(min=0) * 160 / 16000, (4 * i + 1) * 160 / 16000], -1)[None]
