"""Two stages: a clip made small, enlarged by a latent upscaler and refined at its own size.

    small = first_size(clip, upscaler, compression)      # what stage 1 makes
    first = engine.sample(job_of_small, watch)
    large = engine.upscale(first.video, file, watch)
    clip = engine.sample(refinement(job_of_small, large, first.audio, conditions), watch)

Source: ltx_pipelines.distilled, ti2vid_two_stages and ti2vid_two_stages_hq.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .conditions import Condition
from .config.upscaler import UpscalerConfig
from .errors import InputError
from .guidance import OFF, Bins
from .job import SampleJob
from .predictor import Sampler
from .request import Request
from .schedule import STAGE_2, STEPS, sigmas_of
from .shapes import MAX_SIDE, Compression, VideoShape


def first_size(clip: VideoShape, upscaler: UpscalerConfig, compression: Compression) -> VideoShape:
    """The clip whose latent the upscaler enlarges to that of `clip`, exactly.

    Raises InputError for an upscaler that does not enlarge the picture alone, and for sides that are no such multiple, with the nearest that are.
    """
    if upscaler.space <= 1 or upscaler.time != 1:
        raise InputError("the upscaler of two stages has to enlarge the picture and leave the number of frames; use the published spatial upscaler.")
    step, wrong = compression.side * upscaler.space.numerator, []
    for name in ("width", "height"):
        got = getattr(clip, name)
        if got % step:
            below = got // step * step
            nearest = [side for side in (below, below + step) if 0 < side <= MAX_SIDE]
            wrong.append(f"{name} {got} px is not a multiple of {step} (use {' or '.join(map(str, nearest))})")
    if wrong:
        raise InputError(f"a clip in two stages is made at 1/{float(upscaler.space):g} of its size first, on a grid of {compression.side} px: {'; '.join(wrong)}.")
    return VideoShape(clip.frames, int(clip.height / upscaler.space), int(clip.width / upscaler.space))


def first_request(request: Request, upscaler: UpscalerConfig) -> Request:
    """What the first of two stages is asked for, so that the clip of `request` comes out. Raises InputError as first_size, and for
    noise levels that do not end in 0: an upscaler knows finished clips alone."""
    last = request.noise_levels()[0][-1]
    if last > 0:
        raise InputError(f"the first of two stages has to be sampled to the end, and its noise levels end at {last:g}; end sigmas with 0.")
    small = first_size(request.video, upscaler, request.compression)
    return replace(request, width=small.width, height=small.height)


def refining_sampler(first: str | Sampler) -> str:
    """Of stage 2, by that of stage 1: the official HQ pipeline has res_2s in both stages, all others refine by Euler."""
    return "res_2s" if first == "res_2s" else "auto"


def refinement(first: SampleJob, video: torch.Tensor, audio: torch.Tensor | None, conditions: tuple[Condition, ...] = ()) -> SampleJob:
    """Stage 2 of what stage 1 made: `video` (B, C, t, h, w) enlarged, `audio` (B, c, n, bins) as it was.

    Three steps from sigma 0.909375 on, so that both streams are noised that far and no further, without guidance. Its noise is
    that of the next seed: officially one generator goes on drawing. conditions: anew, encoded at the size of `video`.
    """
    return replace(
        first,
        video=video,
        audio=audio,
        video_mask=None,
        audio_mask=None,
        seed=first.seed + 1,
        negative=None,
        video_guidance=Bins.constant(OFF),
        audio_guidance=Bins.constant(OFF),
        sigmas=sigmas_of(STAGE_2, STEPS),
        schedule=STAGE_2,
        sampler=refining_sampler(first.sampler),
        conditions=conditions,
        add_noise=True,
    )
