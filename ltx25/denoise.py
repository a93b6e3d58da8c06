"""From latents to denoised latents: drafts, noise, the loop, and the way back to grids."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch

from .conditions import Condition, apply
from .dit.kept_text import KeptTexts
from .dit.modality import Contexts
from .errors import InputError
from .guidance import Bins
from .instrument import Phase
from .latents import STEP_SEED, SUBSTEP_SEED, Draft, Noise, audio_draft, video_draft
from .predictor import Denoise, Sampler, StreamState, Tokens, Transformer
from .sampler import Outcome, denoise
from .shapes import Compression
from .steps import standardise


class Sampled(NamedTuple):
    """video (B, C, t, h, w), audio (B, c, n, bins), keyframes (B, C, count, h, w): float32 CPU, None where there is none."""

    video: torch.Tensor | None
    audio: torch.Tensor | None
    keyframes: torch.Tensor | None
    outcome: Outcome


class ModelShape(NamedTuple):
    """What latents must fit: video channels, audio channels and bins (channels * bins is the model's audio width in)."""

    video_channels: int
    audio_channels: int
    audio_bins: int


def drafts_of(
    video: torch.Tensor | None,
    audio: torch.Tensor | None,
    model: ModelShape,
    frame_rate: float,
    compression: Compression,
    video_mask: torch.Tensor | None = None,
    audio_mask: torch.Tensor | None = None,
    conditions: Sequence[Condition] = (),
) -> dict[str, Draft]:
    """The streams of a clip, by name. `conditions` are applied in order, after the noise masks (1 = generate).

    Raises InputError for latents, masks or conditions that do not fit. Inputs are never written to.
    """
    drafts: dict[str, Draft] = {}
    if video is not None:
        drafts["video"] = video_draft(video, frame_rate, compression, model.video_channels, video_mask)
    if audio is not None:
        drafts["audio"] = audio_draft(audio, model.audio_channels, model.audio_bins, audio_mask)
    if not drafts:
        raise InputError("there is neither a video nor an audio latent to sample; connect EmptyLTX25Latent.")
    if len({draft.latent.shape[0] for draft in drafts.values()}) > 1:
        raise InputError(f"the video latent has {video.shape[0]} items and the audio latent {audio.shape[0]}; make both batches equal.")
    return apply(conditions, drafts)


def job_of(
    drafts: Mapping[str, Draft],
    positive: Contexts,
    negative: Contexts | None,
    guidance: Mapping[str, Bins],
    sigmas: tuple[float, ...],
    sampler: Sampler,
    blocks: int,
    batched: bool,
) -> Denoise:
    """The denoise of `drafts`; its `forwards` is the total of the sample phase. Check it with sampler.check_job."""
    states = {name: StreamState(draft.clean, draft.stream(), draft.shape) for name, draft in drafts.items()}
    return Denoise(states, positive, negative, {name: guidance[name] for name in drafts}, sigmas, sampler, blocks, batched)


def run(
    dit: Transformer,
    job: Denoise,
    drafts: Mapping[str, Draft],
    seed: int,
    phase: Phase,
    device: torch.device,
    dtype: torch.dtype,
    prediction: str = "",
    known: dict[Hashable, float] | None = None,
    texts: KeptTexts | None = None,
    traced: Collection[int] = (),
    add_noise: bool = True,
) -> Sampled:
    """Noise the drafts to the first sigma and denoise them. Item i of a batch uses seed + i. See sampler.denoise.

    Sigmas that do not end in 0 leave their noise, as the host's samplers do: x / (1 - sigma). add_noise False goes on from such.
    A frozen stream starts from its latent. (The official retake noises it and lets it drift back; audio-to-video does not.)
    """
    noise = Noise(seed, drafts, device).draw()
    x: Tokens = {}
    for name, draft in drafts.items():
        on_device = draft.to(device)
        start = on_device.noised if add_noise else on_device.going_on
        x[name] = start(noise[name], 0.0 if draft.frozen else job.sigmas[0])
    sources = {"step": Noise(seed, drafts, device, STEP_SEED), "substep": Noise(seed, drafts, device, SUBSTEP_SEED)}

    def draw(use: str) -> Tokens:
        drawn = sources[use].draw()
        return {name: standardise(tokens) for name, tokens in drawn.items()} if job.sampler.standard_noise else drawn

    outcome = denoise(dit, job, x, draw, phase, device, dtype, prediction, known, texts, traced)
    on_host = {name: tokens.cpu() for name, tokens in outcome.tokens.items()}
    if job.sampler.unscaled and job.sigmas[-1] > 0:
        on_host = {name: tokens if drafts[name].frozen else drafts[name].left(tokens, job.sigmas[-1]) for name, tokens in on_host.items()}
    video = drafts.get("video")
    return Sampled(
        video=None if video is None else video.grid(on_host["video"]),
        audio=drafts["audio"].grid(on_host["audio"]) if "audio" in drafts else None,
        keyframes=None if video is None else video.keyframes(on_host["video"]),
        outcome=outcome,
    )
