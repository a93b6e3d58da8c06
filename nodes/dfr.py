"""Diffusion fidelity rendering beyond what other nodes do: LTX25LatentReference and LTX25TemporalRounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import folder_paths
import torch
from comfy_api.latest import io

from ..ltx25.conditions import Reference
from ..ltx25.dfr import ETA, ROUNDS, SIGMAS, Keyframes, refine
from ..ltx25.errors import InputError, LTX25Error
from ..ltx25.shapes import clip_samples, sounding_latents
from .bridge import empty, join, keyframes_in, model_path, split, with_conditions
from .guider import own_guider
from .registry import stamp
from .run import node_run
from .sample import CONSUMED, report
from .upscale import FOLDER, opened_model

MASKED = "The noise mask of the latent is not read here: rounds make all of the clip anew, what it kept as well."


class LTX25LatentReference(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LTX25LatentReference",
            display_name="LTX-2.5 Latent Reference",
            category="LTX-2.5",
            description="Shows the model a smaller render of the same clip, as its latent, while it makes the large one: for a detailing IC-LoRA.",
            search_aliases=["IC-LoRA", "detailer", "pixel spatial upscaler", "DFR", "diffusion fidelity rendering", "reference latent"],
            inputs=[
                io.Latent.Input("latent", tooltip="The clip that is made, for example the reference after LTX-2.5 Latent Upscale."),
                io.Latent.Input("reference", tooltip="The smaller render, from LTX-2.5 Sampler. Its sides must be a whole number of times smaller, 2 for the published LoRA."),
                io.Float.Input("strength", default=1.0, min=0.0, max=1.0, step=0.01, tooltip="1 shows it as it is, lower as a noisier memory of it. 0 shows nothing of it: free frames are made in its place, which the clip sees."),
            ],
            outputs=[io.Latent.Output("latent", tooltip="The clip with the reference noted. The sampler's result has the clip's own length.")],
        )

    @classmethod
    def execute(cls, latent, reference, strength=1.0) -> io.NodeOutput:
        clip, shown = split(latent).video, split(reference).video
        if clip is None or shown is None:
            raise InputError("A reference shows a video to a video, and one of the two latents holds audio only; connect latents with video.")
        if empty(shown):
            raise InputError("The reference, or its end, is still empty, so it shows nothing; connect the latent that LTX-2.5 Sampler made of it.")
        factors = {whole // part if whole % part == 0 else 0 for whole, part in zip(clip.shape[3:], shown.shape[3:], strict=True)}
        if len(factors) > 1 or 0 in factors or shown.shape[2] != clip.shape[2]:
            raise InputError(
                f"the reference has {shown.shape[2]} x {shown.shape[3]} x {shown.shape[4]} cells and the clip {clip.shape[2]} x {clip.shape[3]} x "
                f"{clip.shape[4]}; wanted as many frames, and sides a whole number of times smaller, such as the render before LTX-2.5 Latent Upscale."
            )
        return io.NodeOutput(with_conditions(latent, Reference(shown, strength, factors.pop(), 1)))


class LTX25TemporalRounds(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LTX25TemporalRounds",
            display_name="LTX-2.5 Temporal Rounds",
            category="LTX-2.5",
            description="Doubles the frame rate of a finished clip, once or twice: frames are put between by an upscaler and made anew in tiles that "
            "meet at keyframes.",
            search_aliases=["DFR", "diffusion fidelity rendering", "temporal upscale", "frame interpolation", "slow motion", "48 fps", "60 fps"],
            inputs=[
                io.Guider.Input("guider", tooltip="From LTX-2.5 Guider: that of the first stage, without the detailing LoRA."),
                io.Latent.Input("latent", tooltip="The finished clip, from LTX-2.5 Sampler. Pictures noted on it stay at their moments."),
                io.Latent.Input("keyframes", tooltip="Of the same sampling, made on LTX-2.5 Keyframe Slots with grid segments. Tiles meet at them."),
                io.Combo.Input("upscale_model", options=folder_paths.get_filename_list(FOLDER), tooltip="The temporal upscaler, from models/latent_upscale_models."),
                io.Int.Input("rounds", default=1, min=0, max=ROUNDS, tooltip="How often the frame rate is doubled: 1 gives twice the frames, 2 four times. 0: the clip as it is, without padding."),
                io.Int.Input("seed", default=0, min=0, max=0xFFFFFFFFFFFFFFFF, control_after_generate=True, tooltip="Of the noise. Every tile draws its own."),
                io.Latent.Input("sound", optional=True, tooltip="The latent whose sound the clip keeps: that of the first stage. Without it, the clip's own."),
            ],
            outputs=[
                io.Latent.Output("latent", tooltip="The clip with its new frame rate, for the decode nodes. Its sound is the one before, without that of padding."),
                io.String.Output("report", tooltip="Seconds and memory of every phase, and the forwards that ran."),
            ],
        )

    @classmethod
    def execute(cls, guider, latent, keyframes, upscale_model, rounds=1, seed=0, sound=None) -> io.NodeOutput:
        engine, parts = own_guider(guider).handle.engine, split(latent)
        if parts.video is None:
            raise InputError("The latent holds audio only, and only video has frames to put others between; connect a latent with video.")
        frames = keyframes.get("keyframes")
        if not frames:
            raise InputError("keyframes do not say where they stand; connect the keyframes output of LTX-2.5 Sampler.")
        known = Keyframes(keyframes_in(keyframes, len(parts.video), len(frames)), frames)
        audio = parts.audio if sound is None else _sound(sound, len(parts.video))
        picture = replace(parts, audio=None, audio_mask=None, video_mask=None)
        with node_run(engine, bar="refine", previews=True) as run:
            job = guider.job(picture, 0.0, seed, SIGMAS, None, "euler_ancestral", ETA, run.watch)
            made = refine(engine, job, known, model_path(FOLDER, upscale_model), rounds, parts.frames(engine.video_shape(parts.video).frames), run.watch)
            masked = rounds > 0 and parts.video_mask is not None and bool((parts.video_mask < 1).any())
            run.tell([*made.notices, *([MASKED] if masked else [])])
        out = {key: value for key, value in latent.items() if key not in (*CONSUMED, "noise_mask", "clip_frames")}
        if audio is not None and parts.clip_frames is not None:  # the padding's goes with its picture: LTX-2.5 Extend would keep it
            audio = audio[:, :, : sounding_latents(clip_samples(parts.clip_frames, job.frame_rate))]
        out.update(samples=join(made.video, audio), frame_rate=job.frame_rate * 2**rounds, seed=seed)
        return io.NodeOutput(out, report(made, run))

    @classmethod
    def validate_inputs(cls, upscale_model) -> bool | str:
        """Runs before the first node of the prompt: a wrong file is not found out after two stages. None: over a link, not known yet."""
        if upscale_model is None:
            return True
        try:
            doubles = opened_model(upscale_model).time == 2
        except LTX25Error as error:
            return str(error)
        return doubles or f"{upscale_model} enlarges the picture and does not double the frames; choose the temporal upscaler."

    @classmethod
    def fingerprint_inputs(cls, upscale_model=None, **_):
        """A file that changed on disk makes this node run again."""
        path = folder_paths.get_full_path(FOLDER, upscale_model) if upscale_model else None
        return stamp(path) if path else None


def _sound(latent: dict[str, Any], batch: int) -> torch.Tensor:
    """The sound of `latent`, one for each clip. Raises InputError where it has none, or another number: clips would go out without."""
    audio = split(latent).audio
    if audio is None:
        raise InputError("sound is a latent without any; connect the latent of the first stage, or nothing to keep the clip's own.")
    if len(audio) not in (1, batch):
        raise InputError(f"sound is of {len(audio)} clips and the latent of {batch}; connect the latent of the first stage of the same clip(s).")
    return audio.expand(batch, -1, -1, -1)
