"""LTX25Guider: texts and scales -> how each step is guided. Its value is a GUIDER of the host and the plan of our sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from comfy_api.latest import io

from ..ltx25.conditions import HeldTo
from ..ltx25.engine import Engine, SampleJob
from ..ltx25.errors import InputError
from ..ltx25.guidance import Bins, Guidance, TextRule, check_negative, parse_stg_blocks
from ..ltx25.guidance_text import by_sigma
from ..ltx25.instrument import Watch
from ..ltx25.shapes import LATENTS_PER_SECOND, AudioLatentShape
from .bridge import FRAME_RATE, Entry, Latents, conditioning_in, contexts, join, split
from .load import EngineType
from .native import NativeSampler
from .patcher import PartPatcher
from .registry import EngineHandle
from .run import node_run


@dataclass(frozen=True)
class EngineGuider:
    """What SamplerCustomAdvanced needs of a guider (`model_patcher`, `sample`), and what our sampler reads."""

    handle: EngineHandle
    positive: Entry
    negative: Entry | None
    video: Bins
    audio: Bins

    @property
    def model_patcher(self) -> PartPatcher:
        return self.handle.patcher

    def job(
        self, parts: Latents, frame_rate: float, seed: int, sigmas: tuple[float, ...], schedule: str | None, sampler: Any, eta: float, watch: Watch, add_noise: bool = True
    ) -> SampleJob:
        """What the engine samples. frame_rate 0: the latent's own, else the conditioning's, else 24. What the clip was held to before
        (HeldTo) is of a sampling that goes on, not of one that adds its noise to the clip as it is.
        """
        engine = self.handle.engine
        conditions = tuple(item for item in parts.conditions if not (add_noise and isinstance(item, HeldTo)))
        return SampleJob(
            video=parts.video,
            audio=parts.audio,
            video_mask=_over_padding(parts, engine),
            audio_mask=parts.audio_mask,
            frame_rate=frame_rate or parts.frame_rate or self.positive.frame_rate or FRAME_RATE,
            seed=seed,
            positive=contexts(self.positive, engine, watch),
            negative=None if self.negative is None else contexts(self.negative, engine, watch),
            video_guidance=self.video,
            audio_guidance=self.audio,
            sigmas=sigmas,
            schedule=schedule,
            sampler=sampler,
            eta=eta,
            conditions=conditions,
            add_noise=add_noise,
        )

    def sample(self, noise, latent_image, sampler, sigmas, denoise_mask=None, callback=None, disable_pbar=False, seed=None) -> Any:
        """SamplerCustomAdvanced's call: LATENT samples in and out."""
        if len(sigmas) < 2:
            return latent_image
        parts = split({"samples": latent_image, "noise_mask": denoise_mask})
        with node_run(self.handle.engine, bar="sample") as run:

            def step_done(x0: Any, x: Any) -> None:
                done, total = run.sink.progress  # the host's own bar counts what ours does, not steps
                if callback is not None:
                    callback(done - 1, x0, x, total)

            native = NativeSampler(sampler, noise, latent_image, sigmas, seed, step_done)
            levels = tuple(float(sigma) for sigma in sigmas)
            job = self.job(parts, 0.0, seed or 0, levels, None, native, 0.0, run.watch)
            sampled = self.handle.engine.sample(job, run.watch)
            run.tell((*sampled.notices, *clock_notices(self.handle.engine, parts, job.frame_rate)))
        return join(sampled.video, sampled.audio)


def _over_padding(parts: Latents, engine: Engine) -> torch.Tensor | None:
    """The video's mask. One of every frame that was asked for, (N, 1, H, W), says nothing of the padding: that is made."""
    mask = parts.video_mask
    if mask is None or mask.ndim != 4 or len(mask) == 1 or len(mask) != parts.clip_frames:
        return mask
    padding = max(0, engine.video_shape(parts.video).frames - len(mask))  # a clip that was cut is refused as with any mask
    return torch.cat([mask, mask.new_ones(padding, *mask.shape[1:])])


def apart_by(engine: Engine, parts: Latents, rate: float) -> str:
    """In words, how far picture and sound of the latent are apart at `rate` frames a second; nothing where each is as long as the
    other, to a latent frame of sound.
    """
    if parts.video is None or parts.audio is None:
        return ""
    frames, sound = engine.video_shape(parts.video).frames, parts.audio.shape[2]
    if abs(AudioLatentShape.of_clip(frames, rate).frames - sound) <= 1:
        return ""
    return f"the sound of the latent is {sound / LATENTS_PER_SECOND:.2f} s long, and its {frames} frames at {rate:g} a second are {frames / rate:.2f} s"


def clock_notices(engine: Engine, parts: Latents, rate: float) -> list[str]:
    """What to tell of a latent that has no frame rate of its own and is sampled at `rate`."""
    apart = "" if parts.frame_rate else apart_by(engine, parts, rate)
    return [f"{apart[0].upper()}{apart[1:]}: is another frame_rate meant?"] if apart else []


def own_guider(guider: Any) -> EngineGuider:
    """Return it; raises InputError for the guider of another model."""
    if not isinstance(guider, EngineGuider):
        raise InputError(
            f"The guider is {type(guider).__name__}, which belongs to another model; connect LTX-2.5 Guider here, or use "
            "SamplerCustomAdvanced with this one."
        )
    return guider


class LTX25Guider(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LTX25Guider",
            display_name="LTX-2.5 Guider",
            category="LTX-2.5",
            description="CFG, STG, modality guidance and rescale, separately for video and audio.",
            search_aliases=["CFG guider", "dual CFG", "STG", "spatio temporal guidance", "modality guidance", "LTXV guider"],
            inputs=[
                EngineType.Input("engine", tooltip="From Load LTX-2.5 Checkpoint."),
                io.Conditioning.Input("positive", tooltip="The prompt, from Encode Gemma Text."),
                io.Conditioning.Input(
                    "negative",
                    optional=True,
                    tooltip="What to steer away from. Needed when video_cfg or audio_cfg is not 1; has no effect when both are 1.",
                ),
                *_scales("video", cfg=3.0),
                *_scales("audio", cfg=7.0),
                io.String.Input(
                    "stg_blocks",
                    default="28",
                    tooltip="Blocks whose self-attention is switched off for the STG forward, counted from 0, with commas: 28 or 0,28. "
                    "Empty: none.",
                ),
                io.Int.Input(
                    "skip_step",
                    default=0,
                    min=0,
                    max=1000,
                    tooltip="0: the model runs on every step. n: only on every (n + 1)th; the steps between use its last prediction "
                    "again, faster and coarser.",
                ),
                io.Combo.Input(
                    "rule",
                    optional=True,
                    options=[rule.value for rule in TextRule],
                    default=TextRule.CFG.value,
                    tooltip="How the negative prompt pulls. cfg: plainly, as the official pipelines do. cfg_star: the negative is scaled to "
                    "the positive first. apg: less of what only makes the picture stronger (apg_eta), and never more than apg_norm.",
                ),
                io.Float.Input("apg_eta", optional=True, default=1.0, min=-10.0, max=10.0, step=0.05, tooltip="apg: the share that is kept of the pull along the prediction itself. 1: all, 0: none."),
                io.Float.Input("apg_norm", optional=True, default=0.0, min=0.0, max=100000.0, step=1.0, tooltip="apg: the longest pull. 0: no limit."),
                io.Float.Input("guidance_start", optional=True, default=1.0, min=0.0, max=1.0, step=0.01, tooltip="Guidance begins at this noise level: 1 from the first step on."),
                io.Float.Input("guidance_end", optional=True, default=0.0, min=0.0, max=1.0, step=0.01, tooltip="Guidance ends at this noise level; below it one forward per step is enough. 0: never."),
                io.String.Input(
                    "bins",
                    optional=True,
                    default="",
                    tooltip="Other values below a noise level: '0.9: video_cfg=2; 0.5: video_cfg=1, video_stg=0' means video_cfg 2 from 0.9 down, "
                    "and so on. Names as above. Empty: the same at every step.",
                ),
            ],
            outputs=[io.Guider.Output("guider", tooltip="For LTX-2.5 Sampler, or the native SamplerCustomAdvanced.")],
        )

    @classmethod
    def execute(
        cls,
        engine,
        positive,
        negative=None,
        video_cfg=3.0,
        video_stg=1.0,
        video_modality=3.0,
        video_rescale=0.7,
        audio_cfg=7.0,
        audio_stg=1.0,
        audio_modality=3.0,
        audio_rescale=0.7,
        stg_blocks="28",
        skip_step=0,
        rule="cfg",
        apg_eta=1.0,
        apg_norm=0.0,
        guidance_start=1.0,
        guidance_end=0.0,
        bins="",
    ) -> io.NodeOutput:
        blocks = parse_stg_blocks(stg_blocks, engine.engine.blocks)
        shared = {"stg_blocks": blocks, "skip_step": skip_step, "rule": TextRule(rule), "apg_eta": apg_eta, "apg_norm": apg_norm}
        video = Guidance(video_cfg, video_stg, video_modality, video_rescale, **shared)
        audio = Guidance(audio_cfg, audio_stg, audio_modality, audio_rescale, **shared)
        video, audio = (by_sigma(one, name, bins, guidance_start, guidance_end) for name, one in (("video", video), ("audio", audio)))
        if negative is None:
            check_negative(video, audio)  # here already: the sampler may stand behind a first stage
        return io.NodeOutput(
            EngineGuider(
                handle=engine,
                positive=conditioning_in(positive, "positive"),
                negative=None if negative is None else conditioning_in(negative, "negative"),
                video=video,
                audio=audio,
            )
        )


def _scales(stream: str, cfg: float) -> list[io.Input]:
    return [
        io.Float.Input(
            f"{stream}_cfg",
            default=cfg,
            min=0.0,
            max=100.0,
            step=0.1,
            tooltip=f"How strongly the {stream} follows the prompt and leaves the negative. 1: off (no negative forward).",
        ),
        io.Float.Input(
            f"{stream}_stg",
            default=1.0,
            min=0.0,
            max=100.0,
            step=0.1,
            tooltip=f"Spatio-temporal guidance of the {stream}: away from what it looks like without self-attention in stg_blocks. "
            "0: off.",
        ),
        io.Float.Input(
            f"{stream}_modality",
            default=3.0,
            min=0.0,
            max=100.0,
            step=0.1,
            tooltip=f"Keeps the {stream} in step with the other stream: away from what it looks like on its own. 1: off.",
        ),
        io.Float.Input(
            f"{stream}_rescale",
            default=0.7,
            min=0.0,
            max=1.0,
            step=0.05,
            tooltip=f"Pulls the spread of the guided {stream} back to that of the prompt alone, against overexposure. 0: off.",
        ),
    ]
