"""What an engine is asked for and what it answers: options, one clip to sample, the clip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from .conditions import Condition
from .connector import Conditioning
from .dit.modality import Contexts
from .errors import InputError
from .guidance import Bins
from .latents import Draft
from .plausible import doubts
from .predictor import Denoise, Sampler


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


@dataclass(frozen=True)
class SampleJob:
    """What to sample. Latents are grids (B, C, t, h, w) and (B, c, n, bins), one of them may be None; masks as the host's
    noise_mask, 1 = generate. schedule: the name the sigmas came from, None for the user's own. seed: item i uses seed + i.
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


@dataclass(frozen=True)
class Prepared:
    """A checked job: drafts by stream, the denoise with contexts still on the CPU, what to tell the user."""

    drafts: dict[str, Draft]
    job: Denoise
    notices: tuple[str, ...]

    def doubts(self, video: torch.Tensor | None) -> tuple[str, ...]:
        """About a result that was made whole: from noise to the end, nothing of it given."""
        draft, sigmas = self.drafts.get("video"), self.job.sigmas
        whole = draft is not None and not draft.frozen and sigmas[-1] == 0 and bool((draft.mask[: draft.shape.tokens] == 1).all())
        return doubts(video) if whole and video is not None else ()

    def on(self, device: torch.device, dtype: torch.dtype, batched: bool) -> Denoise:
        job = self.job

        def move(contexts: Contexts | None) -> Contexts | None:
            if contexts is None:
                return None
            return Contexts(*(None if c is None else c.to(device, dtype) for c in (contexts.video, contexts.audio)))

        return replace(job, positive=move(job.positive), negative=move(job.negative), batched=batched)


def contexts_of(conditioning: Conditioning, drafts: Mapping[str, Draft]) -> Contexts:
    return Contexts(conditioning.video if "video" in drafts else None, conditioning.audio if "audio" in drafts else None)
