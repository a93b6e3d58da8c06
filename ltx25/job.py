"""What an engine is asked for and what it answers: options, one clip to sample, the clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .conditions import Condition
from .connector import Conditioning
from .errors import InputError
from .guidance import Bins
from .predictor import Sampler


@dataclass(frozen=True)
class Options:
    """How an engine runs. precision: auto, bf16, fp8; residency: auto, resident, stream; legs: auto, batched, sequential;
    cache: memory, disk, off.
    """

    precision: str
    residency: str
    legs: str
    cache: str

    def check(self) -> Options:
        """Return self, or raise InputError for a choice that does not exist."""
        for name, choices in (
            ("precision", ("auto", "bf16", "fp8")),
            ("residency", ("auto", "resident", "stream")),
            ("legs", ("auto", "batched", "sequential")),
            ("cache", ("memory", "disk", "off")),
        ):
            got = getattr(self, name)
            if got not in choices:
                raise InputError(f"{name} '{got}' does not exist; choose {' or '.join(choices)}.")
        return self

    def batched(self, device: torch.device) -> bool:
        """Whether legs run side by side on a device, where memory allows."""
        return self.legs == "batched" or (self.legs == "auto" and device.type != "cpu")


@dataclass(frozen=True)
class SampleJob:
    """What to sample. Latents are grids (B, C, t, h, w) and (B, c, n, bins), one of them may be None; masks as the host's
    noise_mask, 1 = generate. schedule: the name the sigmas came from, None for the user's own. seed: item i uses seed + i.
    add_noise False: the latents are what a sampling left whose sigmas ended where these begin.
    """

    video: torch.Tensor | None
    audio: torch.Tensor | None
    video_mask: torch.Tensor | None
    audio_mask: torch.Tensor | None
    frame_rate: float
    seed: int
    positive: Conditioning
    negative: Conditioning | None
    video_guidance: Bins
    audio_guidance: Bins
    sigmas: tuple[float, ...]
    schedule: str | None
    sampler: str | Sampler
    eta: float
    conditions: tuple[Condition, ...]
    add_noise: bool


@dataclass(frozen=True)
class Sampled:
    """The clip: latent grids as in the job, float32 CPU. legs: of every group run; seconds: of each; notices: for the user.

    profiles: where the time of a traced step goes, in words; empty without `profile`.
    keyframes: generated keyframes (B, C, count, h, w), each a clip of one frame; None where none were asked for.
    """

    video: torch.Tensor | None
    audio: torch.Tensor | None
    keyframes: torch.Tensor | None
    legs: tuple[tuple[str, ...], ...]
    seconds: tuple[float, ...]
    notices: tuple[str, ...]
    profiles: tuple[str, ...]

    @property
    def forwards(self) -> int:
        return sum(len(group) for group in self.legs)
