"""Lengths and stretches of time as users write them, and sound fitted to a clip."""

from __future__ import annotations

import math
import re

import torch

from .errors import InputError
from .shapes import MEL_RATE, AudioLatentShape, check_frame_rate

_STRETCH = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*-\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:s\s*)?")


def parse_stretches(text: str) -> tuple[tuple[float, float], ...]:
    """"1-2.5, 4-5" -> ((1.0, 2.5), (4.0, 5.0)) in s. Raises InputError for anything else, and for an empty stretch."""
    found = []
    for part in text.split(","):
        match = _STRETCH.fullmatch(part)
        if match is None:
            raise InputError(f"'{text}' is no list of seconds; write stretches like 1.5-2, 4-5.")
        start, end = float(match[1]), float(match[2])
        if start >= end:
            raise InputError(f"the stretch {part.strip()} is empty; the end must be after the start.")
        found.append((start, end))
    return tuple(found)


def parse_frames(text: str) -> tuple[int, ...]:
    """"40, 8" -> (8, 40): rising, each once, as officially. Raises InputError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise InputError(f"'{text}' is no list of frames; write numbers with commas between, such as 24, 48.")
    return tuple(sorted({int(part) for part in parts}))


def fit_wave(wave: torch.Tensor, rate: int, frames: int, frame_rate: float) -> torch.Tensor:
    """Sound (B, channels, N) at `rate` Hz cut, or padded with silence, to the length of `frames` video frames.

    To the nearest sample, as officially, but at rates so low that half a sample is more than the encoder makes up for, never
    to less than the clip: at 10 Hz that would be a latent frame too few.
    """
    samples = frames / check_frame_rate(frame_rate) * rate
    wanted = max(1, math.ceil(samples) if 2 * rate < MEL_RATE else round(samples))
    if wave.shape[-1] >= wanted:
        return wave[..., :wanted]
    return torch.nn.functional.pad(wave, (0, wanted - wave.shape[-1]))


def fit_latent(latent: torch.Tensor, frames: int, frame_rate: float) -> torch.Tensor:
    """An audio latent (B, c, n, bins) of sound fitted by `fit_wave`, cut to the frames a clip of that length has.

    The encoder rounds its last frame up, a clip rounds to the nearest; it never makes fewer. (The official
    audio-to-video pipeline cuts the same way.)
    """
    wanted = AudioLatentShape.of_clip(frames, frame_rate).frames
    assert latent.shape[2] >= wanted
    return latent[:, :, :wanted].contiguous()
