"""Sound that a clip is told, and which stretches of a clip are made anew: LTX25AudioCondition, LTX25Retake, LTX25Extend."""

from __future__ import annotations

import math
from typing import Any

import torch
from comfy_api.latest import io

from ..ltx25.conditions import Frozen, Image, KeyframeIndex, ReferenceAudio, TemporalRegions, check_window
from ..ltx25.errors import InputError
from ..ltx25.extend import extend, settled
from ..ltx25.latents import audio_positions, video_positions
from ..ltx25.moments import parse_stretches
from ..ltx25.shapes import PUBLISHED_COMPRESSION, AudioLatentShape, VideoLatentShape
from .bridge import EXTENSION, FRAME_RATE, Latents, empty, extension_made, join, split, whole_mask, with_conditions
from .encode import encode_soundtrack, sound_of
from .load import EngineType
from .run import node_run

MODES = ("soundtrack", "voice")
STREAMS = ("both", "video", "audio")


class LTX25AudioCondition(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LTX25AudioCondition",
            display_name="LTX-2.5 Audio Condition",
            category="LTX-2.5",
            description="Brings your own sound: kept as the clip's soundtrack that the video follows, or as a voice the clip speaks with.",
            search_aliases=["audio to video", "lip sync", "soundtrack", "voice reference", "LTXVReferenceAudio", "talking", "music video"],
            inputs=[
                EngineType.Input("engine", tooltip="From Load LTX-2.5 Checkpoint."),
                io.Latent.Input("latent", tooltip="The clip."),
                io.Audio.Input("audio", tooltip="Any sample rate and layout. A soundtrack is cut, or padded with silence, to the length of the clip."),
                io.Combo.Input(
                    "mode",
                    options=list(MODES),
                    default="soundtrack",
                    tooltip="soundtrack: this sound is the clip's, bit for bit, and the video is made to it. voice: new sound is made that resembles this voice.",
                ),
                io.Float.Input("strength", default=1.0, min=0.0, max=1.0, step=0.01, tooltip="voice: 1 shows the voice as it is, lower as a noisier memory of it. 0 shows nothing of it: free sound is made in its place, which the clip hears. Not read for a soundtrack."),
            ],
            outputs=[io.Latent.Output("latent", tooltip="The clip with this sound, for LTX-2.5 Sampler. Save the video with your own sound: it is better than any decoded one.")],
        )

    @classmethod
    def execute(cls, engine, latent, audio, mode="soundtrack", strength=1.0) -> io.NodeOutput:
        parts = split(latent)
        with node_run(engine.engine, bar="encode.audio") as run:
            wave, rate = sound_of(audio)
            batch = len(parts.audio if parts.video is None else parts.video)
            if len(wave) not in (1, batch):
                raise InputError(f"{len(wave)} sounds were given for {batch} clip(s), wanted one, or one for each.")
            if mode == "voice":
                return io.NodeOutput(with_conditions(latent, ReferenceAudio(engine.engine.encode_audio(wave, rate, run.watch), strength)))
            if parts.video is None:
                raise InputError("The latent holds audio only: with a soundtrack kept there is nothing left to make; use Empty LTX-2.5 Latent.")
            frames = engine.engine.video_shape(parts.video).frames
            sound = encode_soundtrack(engine.engine, wave, rate, frames, parts.frame_rate or FRAME_RATE, run.watch)
        samples = join(parts.video, sound.expand(batch, -1, -1, -1))
        return io.NodeOutput(with_conditions({**latent, "samples": samples}, Frozen("audio")))


class LTX25Retake(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LTX25Retake",
            display_name="LTX-2.5 Retake",
            category="LTX-2.5",
            description="Makes stretches of a finished clip anew and keeps the rest bit for bit.",
            search_aliases=["retake", "inpaint time", "regenerate part", "temporal mask", "edit video", "noise mask", "replace audio"],
            inputs=[
                io.Latent.Input("latent", tooltip="A whole clip, from Encode Video VAE or LTX-2.5 Sampler."),
                io.String.Input("stretches", default="1-2", tooltip="Seconds to make anew, with commas: 1-2.5, 4-5. A latent frame (8 video frames, 1/25 s of sound) that a stretch touches is made anew as a whole."),
                io.Combo.Input("streams", options=list(STREAMS), default="both", tooltip="What is made anew there. The other stream stays exactly as it is, in full length, and is still seen."),
            ],
            outputs=[io.Latent.Output("latent", tooltip="The clip with these stretches noted, for LTX-2.5 Sampler.")],
        )

    @classmethod
    def execute(cls, latent, stretches="1-2", streams="both") -> io.NodeOutput:
        latent, windows = extension_made(latent), parse_stretches(stretches)
        parts = split(latent)
        there = [name for name in ("video", "audio") if getattr(parts, name) is not None]
        made = [name for name in there if streams in ("both", name)]
        if not made:
            raise InputError(f"the {streams} is to be made anew, but the latent has no {streams}; choose {there[0]}.")
        ends = _ends(parts)
        for name in made:
            for start, end in windows:
                check_window(name, start, end, ends[name])
        for name in there:
            if empty(getattr(parts, name)):
                raise InputError(f"the {name} of the latent, or its end, is still empty, so there is nothing to keep around a stretch; sample the clip first, or connect LTX-2.5 Retake before it is made longer.")
        kept = [Frozen(name) for name in there if name not in made]
        return io.NodeOutput(with_conditions(latent, *(TemporalRegions(name, windows) for name in made), *kept))


class LTX25Extend(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LTX25Extend",
            display_name="LTX-2.5 Extend",
            category="LTX-2.5",
            description="Makes a clip longer, picture and sound together: what is there stays bit for bit, the model goes on from it.",
            search_aliases=["extend video", "continue", "longer", "loop", "looping"],
            inputs=[
                EngineType.Input("engine", tooltip="From Load LTX-2.5 Checkpoint."),
                io.Latent.Input("latent", tooltip="A whole clip, from Encode Video VAE or LTX-2.5 Sampler."),
                io.Int.Input("frames", default=48, min=8, max=8192, step=8, tooltip="How many frames are added, a multiple of 8."),
                io.Boolean.Input("loop", default=False, tooltip="The last frame becomes the first one again, so that the clip can be repeated."),
            ],
            outputs=[io.Latent.Output("latent", tooltip="The longer clip, for LTX-2.5 Sampler.")],
        )

    @classmethod
    def execute(cls, engine, latent, frames=48, loop=False) -> io.NodeOutput:
        latent = extension_made(latent)
        parts = split(latent)
        if parts.video is None:
            raise InputError("The latent holds audio only, and a clip with video is wanted; use Encode Video VAE or LTX-2.5 Sampler.")
        if parts.clip_frames is not None:
            raise InputError("The clip is padded for keyframes in segments, and what is added would follow the padding; connect it to LTX-2.5 Temporal Rounds first.")
        if empty(parts.video) and EXTENSION not in latent:
            raise InputError("There is no clip to make longer yet, the video of the latent is empty; use Encode Video VAE or LTX-2.5 Sampler, or ask for all frames in Empty LTX-2.5 Latent.")
        rate, compression = parts.frame_rate or FRAME_RATE, engine.engine.compression
        kept = settled(parts.conditions, parts.video, parts.audio, parts.video_mask, parts.audio_mask, engine.engine.video_shape(parts.video).frames, rate, compression)
        audio_mask = kept.audio_mask
        if audio_mask is None and parts.audio is not None and empty(parts.audio):  # a given picture without sound: all of it is made
            audio_mask = whole_mask(parts.audio)
        longer = extend(parts.video, parts.audio, kept.video_mask, audio_mask, frames, rate, compression)
        mask = join(longer.video_mask, longer.audio_mask)
        out: dict[str, Any] = {**latent, "samples": join(longer.video, longer.audio), "noise_mask": mask, EXTENSION: mask, "conditions": kept.conditions}
        return io.NodeOutput(with_conditions(out, *([KeyframeIndex(_first(parts), -1, 1.0, 1)] if loop else [])))


def _first(parts: Latents) -> torch.Tensor:
    """The first frame of the clip as it will be: a picture that is to stand in its place, else what is there."""
    return next((item.latent for item in parts.conditions if isinstance(item, Image) and item.frame == 0 and item.strength), parts.video[:, :, :1])


def _ends(parts: Latents) -> dict[str, float]:
    """Where each stream of a latent ends, s; nowhere for a video whose frame rate only the sampler knows."""
    ends = {}
    if parts.video is not None:
        shape = VideoLatentShape(*parts.video.shape[1:])
        ends["video"] = float(video_positions(shape, PUBLISHED_COMPRESSION, parts.frame_rate)[0].max()) if parts.frame_rate else math.inf
    if parts.audio is not None:
        ends["audio"] = float(audio_positions(AudioLatentShape(*parts.audio.shape[1:])).max())
    return ends
